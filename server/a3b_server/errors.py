"""Refusals and failures in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RETRY_SECONDS = 5  # what a client that was turned away is told to wait


class APIError(Exception):
    """An answer that is an error. param: the field at fault; code: a word that programs can act on; more: further members."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None, more: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.more = status, message, code, param, dict(more or {})

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_SECONDS)} if self.code in ("queue_full", "engine_starting") else {}

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}}
