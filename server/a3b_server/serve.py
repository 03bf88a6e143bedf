"""Runs the application on a socket until a signal comes or the model cannot be loaded."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from a3b_gguf.errors import A3BError, MachineLacks, UsageError
from a3b_server.garbage import settle
from a3b_server.messages import Facts
from a3b_server.slow import ImpatientProtocol
from a3b_server.supervisor import Supervisor

DRAIN_SECONDS = 5  # answers that are being written may go on for so long after a signal
TICK_SECONDS = 0.1  # a signal's handler cannot wake the loop
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow is done. port 0: any that is free.

    Raises MachineLacks when the port is taken, UsageError when there is no such address.
    """
    hint = "use 127.0.0.1 for this machine, 0.0.0.0 for all its networks"
    if not host:  # which the system would take for all networks
        raise UsageError("--host: the address is empty", hint)
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # the latter for a name that could not be looked up: of 64 letters between two dots
        raise UsageError(f"--host: {host!r} is no address: {error}", hint) from error
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        elsewhere = error.errno == errno.EADDRNOTAVAIL
        hint = "that is no address of this machine: choose another with --host" if elsewhere else "choose another with --port"
        raise MachineLacks(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}", hint) from error


def serve(app: FastAPI, supervisor: Supervisor, listening: socket.socket, on_ready: Callable[[Facts], None]) -> None:
    """Serves until SIGINT (KeyboardInterrupt), SIGTERM or SIGHUP (returns); answers under way get DRAIN_SECONDS to end.

    on_ready is called once the model is loaded. Raises the A3BError that kept it from loading.
    """
    server = _Server(app, supervisor)
    with _signals(server):
        asyncio.run(_serve(server, supervisor, listening, on_ready))


class _Server(uvicorn.Server):
    """Ends the engine when the time to drain is over, so that whoever still waits gets an error instead of a torn connection.

    A second signal ends that time, a third one the engine's own: uvicorn would tear everything off, with tracebacks.
    """

    def __init__(self, app: FastAPI, supervisor: Supervisor) -> None:
        patience = DRAIN_SECONDS + 2
        config = uvicorn.Config(  # its warnings are about clients that do not speak HTTP, which are no reason to fill a log
            app, http=ImpatientProtocol, log_level="error", access_log=False, lifespan="on", timeout_graceful_shutdown=patience
        )
        super().__init__(config)
        self._supervisor, self._is_hurried = supervisor, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif self._is_hurried:
            self._supervisor.kill()
        else:
            self._is_hurried = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_engine())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_engine(self) -> None:
        for _ in range(round(DRAIN_SECONDS / TICK_SECONDS)):
            if self._is_hurried:
                break
            await asyncio.sleep(TICK_SECONDS)
        await self._supervisor.stop()


async def _serve(server: uvicorn.Server, supervisor: Supervisor, listening: socket.socket, on_ready: Callable[[Facts], None]) -> None:
    failures: list[A3BError] = []

    async def watch() -> None:
        try:
            on_ready(await supervisor.ready())
            settle()
        except A3BError as error:
            if not server.should_exit:  # else it was a signal that kept it from loading
                failures.append(error)
                server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listening])
    finally:
        watching.cancel()
    if failures:
        raise failures[0]


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[None]:
    """uvicorn raises a signal that ended it once more at the end. SIGTERM must not end the process as killed then, and SIGINT must
    reach Python although a shell that starts jobs in the background has them ignore it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        server.should_exit = True

    handlers: dict[signal.Signals, Any] = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup wants it ignored
        handlers[signal.SIGHUP] = stop
    former = {sort: signal.signal(sort, handler) for sort, handler in handlers.items()}
    try:
        yield
    finally:
        for sort, handler in former.items():
            signal.signal(sort, handler)
