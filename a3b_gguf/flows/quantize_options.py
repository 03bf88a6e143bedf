"""What the user of `a3b quantize` asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.errors import UsageError
from a3b_quantize.edits import Edits
from a3b_quantize.encode import KERNELS, Encoding, check_threads
from a3b_quantize.kernels import DEFAULT_EFFORT, EFFORTS
from a3b_quantize.policy import Choice

IMATRIX_NAME = "imatrix.gguf"  # what `a3b calibrate` calls it in its folder


@dataclass(frozen=True, slots=True)
class Options:
    """The flags.

    type_name, stock, pure, policy, tensor_types, group_sizes: see a3b_quantize.policy.Choice. mtp, experts, prune, set_kv: see Edits.
    imatrix, calibration: a file, or a folder that holds one. kernel: fast when None, but ggml with stock, for llama-quantize's bytes.
    threads: all cores when None. effort: the kernels' default when None. max_shard_bytes: write several files of at most this size.
    bounds: whether to measure activation ranges; report: a file for the errors of every tensor.
    """

    type_name: str | None = None
    stock: bool = False
    kernel: str | None = None
    threads: int | None = None
    mtp: bool = True
    bounds: bool = True
    max_shard_bytes: int | None = None
    pure: bool = False
    policy: str | None = None
    tensor_types: tuple[str, ...] = ()
    group_sizes: tuple[str, ...] = ()
    imatrix: Path | None = None
    calibration: Path | None = None
    effort: int | None = None
    experts: int | None = None
    prune: Path | None = None
    set_kv: tuple[str, ...] = ()
    allow_requantize: bool = False
    report: Path | None = None

    @property
    def encoder(self) -> str:
        return ("ggml" if self.stock else "fast") if self.kernel is None else self.kernel

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.encoder, self.threads, DEFAULT_EFFORT if self.effort is None else self.effort)

    @property
    def choice(self) -> Choice:
        return Choice(self.type_name, self.stock, self.pure, self.policy, self.tensor_types, self.group_sizes)

    @property
    def edits(self) -> Edits:
        return Edits(self.mtp, self.experts, self.prune, self.set_kv)

    @property
    def imatrix_path(self) -> Path | None:
        """The importance matrix that the flags name."""
        return self.imatrix if self.calibration is None else self.calibration / IMATRIX_NAME

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Files besides the source that are read, so that no output may be one of them."""
        named = (self.imatrix_path, self.prune, None if self.policy is None else Path(self.policy))
        return tuple(path for path in named if path is not None)


def check_flags(options: Options) -> None:
    """Raises UsageError for flags that cannot be obeyed, before anything is opened."""
    if options.encoder not in KERNELS:
        raise UsageError(f"--kernel: there is no {options.encoder!r}", f"known: {', '.join(KERNELS)}")
    check_threads(options.threads)
    if options.effort is not None and options.effort not in EFFORTS:
        raise UsageError(f"--effort: there is no {options.effort}", f"known: {', '.join(map(str, EFFORTS))}")
    if options.effort is not None and options.encoder == "ggml":
        raise UsageError("--effort is for our kernels, ggml's have none", "leave it out, or add --kernel fast")
    if options.imatrix and options.calibration:
        raise UsageError("--imatrix and --calibration name two importance matrices", "give one of them")
    if options.calibration and not (options.calibration / IMATRIX_NAME).is_file():
        hint = "make it with `a3b calibrate MODEL.gguf -o DIR`, or name a file with --imatrix"
        raise UsageError(f"--calibration: {options.calibration} holds no {IMATRIX_NAME}", hint)


def refuse_unwritable(path: Path) -> None:
    """Raises UsageError when the folder of an output takes no new file: said before the work instead of after it."""
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: no right to write into {path.parent}", "choose a place that can be written")


def refuse_layers(asked: str | None) -> None:
    """Raises UsageError for `--prune-layers`, which llama-quantize has: what it leaves of a hybrid does not run."""
    if asked is not None:
        raise UsageError(
            "--prune-layers: layers are not pruned. In a hybrid DeltaNet and attention layers take turns, which is which is counted from "
            "the start and told in an array by layer, and the MTP block follows the last: without one all later ones would be misread",
            "take experts out instead with --prune-experts, or choose a smaller type",
        )
