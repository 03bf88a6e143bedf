"""Text for calibration: from files or our own, rendered with the model's template, as chunks of tokens in a fair order.

A file is plain text (one document), or lines of JSON: {"text": ...} or {"messages": [...], "tools": [...]}, which the model's own chat
template renders. Control tokens in the text become themselves. The name `builtin` stands for the text that a3b brings along.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from a3b_gguf.errors import A3BError, BadInput

BUILTIN = "builtin"
BUILTIN_NAME = "a3b built-in calibration text"
LINES = (".jsonl", ".ndjson")
FEWEST_TOKENS = 16  # a rest of a text that is shorter than this is left out: it has hardly any context

# (messages, tools) -> text; raises A3BError when the template refuses them
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Source:
    """One text. documents: in its order; refused: why a conversation was left out, one reason each; path: as the user named it."""

    name: str
    data: bytes = field(repr=False)
    documents: tuple[str, ...] = field(repr=False)
    refused: tuple[str, ...] = ()
    path: str = ""


@dataclass(frozen=True, slots=True)
class Chunks:
    """What will be decoded. tokens: int lists of at most the context; name, sha256: of all sources together; notes: for the user."""

    tokens: tuple[tuple[int, ...], ...] = field(repr=False)
    name: str
    sha256: str
    notes: tuple[str, ...]

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.tokens))


def read_sources(names: Sequence[str], render: Render) -> tuple[Source, ...]:
    """The texts called `names`: files, or `builtin`, which is several. Raises BadInput for a file that cannot be read."""
    found: list[Source] = []
    for name in names or (BUILTIN,):
        if name == BUILTIN:
            found += [_source(f"{BUILTIN}/{part}", text, f"{BUILTIN}/{part}", render) for part, text in builtin()]
            continue
        path = Path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}", f"give a text file, a .jsonl, or `{BUILTIN}`") from error
        found.append(_source(path.name, data, str(path), render))
    return tuple(found)


def builtin() -> list[tuple[str, bytes]]:
    """Names and bytes of the parts of the built-in text, by name."""
    folder = files("a3b_quantize") / "calibration"
    parts = [item for item in folder.iterdir() if item.name.endswith((".jsonl", ".txt"))]
    return [(part.name, part.read_bytes()) for part in sorted(parts, key=lambda part: part.name)]


def chunks(sources: Sequence[Source], tokenize: Tokenize, n_ctx: int, bos: int | None = None) -> Chunks:
    """The tokens of all sources in chunks of `n_ctx`, dealt so that any beginning holds every source in its share.

    A chunk never mixes sources; within a source chunks keep their order. bos: put before a source and in place of each chunk's first
    token, as llama.cpp's imatrix tool does; None where the model wants none. Raises BadInput when there is nothing to decode.
    """
    dealt: list[tuple[float, int, tuple[int, ...]]] = []
    for number, source in enumerate(sources):
        cut = _cut([token for text in source.documents for token in tokenize(text)], n_ctx, bos)
        dealt += [((i + 0.5) / len(cut), number, chunk) for i, chunk in enumerate(cut)]
    if not dealt:
        told = " and ".join(source.path for source in sources)
        why = "; ".join(_refusals(sources))
        raise BadInput(f"{told}: there are fewer than {FEWEST_TOKENS} tokens of text" + (f"; {why}" if why else ""), "give more text")
    names = tuple(dict.fromkeys(BUILTIN_NAME if each.name.startswith(f"{BUILTIN}/") else each.name for each in sources))
    digest = hashlib.sha256(b"".join(source.data for source in sources)).hexdigest()
    return Chunks(tuple(chunk for _, _, chunk in sorted(dealt, key=lambda each: each[:2])), " + ".join(names), digest, _refusals(sources))


def _cut(tokens: Sequence[int], n_ctx: int, bos: int | None) -> list[tuple[int, ...]]:
    if bos is not None:
        tokens = [bos, *tokens]
    cut = [tuple(tokens[start : start + n_ctx]) for start in range(0, len(tokens), n_ctx)]
    cut = [chunk for chunk in cut if len(chunk) >= min(FEWEST_TOKENS, n_ctx)]
    return cut if bos is None else [(bos, *chunk[1:]) for chunk in cut]


def _source(name: str, data: bytes, path: str, render: Render) -> Source:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: byte {error.start} is not UTF-8", "convert the file to UTF-8") from error
    if not path.endswith(LINES):
        return Source(name, data, (text,) if text else (), path=path)
    documents: list[str] = []
    refused: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                documents.append(_document(line, f"{path}, line {number}", render))
            except _Refused as error:
                refused.append(str(error))
    return Source(name, data, tuple(documents), tuple(refused), path)


class _Refused(Exception):
    """The model's template does not take a conversation."""


def _document(line: str, where: str, render: Render) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: {error}", "a .jsonl file has one JSON object on each line") from error
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return str(row["text"])
    messages, tools = (row.get("messages"), row.get("tools")) if isinstance(row, dict) else (None, None)
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise BadInput(f"{where} has neither a text nor messages", 'write {"text": "..."} or {"messages": [{"role": ..., "content": ...}]}')
    try:
        return render(messages, tools or None)
    except A3BError as error:
        raise _Refused(f"{where}: {error.message}") from error


def _refusals(sources: Sequence[Source]) -> tuple[str, ...]:
    refused = [reason for source in sources for reason in source.refused]
    if not refused:
        return ()
    return (f"{len(refused)} conversations were left out, since the model's template does not take them; the first: {refused[0]}",)
