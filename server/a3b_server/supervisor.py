"""The HTTP side's end of the engine: starts its process, hands every event to the request that waits for it, sees it die."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal

from a3b_gguf.errors import A3BError, BadInput, MachineLacks, UsageError
from a3b_server.messages import Cancel, Command, Dead, Event, Facts, Failed, Finished, Ready, Stop, Submit, Tokens

Target = Callable[[Connection, Any], None]
State = Literal["starting", "ready", "dead"]
SHUTTING_DOWN = "the server is shutting down"
N_WAITING = 64  # requests that may wait for a slot


class EngineUnavailable(Exception):
    """There is no engine to ask, or it went away in the middle of an answer."""


class QueueFull(Exception):
    """As many requests wait as may wait."""


class RequestFailed(Exception):
    """The engine goes on, but could not serve this request."""


class Generation:
    """The tokens of one request, as they come. Whoever holds it must close it, or the engine works on for nobody."""

    def __init__(self, request: Submit, cancel: Callable[[str], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._items: asyncio.Queue[int | Finished | Exception] = asyncio.Queue()
        self._over = False

    async def items(self) -> AsyncGenerator[int | Finished, None]:
        """Tokens, then one Finished. Raises EngineUnavailable or RequestFailed instead of ending early."""
        while True:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Finished) and item.reason == "cancelled":  # not by close(): then nobody would be asking
                raise EngineUnavailable(SHUTTING_DOWN)
            yield item
            if isinstance(item, Finished):
                return

    def put(self, item: int | Finished | Exception) -> None:
        self._over = self._over or not isinstance(item, int)
        self._items.put_nowait(item)

    def close(self) -> None:
        """Cancels what is still running. The slot is free as soon as the engine has finished its current call."""
        if not self._over:
            self._over = True
            self._cancel(self.request.id)


class Supervisor:
    """Owns the engine's process. `target(pipe, config)` runs in it; tests pass another one.

    All methods belong to the event loop that start() was called in. Two threads move messages, since a pipe can block.
    """

    def __init__(self, target: Target, config: Any, n_waiting: int = N_WAITING) -> None:
        self._target, self._config, self._n_waiting = target, config, n_waiting
        self.state: State = "starting"
        self.facts: Facts | None = None
        self.death: A3BError | None = None
        self._stopping = False
        self._in_flight: dict[str, Generation] = {}
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        self._settled, self._gone = asyncio.Event(), asyncio.Event()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._threads: list[threading.Thread] = []

    @property
    def n_in_flight(self) -> int:
        """Requests that the engine has not finished with, those that wait or are being cancelled among them."""
        return len(self._in_flight)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process and returns; `ready()` waits for the model."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._target, args=(theirs, self._config), name="a3b-engine", daemon=True)
        self._process.start()
        theirs.close()  # or the pipe would never end
        self._loop = asyncio.get_running_loop()
        self._threads = [threading.Thread(target=work, name=f"engine-{work.__name__}", daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    async def ready(self) -> Facts:
        """Waits for the model to be loaded. Raises the A3BError that kept it from loading."""
        await self._settled.wait()
        if self.facts is None:
            raise self.death or MachineLacks("the engine was stopped while it loaded")
        return self.facts

    async def gone(self) -> None:
        """Waits for the end of the process."""
        await self._gone.wait()

    def submit(self, request: Submit) -> Generation:
        """Hands a request to the engine. Raises EngineUnavailable when there is none, QueueFull when too many wait."""
        if self.facts is None or self.state != "ready":
            raise EngineUnavailable("the model is still loading" if self.state == "starting" else "the engine is gone")
        if self.n_in_flight >= self.facts.n_seq_max + self._n_waiting:
            raise QueueFull(f"{self.n_in_flight} requests are being served or wait, which is the limit")
        generation = Generation(request, self._cancel)
        self._in_flight[request.id] = generation
        self._outbox.put(request)
        return generation

    async def stop(self, grace: float = 5.0) -> None:
        """Ends the process: it is asked first, and killed after `grace` seconds or when it has not even loaded.

        Requests that are still in flight end with EngineUnavailable.
        """
        if self._process is None:
            return
        if self._stopping:
            await self._gone.wait()
            return
        self._stopping = True
        if self.state == "starting":
            self._process.kill()
        self._outbox.put(Stop())
        await asyncio.to_thread(self._process.join, grace)
        if self._process.exitcode is None:
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._outbox.put(None)
        await self._gone.wait()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._pipe.close()
        self._process.close()
        self._process = None

    def _cancel(self, request_id: str) -> None:
        self._outbox.put(Cancel(request_id))

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self._pipe.send(command)
            except OSError:  # the process is gone, which the reader notices
                return

    def _read(self) -> None:
        assert self._process is not None
        while True:
            try:
                events = self._pipe.recv()
            except (EOFError, OSError):
                break
            self._loop.call_soon_threadsafe(self._route, events)
        self._process.join()
        self._loop.call_soon_threadsafe(self._buried, self._process.exitcode)

    def _route(self, events: tuple[Event, ...]) -> None:
        for event in events:
            match event:
                case Tokens(pairs):
                    for request_id, token in pairs:
                        self._in_flight[request_id].put(token)
                case Finished(request_id):
                    self._in_flight.pop(request_id).put(event)
                case Failed(request_id, message):
                    self._in_flight.pop(request_id).put(RequestFailed(message))
                case Ready(facts):
                    self.facts, self.state = facts, "ready"
                    self._settled.set()
                case Dead():
                    self.death = _error(event)

    def _buried(self, exitcode: int | None) -> None:
        self.state = "dead"
        if self.death is None and not self._stopping:
            self.death = MachineLacks(f"the engine's process ended with {_how(exitcode)}", "its last words are above, on standard error")
        for generation in self._in_flight.values():
            generation.put(EngineUnavailable(self.death.message if self.death else SHUTTING_DOWN))
        self._in_flight.clear()
        self._settled.set()
        self._gone.set()


def _error(dead: Dead) -> A3BError:
    kinds = {kind.exit_code: kind for kind in (UsageError, BadInput, MachineLacks)}
    return kinds.get(dead.exit_code, A3BError)(dead.message, dead.hint)


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
