"""The process in which a template of unknown origin is compiled and rendered: started by `guarded`.

It reads requests from standard input and writes one reply to each, as JSON behind a length of four bytes. It gives up what a template
has no use for before it sees one: writing files, further processes, memory without end. Each request has CPU time of its own, after
which the kernel ends the process, also in the middle of C code.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

from a3b_gguf.template.compiled import ChatTemplate
from a3b_gguf.template.values import BadTemplate, TemplateRefused
from a3b_gguf.template.wire import frame, read_frame


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the end of its pipe ends this process
    setup = read_frame(requests)
    if setup is None:
        return
    _give_up(setup["memory_bytes"])
    answer, template = _compiled(setup)
    while True:
        replies.write(frame(answer))
        replies.flush()
        request = read_frame(requests)
        if request is None:
            return
        with_limit(setup["cpu_s"])
        answer = _rendered(template, request, setup["max_output_chars"])
        with_limit(0)


def with_limit(seconds: float) -> None:
    """Lets the kernel end this process after so much CPU time; 0 takes that back."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _give_up(memory_bytes: int) -> None:
    for what, limit in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        try:
            resource.setrlimit(what, (limit, limit))
        except (OSError, ValueError):  # macOS knows no limit of the address space; the CPU time still holds
            continue


def _compiled(setup: dict[str, Any]) -> tuple[dict[str, Any], ChatTemplate | None]:
    with_limit(setup["cpu_s"])
    try:
        template = ChatTemplate(setup["text"], setup["bos_token"], setup["eos_token"])
    except BadTemplate as error:
        return {"bad": error.message, "hint": error.hint}, None
    except MemoryError:
        return {"bad": "the chat template needs too much memory to compile", "hint": ""}, None
    finally:
        with_limit(0)
    if template.forbidden:
        line, name = template.forbidden[0]
        return {"bad": f"the chat template reaches for {name} in line {line}, which leads out of its sandbox (T005)", "hint": ""}, None
    return {"variables": sorted(template.variables)}, template


def _rendered(template: ChatTemplate | None, request: dict[str, Any], max_chars: int) -> dict[str, Any]:
    if template is None:
        return {"bad": "the chat template did not compile", "hint": ""}
    pieces: list[str] = []
    left = max_chars
    try:
        for piece in template.pieces(request["messages"], request["tools"], request["generation"], request["options"]):
            left -= len(piece)
            if left < 0:
                return {"bad": f"the chat template writes more than {max_chars:,} characters", "hint": ""}
            pieces.append(piece)
    except TemplateRefused as error:
        if isinstance(error.__cause__, MemoryError):
            return {"bad": "the chat template needs too much memory", "hint": ""}
        return {"refused": error.message, "hint": error.hint}
    except BadTemplate as error:
        return {"bad": error.message, "hint": error.hint}
    except MemoryError:
        return {"bad": "the chat template needs too much memory", "hint": ""}
    return {"text": "".join(pieces)}
