"""Where the planner's facts come from: a GGUF file, or what one would be that quantize has not written yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a3b_gguf.clip_bounds import FILE_NAME, KVAdvice, kv_advice
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile, TensorInfo, read_gguf
from a3b_gguf.memory.facts import Facts, Projector
from a3b_gguf.memory.read import facts_of
from a3b_gguf.metadata import Metadata
from a3b_gguf.split import shards
from a3b_gguf.tensors import TYPES, GGMLType

if TYPE_CHECKING:
    from a3b_gguf.catalog import ModelEntry

LARGEST_IMAGE_PATCHES = 46 * 46  # of the image for which clip.cpp reserves memory (set_warmup_n_tokens), before merging
MERGED = 4  # patches that become one token in Qwen's vision encoders (spatial_merge_size 2)


def read_facts(path: Path, type_name: str | None = None, mmproj: Path | None = None) -> Facts:
    """Facts of a model.

    path: a GGUF file (all its parts when it is split); with type_name also a checkpoint folder or a name of the catalog, and the facts
    are those of the file that `a3b quantize PATH --type TYPE` would write. mmproj: the file of the vision encoder beside it.
    Raises BadInput for a file that is no model.
    """
    facts = sized(path, type_name) if type_name else from_file(path)
    return replace(facts, projector=read_projector(mmproj)) if mmproj else facts


def from_file(path: Path) -> Facts:
    if (path / "config.json").is_file():
        hint = f"make one: a3b quantize {path} --type iq4_nl; `a3b plan {path} --type iq4_nl` shows what that would take"
        raise BadInput(f"{path} is a folder, a plan needs the sizes in a .gguf file", hint)
    if not path.exists() and (entry := in_catalog(path)):
        raise BadInput(
            f"{entry.name} is a model of the catalog, not a file: a plan needs the sizes in its .gguf file, or a type",
            f"`a3b plan {entry.name} --type iq4_nl` shows what that would take; for the file: a3b quantize CHECKPOINT --type iq4_nl",
        )
    first = read_gguf(path)
    kind = "mmproj" if first.get("general.architecture") == "clip" else first.get("general.type", "model")
    if kind != "model":
        raise BadInput(f"{path} is a GGUF file of type {kind!r}, not a model", "give the model's own .gguf file")
    return facts_of(first, shards(first))


def in_catalog(path: Path) -> ModelEntry | None:
    """The model that `path` names instead of a file."""
    from a3b_gguf import catalog  # models.toml is read only when there is no such file

    return catalog.find(str(path))


def sized(path: Path, type_name: str) -> Facts:
    """Facts of the file that quantizing to `type_name` would write."""
    from a3b_gguf.flows.models import open_model
    from a3b_gguf.flows.outline import UNSAID_CTX, outline
    from a3b_gguf.tensors import Model
    from a3b_quantize.policy import Choice, choose_policy

    policy = choose_policy(Choice(type_name=type_name))
    entry = None if path.exists() else in_catalog(path)
    if entry is None:
        model = open_model(path)
    else:
        metadata, shapes = outline(entry)
        model = Model(metadata, tuple(Outlined(name, shape, TYPES["bf16" if len(shape) > 1 else "f32"]) for name, shape in shapes))
    assigned = policy.assign(model, True).assignments
    tensors = [TensorInfo(each.name, each.shape, each.type, 0) for each in assigned]
    file = header(Path(f"{entry.name if entry else path.name.removesuffix('.gguf')}-{type_name}.gguf"), model.metadata, tensors)
    notes = [f"planned for what `a3b quantize {path} --type {type_name}` would write: there is no such file yet"]
    if entry and entry.n_ctx is None:
        notes.append(f"the catalog does not say how long a context {entry.name} was trained for: {UNSAID_CTX:,} tokens are taken")
    facts = facts_of(file)
    return replace(facts, notes=(*facts.notes, *notes))


@dataclass(frozen=True, slots=True)
class Outlined:
    """A tensor that exists by name and shape only."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    def rows(self, start: int, stop: int) -> Any:
        raise NotImplementedError(f"{self.name} has no values")

    def raw(self, start: int, stop: int) -> bytes | memoryview:
        raise NotImplementedError(f"{self.name} has no bytes")


def header(path: Path, metadata: Metadata, tensors: Sequence[TensorInfo]) -> GGUFFile:
    return GGUFFile(path, 3, metadata, tuple(tensors), 32, 0, sum(tensor.nbytes for tensor in tensors))


def read_projector(path: Path) -> Projector:
    """The vision encoder in an mmproj file. Raises BadInput for another kind of file."""
    file = read_gguf(path)
    if file.get("general.architecture") != "clip":
        found = file.get("general.architecture")
        raise BadInput(f"{path} is no mmproj file: its architecture is {found!r}, expected 'clip'", "check --mmproj")
    widths = [file.get(f"clip.vision.{key}") for key in ("embedding_length", "feed_forward_length")]
    if not all(isinstance(value, int) and 0 < value < 1 << 20 for value in widths):
        named = "clip.vision.embedding_length and feed_forward_length"
        raise BadInput(f"{path}: {named} are {widths}, expected two widths", "convert it again")
    return Projector(path, sum(tensor.nbytes for tensor in file.tensors), widths[0], widths[1], LARGEST_IMAGE_PATCHES * MERGED)


def read_advice(facts: Facts) -> tuple[KVAdvice | None, str]:
    """What clip_bounds.bin beside the model says about cache types, or why it is not used; (None, "") when there is none."""
    path = facts.path.with_name(FILE_NAME)
    if not path.is_file() or not facts.path.is_file():
        return None, ""
    from a3b_gguf.model_id import model_id

    try:
        return kv_advice(path, model_id(read_gguf(facts.path))), ""
    except BadInput as error:
        return None, f"{path} is not used for choosing the KV type: {error.message}"
