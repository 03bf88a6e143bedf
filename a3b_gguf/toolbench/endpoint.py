"""Who is asked: an OpenAI-compatible endpoint, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.toolbench.question import Message
from a3b_gguf.toolbench.score import Reply

Thinking = Literal["on", "off", "auto"]


class Refused(Exception):
    """The endpoint answered 4xx: the request was judged and not taken. code: its error code or rule id."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


class NoAnswer(Exception):
    """The endpoint failed (5xx, time-out, no JSON): says nothing about the model."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: with or without /v1 at its end; model: its name there, the first that it lists when empty."""

    url: str
    model: str = ""
    key: str = ""
    timeout_seconds: float = 300.0

    @property
    def base(self) -> str:
        base = self.url.rstrip("/")
        return base if base.endswith("/v1") else base + "/v1"

    def check(self) -> Endpoint:
        """This endpoint with its model's name. Raises UsageError for what is no URL, MachineLacks when nobody answers."""
        if not _is_address(self.url):
            raise UsageError(f"{self.url!r} is not the address of an endpoint", "give one like http://127.0.0.1:8080/v1, or --replay")
        if not (self.key.isascii() and self.key.isprintable()):
            raise UsageError("--api-key: a key is printable ASCII, this one is not", "look for a line's end or a quote in it")
        try:
            listed = self._ask("/models", None)
        except (Refused, NoAnswer) as error:
            raise MachineLacks(f"{self.base}/models does not answer: {error}", "start the server first, and check the key") from error
        data = listed.get("data")
        names = [each.get("id") for each in data if isinstance(each, dict)] if isinstance(data, list) else []
        if self.model and self.model not in names:
            raise UsageError(f"--model: {self.base} has no {self.model!r}", f"it lists: {', '.join(map(str, names)) or 'nothing'}")
        if not self.model and not names:
            raise MachineLacks(f"{self.base}/models lists no model", "name one with --model")
        return Endpoint(self.url, self.model or str(names[0]), self.key, self.timeout_seconds)

    def ask(self, messages: Sequence[Message], tools: Sequence[Message], thinking: Thinking, max_tokens: int) -> Reply:
        """One turn at temperature 0. Raises Refused or NoAnswer."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "tools": list(tools),
            "temperature": 0,
            "seed": 1,
            "max_tokens": max_tokens,
        }
        if thinking != "auto":
            body["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
        answer = self._ask("/chat/completions", body)
        try:
            choice = answer["choices"][0]
            return Reply(dict(choice["message"]), str(choice["finish_reason"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise NoAnswer(f"the answer has no choices[0].message: {json.dumps(answer)[:200]}") from error

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
                told = json.load(response)
        except urllib.error.HTTPError as error:
            raise _failure(error) from error
        except (OSError, ValueError, HTTPException, RecursionError) as error:
            raise NoAnswer(str(getattr(error, "reason", error)) or type(error).__name__) from error
        if not isinstance(told, dict):
            raise NoAnswer("the answer is not a JSON object")
        return told


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not any(c.isspace() for c in url)
    except ValueError:  # a bracket that is not closed, a port that is no number or too large
        return False


def _failure(error: urllib.error.HTTPError) -> Refused | NoAnswer:
    text = error.read(65536).decode(errors="replace")
    try:
        said = json.loads(text)["error"]
        message, code = str(said["message"]), str(said.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = text[:200], ""
    return Refused(error.code, message, code) if 400 <= error.code < 500 else NoAnswer(f"{error.code}: {message}")
