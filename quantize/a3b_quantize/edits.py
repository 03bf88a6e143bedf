"""Changes to a model before it is written: what `--no-mtp`, `--experts`, `--prune-experts` and `--set-kv` do, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.tensors import Model
from a3b_quantize.experts import Pruned, prune_experts, with_experts_used
from a3b_quantize.mtp import without_mtp
from a3b_quantize.set_kv import set_values


@dataclass(frozen=True, slots=True)
class Edits:
    """mtp: whether the MTP block stays; experts: how many a token uses; prune: a file of experts to drop; set_kv: KEY=VALUE texts."""

    mtp: bool = True
    experts: int | None = None
    prune: Path | None = None
    set_kv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edited:
    """The model after the edits. pruned: what was taken out, for an importance matrix of the whole model."""

    model: Model
    pruned: Pruned | None


def edit(model: Model, edits: Edits) -> Edited:
    """Raises UsageError or BadInput for an edit that the model does not allow."""
    pruned = None
    if not edits.mtp:
        model = without_mtp(model)
    if edits.experts is not None:
        model = with_experts_used(model, edits.experts)
    if edits.prune is not None:
        pruned = prune_experts(model, edits.prune)
        model = pruned.model
    return Edited(set_values(model, edits.set_kv), pruned)
