"""Refusals and failures in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class APIError(Exception):
    """An answer that is an error. param: the field at fault; code: a word that programs can act on; more: further members.

    retry_seconds: when to come again, for those who were turned away.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        more: Mapping[str, Any] | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.more = status, message, code, param, dict(more or {})
        self.retry_seconds = retry_seconds

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status in (408, 413):  # the rest of the body would be taken for the next request
            return {"Connection": "close"}
        return {} if self.retry_seconds is None else {"Retry-After": str(self.retry_seconds)}

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that were broken, else the code: what refusals are counted by."""
        found = [finding["rule"] for finding in self.more.get("findings", ()) if finding["severity"] == "error"]
        return tuple(dict.fromkeys(found)) or (str(self.more.get("rule", self.code)),)

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}}
