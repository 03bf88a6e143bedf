"""Every endpoint, in one table. A handler gets the request and the service and returns a response, or raises APIError."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request, Response

from a3b_server.routes.chat import chat_completions
from a3b_server.routes.completions import completions
from a3b_server.routes.embeddings import embeddings
from a3b_server.routes.meta import health, model, models
from a3b_server.routes.ops import cancel, metrics, plan, slots
from a3b_server.routes.tokens import apply_template, detokenize, tokenize
from a3b_server.service import Service

Handler = Callable[[Request, Service], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """is_open: answered without an API key."""

    method: str
    path: str
    handler: Handler
    is_open: bool = False


ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions),
    Route("POST", "/v1/completions", completions),
    Route("POST", "/v1/embeddings", embeddings),
    Route("POST", "/tokenize", tokenize),
    Route("POST", "/detokenize", detokenize),
    Route("POST", "/apply-template", apply_template),
    Route("POST", "/cancel", cancel),
    Route("GET", "/v1/models", models),
    Route("GET", "/v1/models/{name}", model),
    Route("GET", "/health", health, is_open=True),
    Route("GET", "/metrics", metrics),
    Route("GET", "/slots", slots),
    Route("GET", "/plan", plan),
)
