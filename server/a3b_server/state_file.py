"""The container of one saved text: its tokens, what the cache held of it, and the recurrent states of a hybrid on the way.

    8 bytes   MAGIC
    u32       length of the header
    header    JSON: fingerprint, n_tokens, n_exact, sizes of the parts
    u32       crc32 of everything so far
    parts     tokens (int32), the sequence's whole state, what the drafter had, then one recurrent state for each checkpoint
    u32       crc32 of the parts

All numbers are little-endian. llama.cpp ends the process on a state file of its own that was cut off, and asks neither whose it is nor
whether it is whole; so these have their own frame, and what is not exactly right is never shown to it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from a3b_server.text_store import SavedText, parts_of

MAGIC = b"A3BTEXT1"
MOST_HEADER = 1 << 16
WORD = struct.Struct("<I")


class BadState(Exception):
    """The file is no saved text, is damaged, or was saved by something else. The message says which."""


class OtherModel(BadState):
    """A whole file, saved from another model, or one that was loaded in another way."""


@dataclass(frozen=True, slots=True)
class Header:
    """fingerprint: of the model's file and how it was loaded. n_exact: leading tokens that were read in whole aligned chunks.

    state_bytes: of the whole state, after n_tokens. checkpoints: (tokens, bytes) of each recurrent state before it. draft_bytes: of what
    the drafter had.
    """

    fingerprint: str
    n_tokens: int
    n_exact: int
    state_bytes: int
    checkpoints: tuple[tuple[int, int], ...] = ()
    draft_bytes: int = 0

    @property
    def part_sizes(self) -> list[int]:
        return [4 * self.n_tokens, self.state_bytes, self.draft_bytes, *(n_bytes for _, n_bytes in self.checkpoints)]


def write_text(path: Path, text: SavedText, fingerprint: str) -> None:
    """Writes the file under its final name only when all of it is on disk. Raises OSError; then nothing is left."""
    checkpoints = tuple((count, len(state)) for count, state in text.checkpoints)
    header = Header(fingerprint, len(text.tokens), text.n_exact, len(text.state), checkpoints, len(text.drafts))
    said = json.dumps(asdict(header)).encode()
    start = MAGIC + WORD.pack(len(said)) + said
    parts = [np.array(text.tokens, "<i4").view(np.uint8), *text.states]
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
            out.write(start + WORD.pack(zlib.crc32(start)))
            crc = 0
            for data in parts:
                out.write(data.data)
                crc = zlib.crc32(data.data, crc)
            out.write(WORD.pack(crc))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_tokens(path: Path, fingerprint: str) -> tuple[Header, list[int]]:
    """What a file holds, without its states. Raises BadState, or OSError when it cannot be read."""
    with path.open("rb") as file:
        header = _header(file, fingerprint)
        return header, _tokens(file.read(4 * header.n_tokens))


def read_text(path: Path, fingerprint: str) -> SavedText:
    """The whole text. Raises BadState, or OSError when it cannot be read."""
    with path.open("rb") as file:
        header = _header(file, fingerprint)
        data = np.fromfile(file, np.uint8)
    if zlib.crc32(data[:-4].data) != WORD.unpack(data[-4:].tobytes())[0]:
        raise BadState("its checksum is wrong: it is damaged")
    tokens, state, drafts, *checkpoints = parts_of(data[:-4], header.part_sizes)
    counts = [count for count, _ in header.checkpoints]
    return SavedText(_tokens(tokens.tobytes()), header.n_exact, state, tuple(zip(counts, checkpoints, strict=True)), drafts)


def _header(file: BinaryIO, fingerprint: str) -> Header:
    """The header, when it is whole, of this model, and the file is as long as it says."""
    start = file.read(len(MAGIC) + WORD.size)
    if len(start) < len(MAGIC) + WORD.size or not start.startswith(MAGIC):
        raise BadState("it is no saved text")
    (length,) = WORD.unpack(start[len(MAGIC) :])
    if length > MOST_HEADER:
        raise BadState("its header is damaged")
    said, crc = file.read(length), file.read(WORD.size)
    if len(crc) < WORD.size or zlib.crc32(start + said) != WORD.unpack(crc)[0]:
        raise BadState("its header is damaged")
    try:
        values = json.loads(said)
        header = Header(**{**values, "checkpoints": tuple((count, size) for count, size in values["checkpoints"])})
        expected = len(start) + length + WORD.size + sum(header.part_sizes) + WORD.size
    except (TypeError, ValueError, KeyError) as error:
        raise BadState("its header is of another version") from error
    if header.fingerprint != fingerprint:
        raise OtherModel("it was saved from another model, or one that was loaded in another way")
    if os.fstat(file.fileno()).st_size != expected:
        raise BadState("it was cut off")
    return header


def _tokens(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, "<i4").tolist()
    return found
