"""An engine process without a model: it answers the last user message with the tokens that a script holds for it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

from a3b_server.messages import (
    Begun,
    Cancel,
    Command,
    Counts,
    Event,
    Facts,
    Failed,
    Finished,
    Look,
    Ready,
    SlotView,
    Snapshot,
    Stop,
    Submit,
    Tokens,
)

Tuple = tuple[int, ...]
FAKE_CACHED = 3  # tokens that every request is said to have found in the cache
# stop: as if the model had ended its answer. endless: from the start again until cancelled or at max_tokens.
# silent: not a token, until cancelled. fail: one token, then Failed. die: one token, then the process is killed.
Ending = Literal["stop", "endless", "silent", "fail", "die"]


@dataclass(frozen=True, slots=True)
class Script:
    tokens: Tuple
    ending: Ending = "stop"


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """scripts: by the tokens of a whole user turn. turn: `<|im_start|>` and `user`; end: `<|im_end|>`."""

    scripts: Mapping[Tuple, Script]
    turn: tuple[int, int]
    end: int
    facts: Facts = field(default_factory=lambda: Facts(n_ctx=4096, n_ctx_seq=1024, n_seq_max=4))


def last_user_turn(tokens: Tuple, turn: tuple[int, int], end: int) -> Tuple:
    """From `<|im_start|>user` to `<|im_end|>`, both included."""
    start = max(i for i in range(len(tokens) - 1) if tokens[i : i + 2] == turn)
    return tokens[start : tokens.index(end, start) + 1]


def run_fake(pipe: Connection, config: FakeConfig) -> None:
    """Target of the process: one token for each running request in each round, as many at a time as there are slots."""
    for sort in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sort, signal.SIG_IGN)
    pipe.send((Ready(config.facts),))
    fake = Fake(pipe, config)
    try:
        while not fake.stopped:
            while not fake.stopped and (pipe.poll(0) or not fake.has_work):
                fake.obey(pipe.recv())
            fake.step()
    except (EOFError, OSError):
        return


def run_never_ready(pipe: Connection, config: None) -> None:
    """Target of a process that loads for ever."""
    while not isinstance(pipe.recv(), Stop):
        pass


def run_deaf(pipe: Connection, config: FakeConfig) -> None:
    """Target of a process that is ready, and then in the middle of a call for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send((Ready(config.facts),))
    signal.pause()


class Fake:
    """Who waits and who runs. A silent request holds its slot and makes no work."""

    def __init__(self, pipe: Connection, config: FakeConfig) -> None:
        self.pipe, self.config, self.stopped = pipe, config, False
        self.waiting: list[Submit] = []
        self.running: dict[str, Iterator[Event] | None] = {}

    @property
    def has_work(self) -> bool:
        return any(self.running.values()) or (bool(self.waiting) and len(self.running) < self.config.facts.n_seq_max)

    def obey(self, command: Command) -> None:
        match command:
            case Submit():
                self.waiting.append(command)
            case Cancel(name):
                waits = [request for request in self.waiting if request.id == name]
                if name in self.running or waits:
                    self.running.pop(name, None)
                    self.waiting = [request for request in self.waiting if request not in waits]
                    self.pipe.send((Finished(name, "cancelled", 0, 0),))
            case Look():
                slots = tuple(SlotView(i, "writing", 1, name) for i, name in enumerate(self.running))
                self.pipe.send((Snapshot(slots, len(self.waiting), (0, 0), Counts()),))
            case Stop():
                self.stopped = True

    def step(self) -> None:
        while self.waiting and len(self.running) < self.config.facts.n_seq_max:
            request = self.waiting.pop(0)
            script = self.config.scripts[last_user_turn(request.tokens, self.config.turn, self.config.end)]
            self.running[request.id] = None if script.ending == "silent" else play(request, script)
        for name, events in list(self.running.items()):
            if events is not None:
                event = next(events)
                self.pipe.send((event,))
                if not isinstance(event, Begun | Tokens):
                    del self.running[name]


def play(request: Submit, script: Script) -> Iterator[Event]:
    """The events of one request."""
    count = 0
    if script.tokens:
        yield Begun(request.id, FAKE_CACHED)
    for count, token in enumerate(itertools.cycle(script.tokens) if script.ending == "endless" else script.tokens, 1):
        yield Tokens(((request.id, token),))
        if script.ending == "fail":
            yield Failed(request.id, "the fake engine was told to fail")
        if script.ending == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == request.max_tokens:
            yield Finished(request.id, "length", len(request.tokens), count, FAKE_CACHED)
    yield Finished(request.id, "stop", len(request.tokens), count + 1, FAKE_CACHED if script.tokens else 0)
