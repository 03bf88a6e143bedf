"""Whether two files are of the same model: told from what quantization leaves alone. docs/clip-bounds.md is the specification."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from a3b_gguf.gguf_file import GGUFFile, TensorInfo
from a3b_gguf.roles import layer_of
from a3b_gguf.split import shards
from a3b_gguf.tensors import Model, n_rows


def model_id(file: GGUFFile) -> str:
    """The same for every quantization of a model: sha256 over its F32 norm tensors, MTP block left out.

    Over all tensors of type F32 whose name ends in "_norm.weight" and whose block is below block_count - nextn_predict_layers, in the order
    of their names' bytes: name, a zero byte, the tensor's bytes.
    """
    n_trunk = int(file.hparam("block_count", 0)) - int(file.hparam("nextn_predict_layers", 0))
    norms: dict[str, Callable[[], bytes]] = {}
    for part in (file, *shards(file)):
        for info in part.tensors:
            if _is_norm(info.name, info.type.name, n_trunk):
                norms[info.name] = partial(_bytes_of, part.path, info)
    return _digest(norms)


def model_id_of(model: Model) -> str:
    """The id that every file written from `model` will have."""

    def size(key: str) -> int:
        field = model.metadata.get(f"{model.architecture}.{key}")
        return int(field.value) if field else 0

    n_trunk = size("block_count") - size("nextn_predict_layers")
    norms = [tensor for tensor in model.tensors if _is_norm(tensor.name, tensor.type.name, n_trunk)]
    return _digest({tensor.name: partial(tensor.raw, 0, n_rows(tensor.shape)) for tensor in norms})


def _is_norm(name: str, type_name: str, n_trunk: int) -> bool:
    layer = layer_of(name)
    return type_name == "f32" and name.endswith("_norm.weight") and (layer is None or layer < n_trunk)


def _digest(norms: Mapping[str, Callable[[], bytes | memoryview]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(norms, key=str.encode):
        digest.update(name.encode() + b"\0")
        digest.update(norms[name]())
    return digest.hexdigest()


def _bytes_of(path: Path, info: TensorInfo) -> bytes:
    with path.open("rb") as data:
        data.seek(info.offset)
        return data.read(info.nbytes)


def file_sha256(file: GGUFFile) -> str:
    """sha256 over the tensor table as it stands in the file: the same only for the same tensors in the same types and order.

    Of a split model, over the tables of all its parts.
    """
    digest = hashlib.sha256()
    for part in (file, *shards(file)):
        for info in part.tensors:
            name = info.name.encode()
            digest.update(struct.pack("<Q", len(name)) + name + struct.pack("<I", len(info.shape)))
            digest.update(struct.pack(f"<{len(info.shape)}QIQ", *reversed(info.shape), info.type.number, info.offset - part.data_offset))
    return digest.hexdigest()
