"""general.*: what the model is called, where it comes from, how it likes to be sampled.

Sources: Metadata in gguf-py/gguf/metadata.py and size_label in gguf-py/gguf/utility.py of llama.cpp; a test compares with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

from a3b_convert.config import Config, read_json
from a3b_convert.model_card import card_metadata, read_card
from a3b_convert.names import parse_name, title
from a3b_gguf.metadata import Metadata, f32, i32, string
from a3b_gguf.tensors import TensorSource

# (key in generation_config.json, key in the file), in llama.cpp's order
SAMPLING = (("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p"), ("temperature", "temp"), ("repetition_penalty", "penalty_repeat"))


def n_params(tensors: Iterable[TensorSource]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def size_label(tensors: Iterable[TensorSource]) -> str:
    """ "256x2.6B": experts, and the parameters outside them plus those of one expert in each expert tensor."""
    shared = experts = expert_sum = n_expert_tensors = 0
    for tensor in tensors:
        if "_exps." in tensor.name:
            expert_sum, n_expert_tensors = expert_sum + tensor.shape[0], n_expert_tensors + 1
            experts += prod(tensor.shape[1:])
        else:
            shared += prod(tensor.shape)
    return f"{expert_sum // n_expert_tensors}x{_rounded(shared + experts)}" if n_expert_tensors else _rounded(shared)


def _rounded(count: int) -> str:
    """Parameters with at least two digits: 2.6B, 35B."""
    power = 4 if count > 1e12 else 3 if count > 1e9 else 2 if count > 1e6 else 1
    scaled = count * 10.0 ** (-3 * power)
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{digits}f}{' KMBT'[power]}"


def general_metadata(config: Config, arch: str, tensors: Sequence[TensorSource]) -> tuple[Metadata, list[str]]:
    """The keys from general.architecture to general.languages, in llama.cpp's order, and what the user should know."""
    folder = config.path.parent.resolve()
    total = n_params(tensors)
    names = [parse_name(folder.name, total)]
    own = config.root.get("_name_or_path")
    if isinstance(own, str) and own and own.count("/") <= 1:  # else it is a path on somebody's computer
        names.insert(0, parse_name(own, total))
    card, notes = read_card(folder / "README.md")
    out: Metadata = {"general.architecture": string(arch), "general.type": string("model"), **_sampling(folder)}
    out["general.name"] = string(next((name.title for name in names if name.full), folder.name))
    for key in ("version", "organization", "finetune", "basename", "size_label"):
        value = next((found for name in names if (found := getattr(name, key))), "")
        if key == "size_label":
            value = value or size_label(tensors)
        if value:
            out[f"general.{key}"] = string(title(value) if key == "organization" else value)
    return out | card_metadata(card, total), notes


def _sampling(folder: Path) -> Metadata:
    """general.sampling.* from generation_config.json, where a model's makers say how to sample from it."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    found = Config(path, read_json(path), {})
    out: Metadata = {}
    for theirs, ours in SAMPLING:
        if found.values.get(theirs) is None:
            continue
        if ours != "top_k":
            out[f"general.sampling.{ours}"] = f32(found.need(theirs, float))
        elif abs(found.need(theirs, int)) < 1 << 31:
            out[f"general.sampling.{ours}"] = i32(found.need(theirs, int))
        else:
            raise found.wrong(f"key {theirs} is {found.need(theirs, int)}, expected at most 31 bits")
    return out
