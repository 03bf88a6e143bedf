"""One life of the engine's process: started, spoken to over a pipe, and seen to its end."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from a3b_gguf.interrupts import deaf_children
from a3b_server.messages import Command, Event

Target = Callable[[Connection, Any], None]
OnEvents = Callable[["Child", tuple[Event, ...]], None]
OnEnd = Callable[["Child", int | None], None]


class Child:
    """Owns the process, its pipe and a thread that sends, since a pipe can block.

    on_events and on_end run in the event loop that the child was started in; on_end gets the exit code, once, after all events.
    """

    def __init__(self, target: Target, config: Any, on_events: OnEvents, on_end: OnEnd) -> None:
        self._on_events, self._on_end = on_events, on_end
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, config), name="a3b-engine", daemon=True)
        with deaf_children():
            self._process.start()
        theirs.close()  # or the pipe would never end
        self._writer = threading.Thread(target=self._write, name="engine-commands", daemon=True)
        self._writer.start()
        # Not by a thread of ours that reads: the hop to the loop would cost a tenth of a millisecond for each token.
        self._loop.add_reader(self._pipe.fileno(), self._readable)

    @property
    def pid(self) -> int | None:
        return None if self._ended.is_set() else self._process.pid

    def send(self, command: Command) -> None:
        """Never waits. What cannot be delivered is lost, and on_end tells."""
        self._outbox.put(command)

    def kill(self) -> None:
        if not self._ended.is_set():
            self._process.kill()

    async def end(self, grace: float) -> None:
        """Waits `grace` seconds for the process to go, then kills it; frees everything. May be called again."""
        if not self._ended.is_set():
            try:
                await asyncio.wait_for(self._ended.wait(), grace)
            except TimeoutError:
                self._process.kill()
                await self._ended.wait()
        self._outbox.put(None)
        await asyncio.to_thread(self._writer.join)
        self._pipe.close()
        self._process.close()

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self._pipe.send(command)
            except OSError:  # the process is gone, which the reader notices
                return

    def _readable(self) -> None:
        try:
            events = self._pipe.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())
            threading.Thread(target=self._bury, name="engine-end", daemon=True).start()
            return
        self._on_events(self, events)

    def _bury(self) -> None:
        """Waits for the process, which closes its pipe a little before its end."""
        self._process.join()
        self._loop.call_soon_threadsafe(self._over, self._process.exitcode)

    def _over(self, exitcode: int | None) -> None:
        self._ended.set()
        self._on_end(self, exitcode)


def how(exitcode: int | None) -> str:
    """An exit code in words."""
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
