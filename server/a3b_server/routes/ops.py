"""GET /metrics, /slots and /plan, POST /cancel: for whoever runs the server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import Request, Response

from a3b_server.clip import ClipCounts
from a3b_server.errors import APIError
from a3b_server.messages import Snapshot
from a3b_server.metrics import CONTENT_TYPE
from a3b_server.requests import read
from a3b_server.responses import JSONAnswer
from a3b_server.schema import CancelRequest
from a3b_server.service import Service
from a3b_server.supervisor import EngineUnavailable

LOOK_SECONDS = 5.0  # half of what Prometheus waits for a scrape


async def metrics(request: Request, service: Service) -> Response:
    """Prometheus' text format; also while there is no engine, which is a number too."""
    engine = service.engine
    text = service.metrics.text(engine.state, engine.n_restarts, engine.n_in_flight, engine.facts, await _look(service))
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def slots(request: Request, service: Service) -> Response:
    """What every slot does. No text of a request: only lengths."""
    snapshot = await _look(service)
    if snapshot is None:
        raise APIError(503, "there is no engine to ask", "engine_dead" if service.engine.state == "dead" else "engine_starting")
    held, most = snapshot.checkpoints
    return JSONAnswer(
        {
            "slots": [asdict(slot) for slot in snapshot.slots],
            "n_waiting": snapshot.n_waiting,
            "checkpoints": {"held": held, "most": most},
            "counts": asdict(snapshot.counts),
            "clip": _clip(snapshot.clip),
        }
    )


def _clip(counts: ClipCounts | None) -> dict[str, Any] | None:
    if counts is None:
        return None
    by_site = {f"{layer} {site}": number for (layer, site), number in counts.by_site.items()}
    numbers = {"watched": counts.n_watched, "beyond": counts.n_beyond, "clamped": counts.n_clamped, "worst": counts.worst}
    return {**numbers, "by_site": by_site, "failure": counts.failure}


async def cancel(request: Request, service: Service) -> Response:
    """Ends a request by its id; whoever waits for it gets status 409, or an error as the last event of a stream."""
    wanted = (await read(CancelRequest, request, service)).request
    count = service.engine.cancel(wanted.id)
    if not count:
        raise APIError(404, f"no request {wanted.id[:60]!r} is under way", "not_found", "id")
    return JSONAnswer({"id": wanted.id, "cancelled": count})


async def plan(request: Request, service: Service) -> Response:
    """The plan by which the model was loaded, as `a3b plan --json` prints it."""
    if service.plan is None:
        raise APIError(404, "this server was not started from a plan", "not_found")
    return JSONAnswer(dict(service.plan))


async def _look(service: Service) -> Snapshot | None:
    """None while there is no engine, or when it computes for so long that whoever asks would give up."""
    try:
        return await asyncio.wait_for(service.engine.look(), LOOK_SECONDS)
    except (EngineUnavailable, TimeoutError):
        return None
