"""The HTTP side's end of the engine: starts its process, hands every event to the request that waits, brings it back when it dies."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, Literal

from a3b_gguf.errors import A3BError, BadInput, MachineLacks, UsageError
from a3b_server.child import Child, Target, how
from a3b_server.generation import SHUTTING_DOWN, Drawn, Embedding, EngineUnavailable, Generation, QueueFull, RequestFailed
from a3b_server.messages import (
    Begun,
    Cancel,
    Dead,
    Embed,
    Embedded,
    Event,
    Facts,
    Failed,
    Finished,
    Look,
    Ready,
    Snapshot,
    Stop,
    Submit,
    Tokens,
)

__all__ = ["Drawn", "EngineUnavailable", "Generation", "QueueFull", "RequestFailed", "State", "Supervisor"]

# starting: loading, for the first time or again. busy: alive, and the queue is full. dead: it will not come back.
State = Literal["starting", "ready", "busy", "dead"]
Maker = Callable[[Submit, Callable[[str], None]], Generation]
N_WAITING = 64  # requests that may wait for a slot
MOST_DEATHS = 8  # in a row, without a request served between them
GRACE_SECONDS = 5.0
LONGEST_PAUSE = 60.0  # seconds before a restart; the first comes at once, then 1, 2, 4 ...


class Supervisor:
    """Owns the engine's process, one after another. `target(pipe, config)` runs in it; tests pass another one.

    make: what a request's Generation is made by. grace: seconds in which the process must end when it is asked to. All methods belong to
    the event loop that start() was called in. A model that does not load the first time is not tried again; an engine that dies later is
    restarted, and those whose answers were under way are told when to come back.
    """

    def __init__(
        self, target: Target, config: Any, n_waiting: int = N_WAITING, most_deaths: int = MOST_DEATHS, make: Maker = Generation,
        grace: float = GRACE_SECONDS,
    ) -> None:  # fmt: skip
        self._grace = grace
        self._target, self._config, self._n_waiting, self._most_deaths, self._make = target, config, n_waiting, most_deaths, make
        self.facts: Facts | None = None  # of the newest engine that was loaded
        self.death: A3BError | None = None  # why the last one died
        self.n_restarts = 0
        self._last_words: A3BError | None = None  # of the engine that lives
        self._is_up, self._stopping, self._deaths = False, False, 0
        self._generations: dict[str, Generation] = {}  # in flight, by their id: what gets the events of a request
        self._embeddings: dict[str, Embedding] = {}
        self._looking: list[asyncio.Future[Snapshot]] = []
        self._settled, self._gone = asyncio.Event(), asyncio.Event()
        self._child: Child | None = None
        self._restart: asyncio.Task[None] | None = None
        self._started, self._between, self._last_end = 0.0, 1.0, 0.0

    @property
    def state(self) -> State:
        if self._gone.is_set():
            return "dead"
        if not self._is_up or self.facts is None:
            return "starting"
        return "busy" if self.n_in_flight >= self.facts.n_seq_max + self._n_waiting else "ready"

    @property
    def n_in_flight(self) -> int:
        """Requests that the engine has not finished with, those that wait or are being cancelled among them."""
        return len(self._generations) + len(self._embeddings)

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the process and returns; `ready()` waits for the model."""
        self._started, self._last_words = time.monotonic(), None
        self._child = Child(self._target, self._config, self._received, self._buried)

    async def ready(self) -> Facts:
        """Waits for the model to be loaded. Raises the A3BError that kept it from loading."""
        await self._settled.wait()
        if self.facts is None:
            raise self.death or MachineLacks("the engine was stopped while it loaded")
        return self.facts

    async def gone(self) -> None:
        """Waits for the end of the last process."""
        await self._gone.wait()

    def submit(self, request: Submit) -> Generation:
        """Hands a request to the engine. Raises EngineUnavailable when there is none, QueueFull when too many wait."""
        child = self._ready_child()
        generation = self._make(request, self._cancel)
        self._generations[request.id] = generation
        child.send(request)
        return generation

    def embed(self, request: Embed) -> Embedding:
        """The same for texts that are to become vectors."""
        child = self._ready_child()
        embedding = Embedding(request.id, self._cancel)
        self._embeddings[request.id] = embedding
        child.send(request)
        return embedding

    def _ready_child(self) -> Child:
        if self.state in ("starting", "dead") or self._stopping or self._child is None:
            raise self._unavailable()
        if self.state == "busy":
            wait = math.ceil(min(60.0, max(1.0, self._between)))
            raise QueueFull(f"{self.n_in_flight} requests are being served or wait, which is the limit", wait)
        return self._child

    def cancel(self, request_id: str) -> int:
        """Ends a request, all choices of it, that the engine has not finished with; how many of them there were."""
        found = [(name, waiting) for name, waiting in self._in_flight() if name == request_id or name.startswith(f"{request_id}-")]
        for name, waiting in found:
            waiting.cancelled = True
            self._cancel(name)
        return len(found)

    def _in_flight(self) -> Iterator[tuple[str, Generation | Embedding]]:
        yield from self._generations.items()
        yield from self._embeddings.items()

    async def look(self) -> Snapshot:
        """What the engine does now. Raises EngineUnavailable when there is none."""
        if not self._is_up or self._stopping or self._child is None:
            raise self._unavailable()
        answer = asyncio.get_running_loop().create_future()
        self._looking.append(answer)
        self._child.send(Look())
        found: Snapshot = await answer
        return found

    async def stop(self) -> None:
        """Ends the process: it is asked first, and killed after the grace or when it has not even loaded. Its memory is free then.

        Requests that are still in flight end with EngineUnavailable, before the process does: it may be in the middle of a long call,
        or have texts to save. New ones are refused at once.
        """
        if self._stopping or self._child is None:
            if self._stopping:
                await self._gone.wait()
            return
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
        if not self._is_up:
            self._child.kill()
        self._child.send(Stop())
        self._end_all(SHUTTING_DOWN, None)
        await self._child.end(self._grace)
        self._child = None
        self._settled.set()
        self._gone.set()

    def kill(self) -> None:
        """Ends the process that stop() waits for, whatever it is doing. What it has not saved is lost."""
        if self._child is not None:
            self._child.kill()

    def _unavailable(self) -> EngineUnavailable:
        if self._stopping:
            return EngineUnavailable(SHUTTING_DOWN)
        if self._gone.is_set():
            return EngineUnavailable(f"the engine is gone: {self.death.message if self.death else 'it was stopped'}")
        if self.facts is None:
            return EngineUnavailable("the model is still loading", 5)
        return EngineUnavailable("the engine died and is being restarted", self._retry_seconds())

    def _retry_seconds(self) -> int:
        """When the next engine should be up, from how long the last one took to load."""
        load = self.facts.load_seconds if self.facts else 0.0
        return max(1, math.ceil(self._pause() + load - (0.0 if self._is_up else time.monotonic() - self._started)))

    def _pause(self) -> float:
        return 0.0 if self._deaths <= 1 else float(min(LONGEST_PAUSE, 2 ** (self._deaths - 2)))

    def _cancel(self, request_id: str) -> None:
        if self._child is not None:
            self._child.send(Cancel(request_id))

    def _received(self, child: Child, events: tuple[Event, ...]) -> None:
        if not self._stopping:  # else nobody waits for any of them
            for event in events:
                self._route(event)

    def _route(self, event: Event) -> None:
        match event:
            case Begun(request_id, n_cached):
                self._generations[request_id].n_cached = n_cached
            case Tokens(pairs, logprobs):
                for (request_id, token), told in zip_longest(pairs, logprobs):
                    self._generations[request_id].put(Drawn(token, told))
            case Finished() | Failed() | Embedded():
                self._end(event)
            case Ready(facts):
                self.facts, self._is_up = facts, True
                self._settled.set()
            case Snapshot():
                answer = self._looking.pop(0)
                if not answer.done():  # nobody waits any more
                    answer.set_result(event)
            case Dead():
                self._last_words = _error(event)

    def _end(self, event: Finished | Failed | Embedded) -> None:
        """Hands a request its last event. Keeps the mean time between two ends, which tells when a full queue will have room."""
        match event:
            case Finished():
                self._generations.pop(event.id).put(event)
            case Embedded():
                self._embeddings.pop(event.id).put(event)
            case Failed(request_id, message):
                waiting = self._generations.pop(request_id, None) or self._embeddings.pop(request_id)
                waiting.put(RequestFailed(message))
        self._deaths = 0
        now = time.monotonic()
        if self._last_end:
            self._between += 0.1 * (now - self._last_end - self._between)
        self._last_end = now

    def _buried(self, child: Child, exitcode: int | None) -> None:
        """The process is gone. Everyone who waited for it learns so, and the next one is started."""
        self._is_up = False
        if self._stopping:
            return
        self._deaths += 1
        message = f"the engine's process ended with {how(exitcode)}"
        self.death = self._last_words or MachineLacks(message, "its last words are above, on standard error")
        self._started = time.monotonic()
        goes_on = self.facts is not None and self._deaths <= self._most_deaths
        self._end_all(self.death.message, self._retry_seconds() if goes_on else None)
        if goes_on:
            self._restart = asyncio.get_running_loop().create_task(self._again(child))
        else:
            self._settled.set()
            self._gone.set()

    async def _again(self, child: Child) -> None:
        await child.end(0)
        await asyncio.sleep(self._pause())
        self.n_restarts += 1
        self.start()

    def _end_all(self, message: str, retry_seconds: int | None) -> None:
        for _, waiting in self._in_flight():
            waiting.put(EngineUnavailable(message, retry_seconds))
        self._generations.clear()
        self._embeddings.clear()
        for answer in self._looking:
            if not answer.done():
                answer.set_exception(EngineUnavailable(message, retry_seconds))
        self._looking.clear()


def _error(dead: Dead) -> A3BError:
    kinds = {kind.exit_code: kind for kind in (UsageError, BadInput, MachineLacks)}
    return kinds.get(dead.exit_code, A3BError)(dead.message, dead.hint)
