"""A chat template of unknown origin, rendered in a process of its own that cannot take more than its share.

jinja2's sandbox keeps a template from reaching Python's insides; a template can still count to 10**9, or fold 9**9**9 while it is
compiled. Both happen in `child`, which the kernel ends after its CPU time and which is ended from here when it does not answer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from a3b_gguf.template.compiled import ChatTemplate
from a3b_gguf.template.known import known_name
from a3b_gguf.template.values import FIX_TEMPLATE, MAX_TEMPLATE_CHARS, NO_OPTIONS, RESERVED, BadTemplate, Template, TemplateRefused
from a3b_gguf.template.wire import LENGTH, decode, frame

MAX_KILLS = 3  # a template that was ended so often is not asked again


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take. cpu_s: of the child; wall_s: until it is ended on a machine that is too busy to give it CPU time."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    max_output_chars: int = 16 << 20
    memory_bytes: int = 1 << 30


def open_template(text: str, bos_token: str = "", eos_token: str = "", limits: Limits | None = None) -> Template:
    """The template of a file: in process when its text is a known one, else guarded. The one door for texts that somebody else wrote.

    Raises BadTemplate when it has a syntax error, reaches for Python's insides, or takes too long to compile.
    """
    if known_name(text) is not None:
        return ChatTemplate(text, bos_token, eos_token)
    return GuardedTemplate(text, bos_token, eos_token, limits)


class GuardedTemplate:
    """Owns the child process; starts it again after it was ended. Safe to use from several threads, one rendering at a time."""

    def __init__(self, text: str, bos_token: str = "", eos_token: str = "", limits: Limits | None = None) -> None:
        if len(text) > MAX_TEMPLATE_CHARS:
            raise BadTemplate(f"the chat template has {len(text):,} characters, at most {MAX_TEMPLATE_CHARS:,} are read")
        self.text = text
        self.n_kills = 0
        self._limits = limits or Limits()
        self._setup = {
            "text": text,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "cpu_s": self._limits.cpu_s,
            "memory_bytes": self._limits.memory_bytes,
            "max_output_chars": self._limits.max_output_chars,
        }
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        try:
            self.variables: frozenset[str] = frozenset(self._start()["variables"])
        except BadTemplate:
            self.close()
            raise

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> str:
        """As ChatTemplate.render; BadTemplate also when a limit is met. Waits for another thread's rendering, never for ever."""
        taken = sorted(RESERVED & options.keys())
        if taken:
            raise TemplateRefused(f"template option {taken[0]} is not the caller's to set", "remove it")
        request = {"messages": list(messages), "tools": tools, "generation": add_generation_prompt, "options": dict(options)}
        with self._lock:
            if self._child is None:
                self._start()
            reply = self._ask(frame(request))
        if "refused" in reply:
            raise TemplateRefused(reply["refused"], reply["hint"])
        return str(reply["text"])

    def close(self) -> None:
        """Ends the child. A later rendering starts another one."""
        with self._lock:
            self._stop()

    def _start(self) -> dict[str, Any]:
        if self.n_kills >= MAX_KILLS:
            raise BadTemplate(f"the chat template was ended {self.n_kills} times for taking too long; it is not tried again", FIX_TEMPLATE)
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from a3b_gguf.template.child import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        self._finalizer = weakref.finalize(self, _end, self._child)
        return self._ask(frame(self._setup))

    def _ask(self, message: bytes) -> dict[str, Any]:
        """The child's reply. Raises BadTemplate when it says that the template is bad, and when it had to be ended."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise RuntimeError("the child was not started")
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before: reading says so
                child.stdin.write(message)
                child.stdin.flush()
            reply = _read(child.stdout, time.monotonic() + self._limits.wall_s, 4 * self._limits.max_output_chars + 4096)
        except BaseException:
            self._stop()
            raise
        if reply is None:
            self._stop()
            self.n_kills += 1
            raise BadTemplate(
                f"the chat template takes more than {self._limits.cpu_s:g} s of CPU time or more memory than it may have; it was ended",
                FIX_TEMPLATE,
            )
        found: dict[str, Any] = decode(reply)
        if "bad" in found:
            raise BadTemplate(found["bad"], found["hint"] or FIX_TEMPLATE)
        return found

    def _stop(self) -> None:
        if self._child is not None:
            self._finalizer()
            self._child = None


def _environment() -> dict[str, str]:
    """What an interpreter needs to start, and nothing that a template could want to know."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not yet written has no reader
                pipe.close()
    child.wait()


def _read(pipe: IO[bytes], deadline: float, longest: int) -> bytes | None:
    """One reply; None when the pipe ends, when the time is up, or when the reply claims to be longer than it may be."""
    data = bytearray()
    wanted = LENGTH.size
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                return None
            data += chunk
            if wanted == LENGTH.size <= len(data):
                wanted += LENGTH.unpack_from(data)[0]
                if wanted > longest:
                    return None
            if len(data) >= wanted > LENGTH.size:
                return bytes(data[LENGTH.size : wanted])
