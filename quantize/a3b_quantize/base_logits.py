"""A base model's distributions on disk, so that a second comparison does not run the base again. docs/eval.md is the specification.

    magic "A3BBASE1"; u32 length and UTF-8 JSON header; then for each chunk u32 length, u32 crc32 and a zlib stream of
        u32 n, u32 total, counts u32 [n], nll f32 [n], top u32 [n]          n: scored positions of a chunk
        tokens, each less the one before it in its position, u32 [total]    the bytes 0 of all, then the bytes 1, 2, 3
        log p, float32 rounded to its upper 24 bits [total]                 the bytes 1 of all, then the bytes 2, 3

Kept are tokens with a log p above -16. All numbers are little endian.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.part import disk_error
from a3b_quantize.divergence import BaseRows

MAGIC = b"A3BBASE1"
RECORD = struct.Struct("<II")
LONGEST_HEADER = 1 << 16


@dataclass(frozen=True, slots=True)
class Key:
    """What a file of base distributions was computed from: another value anywhere makes it another file.

    base: fingerprint of the base's file, hex; tokens: sha256 of the tokens, hex; n_expert_used: 0 as the base says.
    """

    base: str
    tokens: str
    n_ctx: int
    n_chunk: int
    n_vocab: int
    n_expert_used: int


class Writer:
    """Writes `path` under a name of its own until `finish`. Leaves nothing behind when it is left before that."""

    def __init__(self, path: Path, key: Key) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
        except OSError as error:
            raise disk_error(path, error) from error
        self._name, self._file = Path(name), os.fdopen(descriptor, "wb")
        header = json.dumps(asdict(key), sort_keys=True).encode()
        self._put(MAGIC + struct.pack("<I", len(header)) + header)

    def add(self, rows: BaseRows) -> None:
        """The scored positions of the next chunk."""
        data = pack(rows)
        self._put(RECORD.pack(len(data), zlib.crc32(data)) + data)

    def finish(self) -> None:
        """Everything is added: the file stands under its name."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._name, self.path)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not self._file.closed:
            # Closing writes what is buffered, which a full disk refuses once more; that it is full has been said.
            try:
                self._file.close()
            except OSError:
                pass
        self._name.unlink(missing_ok=True)


def check(path: Path, key: Key) -> None:
    """Reads the whole file. Raises BadInput when it is damaged or of another key."""
    for _ in read(path, key):
        pass


def read(path: Path, key: Key) -> Iterator[BaseRows]:
    """Chunk after chunk. Raises BadInput when the file is damaged, or when it was computed from something else than `key` says."""
    try:
        with path.open("rb") as file:
            _check_header(path, file, key)
            for number in range(key.n_chunk):
                yield _chunk(path, file, number)
            if file.read(1):
                raise BadInput(f"{path}: bytes stand behind the last chunk", "delete it")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the file") from error


def _check_header(path: Path, file: BinaryIO, key: Key) -> None:
    start = file.read(len(MAGIC) + 4)
    if start[: len(MAGIC)] != MAGIC:
        raise BadInput(f"{path} holds no base distributions: it starts with {start[:8]!r}, expected {MAGIC!r}", "delete it")
    length = int.from_bytes(start[len(MAGIC) :], "little")
    try:
        found = json.loads(file.read(min(length, LONGEST_HEADER)))
    except ValueError as error:
        raise BadInput(f"{path}: its header is damaged", "delete it") from error
    other = [name for name, value in asdict(key).items() if not isinstance(found, dict) or found.get(name) != value]
    if other:
        raise BadInput(f"{path} was computed from something else: {', '.join(other)} differ", "delete it")


def _chunk(path: Path, file: BinaryIO, number: int) -> BaseRows:
    head = file.read(RECORD.size)
    length, crc = RECORD.unpack(head) if len(head) == RECORD.size else (0, 0)
    data = file.read(length)
    if len(data) != length or not length or zlib.crc32(data) != crc:
        raise BadInput(f"{path}: chunk {number} is damaged", "delete it")
    return unpack(data)


def pack(rows: BaseRows) -> bytes:
    """One chunk, compressed."""
    starts = np.concatenate([[0], np.cumsum(rows.counts)[:-1]]).astype(np.intp)
    steps = np.diff(rows.tokens, prepend=np.int32(0))
    steps[starts] = rows.tokens[starts]
    # Half of the last kept bit is added, so that the cut rounds; log p is never so large that this overflows.
    log_p = (rows.log_p.view(np.uint32) + np.uint32(0x80)).view(np.uint8).reshape(-1, 4)
    parts = [
        struct.pack("<II", len(rows.counts), len(rows.tokens)),
        rows.counts.astype("<u4").tobytes(),
        rows.nll.astype("<f4").tobytes(),
        rows.top.astype("<u4").tobytes(),
        steps.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes(),
        log_p[:, 1:].T.tobytes(),
    ]
    return zlib.compress(b"".join(parts), 1)


def unpack(data: bytes) -> BaseRows:
    """What `pack` made."""
    raw = zlib.decompress(data)
    n, total = struct.unpack_from("<II", raw)
    counts, nll, top = (np.frombuffer(raw, kind, n, 8 + 4 * n * i) for i, kind in enumerate(("<u4", "<f4", "<u4")))
    at = 8 + 12 * n
    steps = _interleaved(np.frombuffer(raw, np.uint8, 4 * total, at).reshape(4, total), 0).view(np.int32)
    log_p = _interleaved(np.frombuffer(raw, np.uint8, 3 * total, at + 4 * total).reshape(3, total), 1).view(np.float32)
    sums = np.cumsum(steps, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)
    before = np.repeat(sums[starts] - steps[starts], counts)
    return BaseRows(nll.astype(np.float32), top.astype(np.int32), counts.astype(np.int32), (sums - before).astype(np.int32), log_p)


def _interleaved(planes: NDArray[np.uint8], first: int) -> NDArray[np.uint8]:
    """Planes of bytes, the lowest being byte `first`, as words of 4 bytes, flat."""
    words = np.zeros((planes.shape[1], 4), np.uint8)
    words[:, first:] = planes.T
    return words.reshape(-1)
