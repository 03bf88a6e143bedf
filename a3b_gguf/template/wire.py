"""How parent and child speak: JSON behind a length of four bytes. Never pickle: what the child says is not trusted."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")


def frame(value: Any) -> bytes:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def read_frame(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    return decode(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None
