"""Runs a model over text and collects what quantization wants to know: importance of every input channel, ranges of activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.load import LoadedModel
from a3b_gguf.llama.watch import Node, watching
from a3b_quantize.calibration_state import State, load_state, save_state
from a3b_quantize.coverage import LayerCoverage, coverage, is_reached
from a3b_quantize.inputs import EMBEDDING, OUTPUT, Caps, Inputs
from a3b_quantize.sites import Sites, experts_by_layer
from a3b_quantize.winsorize import caps_from

FEWEST_CHUNKS = 32  # what is decoded in any case: weights outside the experts want variety more than counts
HIDDEN = "h_nextn"  # what an MTP block reads of the trunk, and the last node of the block before its output matrix
WARM_CHUNKS = 8  # decoded once more at the start, to learn where values are to be capped

# (tokens done, tokens in all, what is going on)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """output: whether to collect for the output matrix too; winsorize: also collect sums of capped squares; mtp: collect for the MTP
    block too, which must have been loaded.

    enough: stop when every expert has seen so many tokens and FEWEST_CHUNKS are done; 0: use the whole text.
    save_seconds: how often what was collected is saved, but never for more than a tenth of the time.
    """

    n_ctx: int = 512
    n_threads: int = 1
    output: bool = False
    winsorize: bool = False
    mtp: bool = False
    enough: int = 0
    save_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Collected:
    """state: everything that was collected; n_tokens: how many were decoded; resumed: chunks that an earlier run had done."""

    state: State = field(repr=False)
    n_tokens: int
    n_chunks: int
    covered: tuple[LayerCoverage, ...]
    stopped_early: bool
    resumed: int


class Both:
    """Observer that shows each node to `inputs` and `sites`. last: the name of the node behind which nothing is wanted, or None."""

    def __init__(self, inputs: Inputs | None, sites: Sites | None, last: str | None) -> None:
        self.inputs, self.sites, self.last = inputs, sites, last
        self._for_inputs: set[int] = set()

    def begin(self) -> None:
        self._for_inputs.clear()
        for each in (self.inputs, self.sites):
            if each:
                each.begin()

    def wants(self, node: Node) -> bool:
        if self.inputs and self.inputs.wants(node):
            self._for_inputs.add(node.address)
            return True
        return node.name == self.last or (self.sites is not None and self.sites.wants(node))

    def receive(self, node: Node) -> bool:
        if self.inputs and node.address in self._for_inputs:
            self.inputs.receive(node)
        if self.sites:
            self.sites.receive(node)
        return node.name != self.last


def calibrate(
    model: LoadedModel,
    shapes: Mapping[str, tuple[int, ...]],
    texts: Sequence[Sequence[int]],
    settings: Settings,
    kept: tuple[Path, bytes] | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Decodes `texts`, each as a sequence of its own, and collects.

    shapes: of the model's tensors, row-major. kept: where to keep what was collected so far, and the key of this run; a state
    of the same key is continued. Raises BadInput when the model's graph has nothing that can be collected.
    """
    tell = progress or (lambda done, total, text: None)
    state = (load_state(*kept) if kept else None) or State()
    resumed, n_total = state.done, sum(map(len, texts))
    inputs = Inputs(lambda name: _wanted(name, settings.output), _caps(model, shapes, texts, settings, tell))
    sites = Sites(shapes, experts_by_layer(shapes))
    inputs.groups, inputs.group_of, sites.histograms = state.groups, state.group_of, state.ranges
    n_tokens, saver, reached = sum(map(len, texts[:resumed])), _Saver(kept, settings.save_seconds), False
    last = None if settings.output else HIDDEN if settings.mtp else _last(model)
    block = Both(inputs, None, HIDDEN) if settings.mtp else None
    with watching(model, settings.n_ctx, Both(inputs, sites, last), settings.n_threads, block=block) as watch:
        for text in texts[resumed:]:
            if reached := settings.enough > 0 and state.done >= FEWEST_CHUNKS and is_reached(covered(state), settings.enough):
                break
            watch.run(text)
            state.done, n_tokens = state.done + 1, n_tokens + len(text)
            saver.maybe(state)
            tell(n_tokens, n_total, f"chunk {state.done} of {len(texts)}")
    if not state.groups or not state.ranges:
        raise BadInput(f"{model.path}: its graph has none of the nodes that are measured", "this architecture is not known here")
    return Collected(state, n_tokens, state.done, covered(state), reached, resumed)


def covered(state: State) -> tuple[LayerCoverage, ...]:
    return coverage({weight: state.groups[group].counts for weight, group in state.group_of.items()})


def _wanted(name: str, output: bool) -> bool:
    return name.startswith("blk.") or (output and name in (OUTPUT, EMBEDDING))


def _last(model: LoadedModel) -> str:
    """The node behind which there is only the output matrix, a sixth of the work of a 35B-A3B."""
    return f"l_out-{model.n_layer - 1}"


def _caps(
    model: LoadedModel, shapes: Mapping[str, tuple[int, ...]], texts: Sequence[Sequence[int]], settings: Settings, tell: Progress
) -> Caps | None:
    """Where each weight's input is to be capped, learned from the first WARM_CHUNKS; None when it is not wanted."""
    if not settings.winsorize:
        return None
    sites = Sites(shapes, experts_by_layer(shapes))
    warm = texts[:WARM_CHUNKS]
    with watching(model, settings.n_ctx, Both(None, sites, _last(model)), settings.n_threads) as watch:
        for number, text in enumerate(warm, 1):
            watch.run(text)
            tell(0, sum(map(len, texts)), f"learning ranges, chunk {number} of {len(warm)}")
    return caps_from(sites.histograms, sites.recurrent)


class _Saver:
    """Saves a state now and then."""

    def __init__(self, kept: tuple[Path, bytes] | None, seconds: float) -> None:
        self._kept, self._seconds, self._at, self._took = kept, seconds, time.monotonic(), 0.0

    def maybe(self, state: State) -> None:
        started = time.monotonic()
        if self._kept is None or started - self._at < max(self._seconds, 10 * self._took if self._seconds else 0):
            return
        save_state(*self._kept, state)
        self._at = time.monotonic()
        self._took = self._at - started
