"""Writes the mended form of a file: whole, under its own name or another, or nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from a3b_gguf.flows.prompt_check import (
    STDIN,
    Located,
    Policy,
    checker,
    line_request,
    lines_of,
    located,
    raw_checker,
    read_request,
    read_text,
    refuses,
)
from a3b_gguf.flows.prompts import Speaker
from a3b_gguf.part import part_file
from a3b_gguf.prompt import Change, Fixed, fix_request, refused, verify_body
from a3b_gguf.prompt.fix_raw import fix_raw

MAX_CHANGES = 1000  # of a data set, that are told one by one


@dataclass(frozen=True, slots=True)
class Mended:
    """changes: what was done, with the line for a data set (0 else). left: what a person must look at. ok: nothing of it refuses."""

    profile: str
    ok: bool
    changes: tuple[tuple[int, Change], ...]
    left: tuple[Located, ...]
    n_changes: int


def mend_request(path: Path, out: Path | None, speaker: Speaker, policy: Policy, tools: Path | None) -> Mended:
    """Mends a request. Written to `out`, else in place; to standard output for standard input. Raises as check_request does."""
    request, data, findings = read_request(path, tools)
    if refused(findings):
        return _mended(speaker, policy, Fixed(None, (), tuple(findings)), data.decode("utf-8", "replace"))
    given = dict(request) if tools is None else {key: value for key, value in request.items() if key != "tools"}
    fixed = fix_request(request, speaker.profile, checker(speaker, policy), policy.developer)
    if tools is not None:
        fixed.value.pop("tools", None)
    text = data.decode()
    if fixed.changes or out is not None or path == STDIN or text.startswith("\ufeff"):
        was_list = not isinstance(verify_body(data)[0], Mapping)
        value = fixed.value.get("messages") if was_list else fixed.value
        written = _dumped(value, text) if fixed.changes or given != dict(request) else text.removeprefix("\ufeff")
        write_whole(out or path, written.encode())
        text = written
    return _mended(speaker, policy, fixed, text)


def mend_raw(path: Path, out: Path | None, speaker: Speaker, policy: Policy) -> Mended:
    """Mends a rendered prompt, as mend_request does."""
    text = read_text(path)
    fixed = fix_raw(text, speaker.profile, raw_checker(speaker, policy))
    if fixed.changes or out is not None or path == STDIN:
        write_whole(out or path, fixed.value.encode())
    return _mended(speaker, policy, fixed, fixed.value)


def mend_lines(path: Path, out: Path | None, speaker: Speaker, policy: Policy) -> Mended:
    """Mends a data set line by line, in bounded memory. Lines that cannot be read stay as they are."""
    check = checker(speaker, policy)
    changes: list[tuple[int, Change]] = []
    left: list[Located] = []
    n_changes, ok = 0, True
    with whole_file(out or path) as stream:
        for number, data in lines_of(path):
            value, findings = verify_body(data)
            fixed = Fixed(value, (), tuple(findings))
            if not refused(findings):
                request, prefix = line_request(value)
                fixed = fix_request(request, speaker.profile, check, policy.developer)
                data = _line(value, fixed, prefix) if fixed.changes else data
            stream.write(data + b"\n")
            n_changes += len(fixed.changes)
            changes += [(number, change) for change in fixed.changes[: MAX_CHANGES - len(changes)]]
            text = data.decode("utf-8", "replace")
            places = [located(finding, text) for finding in fixed.left]
            ok = ok and not any(refuses(finding, policy) for finding in fixed.left)
            left += [Located(place.finding, number, place.column, place.excerpt) for place in places[: MAX_CHANGES - len(left)]]
    return Mended(speaker.profile.name, ok, tuple(changes), tuple(left), n_changes)


def _line(value: Any, fixed: Fixed, prefix: str) -> bytes:
    whole = {**value, "body": fixed.value} if prefix else fixed.value if isinstance(value, Mapping) else fixed.value["messages"]
    return json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace")


def _dumped(value: Any, text: str) -> str:
    """JSON in the manner of `text`: on one line, or indented as deep as its first member."""
    lines = text.strip().split("\n")
    indent = None
    if len(lines) > 1:
        indent = len(lines[1]) - len(lines[1].lstrip()) or 2
    return json.dumps(value, ensure_ascii=False, indent=indent) + ("\n" if text.endswith("\n") else "")


def _mended(speaker: Speaker, policy: Policy, fixed: Fixed, text: str) -> Mended:
    left = tuple(located(finding, text) for finding in fixed.left)
    ok = not any(refuses(finding, policy) for finding in fixed.left)
    return Mended(speaker.profile.name, ok, tuple((0, change) for change in fixed.changes), left, len(fixed.changes))


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that it is there whole or not at all; `-` is standard output."""
    with whole_file(path) as stream:
        stream.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes `path`'s place at the end, with its permissions; `-` is standard output."""
    if path == STDIN:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif path.is_char_device() or path.is_fifo():  # /dev/stdout, >(a program): nothing there could be replaced
        with path.open("wb") as out:
            yield out
    else:
        with part_file(path, 0) as out:
            yield out
