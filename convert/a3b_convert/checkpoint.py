"""A checkpoint folder: which safetensors files belong to it, and every tensor by name, checked against the index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from a3b_convert.config import read_json
from a3b_convert.safetensors_file import SafeTensor, read_safetensors
from a3b_gguf.errors import BadInput

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(model.*)-(\d+)-of-(\d+)\.safetensors")
MTP_PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.")  # how checkpoints of this family name the multi-token-prediction block
MOST_NAMES = 8
MOST_CHARS = 255  # of a file name: NAME_MAX of Linux and macOS


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors by name, in the order of the files. left_out: whether tensors of an MTP block were dropped."""

    folder: Path
    tensors: dict[str, SafeTensor]
    left_out: bool


def is_mtp(name: str) -> bool:
    return name.startswith(MTP_PREFIXES)


def listed(names: Iterable[str]) -> str:
    """Names in a message: the first few, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def read_checkpoint(folder: Path, mtp: bool = True) -> Checkpoint:
    """All tensors of the folder; without `mtp` those of the MTP block are left out, and shards of them alone may be absent.

    Raises BadInput, a different one for each: no safetensors, a shard that is absent, a gap in the shards' numbers, a tensor that
    the index promises and no shard has, a tensor that the index does not know, a tensor that is there twice.
    """
    weight_map = _weight_map(folder)
    names = _shards_of_index(folder, weight_map, mtp) if weight_map is not None else _shards_by_name(folder)
    tensors: dict[str, SafeTensor] = {}
    found_in: dict[str, str] = {}
    for file_name in names:
        for name, tensor in read_safetensors(folder / file_name).items():
            if name in found_in:
                raise BadInput(
                    f"{folder}: tensor {name} is in {found_in[name]} and in {file_name}", "keep one of them, or download the index file"
                )
            found_in[name] = file_name
            tensors[name] = tensor
    if weight_map is not None:
        _check_index(folder, weight_map if mtp else {k: v for k, v in weight_map.items() if not is_mtp(k)}, found_in, mtp)
    kept = tensors if mtp else {name: tensor for name, tensor in tensors.items() if not is_mtp(name)}
    return Checkpoint(folder, kept, len(kept) < len(tensors))


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of the index, or None without one."""
    path = folder / INDEX
    if not path.is_file():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{path}: key weight_map is missing or empty", "download the file again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_file_name(file_name):
            said = repr(file_name)[:MOST_CHARS]
            raise BadInput(f"{path}: tensor {name} is said to be in {said}, expected a file name", "download the file again")
    return weight_map


def _is_file_name(text: str) -> bool:
    return bool(text) and Path(text).name == text and len(text.encode(errors="replace")) <= MOST_CHARS


def _shards_of_index(folder: Path, weight_map: dict[str, str], mtp: bool) -> list[str]:
    """The files that the index names, of which none may be absent."""
    wanted = {file: [name for name in weight_map if weight_map[name] == file] for file in sorted(set(weight_map.values()))}
    absent = {file: names for file, names in wanted.items() if not (folder / file).is_file()}
    needed = {file: names for file, names in absent.items() if mtp or not all(map(is_mtp, names))}
    if needed:
        names = [name for of_file in needed.values() for name in of_file]
        hint = "download it again"
        if all(map(is_mtp, names)):
            hint += ", or leave the MTP block out with --no-mtp"
        raise BadInput(f"{folder}: {INDEX} names {listed(needed)}, which is not there; it holds {listed(names)}", hint)
    return [file for file in wanted if file not in absent]


def _shards_by_name(folder: Path) -> list[str]:
    """Without an index: model.safetensors, or every model-0000N-of-0000M.safetensors without a gap."""
    names = sorted(path.name for path in folder.glob("model*.safetensors") if path.is_file())
    if not names:
        raise _no_safetensors(folder)
    shards = [match for match in map(SHARD.fullmatch, names) if match]
    if shards:
        sets = {(match[1], match[3]) for match in shards}
        if len(sets) > 1 or len(shards) != len(names):
            raise BadInput(
                f"{folder} has no {INDEX} and files of several checkpoints: {listed(names)}",
                "download the index file, or keep the files of one checkpoint",
            )
        _check_numbers(folder, {int(match[2]) for match in shards}, int(shards[0][3]))
    elif len(names) > 1 and "model.safetensors" in names:
        raise BadInput(
            f"{folder} has no {INDEX}, and besides model.safetensors {listed(set(names) - {'model.safetensors'})}",
            "download the index file",
        )
    return names


def _check_numbers(folder: Path, have: set[int], count: int) -> None:
    """Shards 1 to `count` must be there, and no others."""
    missing = [f"{number:05d}" for number in islice((n for n in range(1, count + 1) if n not in have), MOST_NAMES)]
    if missing:
        raise BadInput(
            f"{folder}: {len(have)} of {count} shards are there; missing {', '.join(missing)} (there is no {INDEX})", "download them"
        )
    beyond = sorted(number for number in have if not 1 <= number <= count)
    if beyond:
        raise BadInput(f"{folder}: shard numbers beyond the {count} that the names promise: {beyond[0]}", "download the index file")


def _no_safetensors(folder: Path) -> BadInput:
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return BadInput(
            f"{folder} has no {INDEX} and no model.safetensors, only {listed(others)}", "download the index file, or rename the file"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        return BadInput(
            f"{folder} holds PyTorch pickles, no safetensors", "take the checkpoint's safetensors; pickles can run code and are not read"
        )
    if any(folder.glob("*.gguf")):
        return BadInput(
            f"{folder} holds a GGUF file, no safetensors", "it is converted already; give the file itself to the other commands"
        )
    return BadInput(f"{folder} has no safetensors", "download the model's weights, not only its configuration")


def _check_index(folder: Path, weight_map: dict[str, str], found_in: dict[str, str], mtp: bool) -> None:
    """Index and shards must name the same tensors."""
    missing = weight_map.keys() - found_in.keys()
    if missing:
        files = sorted({weight_map[name] for name in missing})
        raise BadInput(f"{folder}: {INDEX} promises tensors that {listed(files)} lacks: {listed(missing)}", "download the file again")
    extra = {name for name in found_in.keys() - weight_map.keys() if mtp or not is_mtp(name)}
    if extra:
        files = sorted({found_in[name] for name in extra})
        raise BadInput(
            f"{folder}: {listed(files)} has tensors that {INDEX} does not know: {listed(extra)}", "index and shards are of two versions"
        )
    moved = [name for name, file in weight_map.items() if found_in[name] != file]
    if moved:
        name = moved[0]
        raise BadInput(
            f"{folder}: tensor {name} is in {found_in[name]}, {INDEX} says {weight_map[name]}", "index and shards are of two versions"
        )
