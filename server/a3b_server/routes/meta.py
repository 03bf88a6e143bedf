"""GET /v1/models and /health: what is served, and whether it can be."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from a3b_server.errors import APIError
from a3b_server.responses import JSONAnswer
from a3b_server.service import Service


async def models(request: Request, service: Service) -> Response:
    return JSONAnswer({"object": "list", "data": [_model(service)]})


async def model(request: Request, service: Service) -> Response:
    name = request.path_params["name"]
    if name != service.model:
        raise APIError(404, f"there is no model {name!r}; this server has {service.model!r}", "model_not_found", "model")
    return JSONAnswer(_model(service))


async def health(request: Request, service: Service) -> Response:
    """200 only when a request would be served: load balancers and the demo wait for it."""
    engine = service.engine
    body: dict[str, Any] = {"status": engine.state}
    if engine.state == "dead" and engine.death is not None:
        body["reason"] = engine.death.message
    return JSONAnswer(body, status_code=200 if engine.state == "ready" else 503)


def _model(service: Service) -> dict[str, Any]:
    facts = service.engine.facts
    more = {} if facts is None else {"context_length": facts.n_ctx_seq}
    return {"id": service.model, "object": "model", "created": service.created, "owned_by": "a3b", **more}
