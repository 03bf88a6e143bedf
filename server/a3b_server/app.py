"""Puts the routes, the API keys and the shape of errors into one application. The only place that wires the web framework."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from a3b_server.errors import APIError
from a3b_server.metrics import Metrics
from a3b_server.responses import JSONAnswer
from a3b_server.routes import ROUTES, Route
from a3b_server.service import Service
from a3b_server.supervisor import Supervisor


def create_app(service: Service, supervisor: Supervisor | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """The application. With a supervisor, its engine lives as long as the application. origins: whose web pages may ask; "*": all."""
    app = FastAPI(title="a3b", openapi_url=None, lifespan=_lifespan(supervisor), redirect_slashes=False)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    for route in ROUTES:
        app.add_route(route.path, _endpoint(route, service), methods=[route.method])
    app.add_exception_handler(APIError, _on_api_error(service.metrics))
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _lifespan(supervisor: Supervisor | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if supervisor is not None:
            supervisor.start()
        try:
            yield
        finally:
            if supervisor is not None:
                await supervisor.stop()

    return lifespan


def _endpoint(route: Route, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if not route.is_open:
            _check_key(request, service.options.api_keys)
        return await route.handler(request, service)

    return endpoint


def _check_key(request: Request, keys: tuple[str, ...]) -> None:
    """Compares with every key and in constant time, so that the time taken tells nothing."""
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # the bytes that were sent, whatever their encoding
    matches = [hmac.compare_digest(sent, key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise APIError(401, "the API key is missing or wrong; send Authorization: Bearer KEY", "invalid_api_key")


def _on_api_error(metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        metrics.refused(error.rules)
        return JSONAnswer(error.body(), status_code=error.status, headers=error.headers)

    return answer


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: a path that is not there, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        known = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        said = APIError(405, f"{path} answers {known}, not {request.method}", "method_not_allowed")
    elif error.status_code == 404:
        meant = _meant(path)
        hint = f"; {meant.method} {meant.path} is there" if meant else ""
        said = APIError(404, f"there is nothing at {request.method} {path}{hint}", "not_found")
    else:
        said = APIError(error.status_code, str(error.detail), "http_error")
    return JSONAnswer(said.body(), status_code=said.status, headers=error.headers)


def _meant(path: str) -> Route | None:
    """The endpoint that a base URL without /v1, with it twice, or a slash too many has missed."""
    asked = path.rstrip("/")
    return next((route for route in ROUTES if asked.endswith(route.path.removeprefix("/v1"))), None)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The framework hands the error on to uvicorn, which logs it with its traceback."""
    said = APIError(500, f"internal error: {type(error).__name__}; the server's log has more", "internal_error")
    return JSONAnswer(said.body(), status_code=500)
