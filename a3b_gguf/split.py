"""A model in several files, as llama.cpp splits one: `NAME-00001-of-00003.gguf`, all metadata in the first.

Source: llama_split_path and llama_split_prefix in llama.cpp src/llama.cpp, the checks of llama-model-loader.cpp, add_shard_kv_data in
gguf-py's gguf_writer.py. Sizes are counted as files, header included.
"""

from __future__ import annotations

import re
from pathlib import Path

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile, read_gguf
from a3b_gguf.metadata import Field, Metadata, i32

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_SHARDS = (1 << 16) - 1  # split.count is a u16


def shard_path(path: Path, number: int, count: int) -> Path:
    """`model.gguf` -> `model-00002-of-00003.gguf`; number: from 1."""
    return path.with_name(f"{path.name.removesuffix('.gguf')}-{number:05d}-of-{count:05d}.gguf")


def shard_metadata(number: int, count: int, n_tensors: int) -> Metadata:
    """What every shard says about itself. number: from 1; n_tensors: of the whole model."""
    return {NUMBER: Field("u16", number - 1), COUNT: Field("u16", count), TENSORS: i32(n_tensors)}


def without_split(metadata: Metadata) -> Metadata:
    """The metadata of the whole model, whatever it was read from."""
    return {key: value for key, value in metadata.items() if key not in (NUMBER, COUNT, TENSORS)}


def read_parts(path: Path, arrays: bool = False) -> list[GGUFFile]:
    """The file at `path`, and behind it the other parts when it is the first of a split model. arrays: as in read_gguf, of the first."""
    first = read_gguf(path, arrays)
    return [first, *shards(first)]


def shards(first: GGUFFile) -> list[GGUFFile]:
    """The other parts of a split model. Raises BadInput when `first` is not the first part, or another is missing or of another model."""
    count = first.get(COUNT, 1)
    if not isinstance(count, int) or count < 2:
        return []
    match = SHARD.fullmatch(first.path.name)
    if not match or int(match[3]) != count:
        hint = f"name it like model-00001-of-{count:05d}.gguf"
        raise BadInput(f"{first.path} is one of {count} parts, but its name does not say which", hint)
    if int(match[2]) != 1:
        raise BadInput(f"{first.path} is part {int(match[2])} of {count}", f"give the first part, {match[1]}-00001-of-{match[3]}.gguf")
    others = [_part(first, first.path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf"), i, count) for i in range(2, count + 1)]
    _check_tensors([first, *others])
    return others


def _part(first: GGUFFile, path: Path, number: int, count: int) -> GGUFFile:
    if not path.is_file():
        raise BadInput(f"{path} is missing: part {number} of {count} of the model in {first.path.name}", "put all parts into one folder")
    part = read_gguf(path)
    found = part.get(NUMBER, number - 1)
    if found != number - 1:
        raise BadInput(f"{path} says that it is part {found + 1 if isinstance(found, int) else found}: it was renamed", "rename it back")
    return part


def _check_tensors(parts: list[GGUFFile]) -> None:
    """No tensor twice, and as many as the first part promises."""
    where: dict[str, Path] = {}
    for part in parts:
        for info in part.tensors:
            if info.name in where:
                raise BadInput(f"tensor {info.name} is in {where[info.name]} and in {part.path}", "the parts are of several models")
            where[info.name] = part.path
    promised = parts[0].get(TENSORS)
    if promised is not None and promised != len(where):
        raise BadInput(f"{parts[0].path} promises {promised} tensors, its parts have {len(where)}", "the parts are of several models")
