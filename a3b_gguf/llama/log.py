"""What llama.cpp says, collected instead of printed."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from types import TracebackType

import llama_cpp.llama_cpp as C

# enum ggml_log_level of ggml.h; CONT continues the line before. llama_cpp's own logger still has an older order.
NONE, DEBUG, INFO, WARN, ERROR, CONT = range(6)


@dataclass(slots=True)
class LogLine:
    """One line of llama.cpp, without its line break. level: DEBUG, INFO, WARN or ERROR."""

    level: int
    text: str


class LlamaLog:
    """Owns llama.cpp's log callback while it lives, and the last `limit` lines.

    The callback is a setting of the whole process. The entry of a process installs one before it calls anything else;
    `load_model` and `open_context` install their own for as long as they run. close() gives the callback back to its
    former owner, so those that are open at the same time must be closed in reverse order, and not while another thread loads.
    """

    def __init__(self, limit: int = 50_000) -> None:
        lines: deque[LogLine] = deque(maxlen=limit)

        def collect(level: int, text: bytes | None, _: object) -> None:
            said = (text or b"").decode(errors="replace")
            if level == CONT and lines:
                lines[-1].text += said
            else:
                lines.append(LogLine(level, said))

        self._lines = lines
        self._former, self._former_data = C.llama_log_callback(), ctypes.c_void_p()
        C.llama_log_get(ctypes.byref(self._former), ctypes.byref(self._former_data))
        self._callback = C.llama_log_callback(collect)  # freed with this object: C must not know it any more by then
        C.llama_log_set(self._callback, ctypes.c_void_p())
        self._open = True

    def lines(self, least: int = DEBUG) -> tuple[LogLine, ...]:
        """Whole lines of level `least` or above, oldest first."""
        said = [(line.level, line.text.rstrip("\n")) for line in tuple(self._lines)]
        return tuple(LogLine(level, part) for level, text in said for part in text.split("\n") if least <= level < CONT)

    def first_error(self) -> str:
        """The first line of level ERROR, or ""."""
        return next((line.text.strip() for line in self.lines(ERROR)), "")

    def close(self) -> None:
        if self._open:
            C.llama_log_set(self._former, self._former_data)
            self._open = False

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> LlamaLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
