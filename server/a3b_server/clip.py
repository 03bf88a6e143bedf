"""Activations beside the ranges of clip_bounds.bin while the server works: counted now and then, or clamped in every call.

Watching costs one callback for every node of each watched graph and a copy of the watched values, on one call in `every`; on the others
a look at a flag for each node. Clamping costs that on every call, and changes answers: it is for finding out what an outlier does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import Bounds
from a3b_gguf.llama.gate import Gate
from a3b_gguf.llama.site_names import LAST_WINS, site_of
from a3b_gguf.llama.watch import Node, Reader

Mode = Literal["watch", "enforce"]
EVERY = 256  # calls between two that are watched


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """limits: largest |x| by (layer, site), over all experts. recurrent, routed: layers with DeltaNet, with routed experts."""

    mode: Mode
    limits: Mapping[tuple[int, str], float]
    recurrent: frozenset[int] = frozenset()
    routed: frozenset[int] = frozenset()
    every: int = EVERY


@dataclass(slots=True)
class ClipCounts:
    """Since the engine was loaded: values that were looked at, those beyond their bound, and the worst as a multiple of it.

    failure: why nothing is looked at any more; empty while all is well.
    """

    n_watched: int = 0
    n_beyond: int = 0
    n_clamped: int = 0
    worst: float = 0.0
    by_site: dict[tuple[int, str], int] = field(default_factory=dict)
    failure: str = ""


def limits_of(bounds: Bounds, mode: Mode) -> dict[tuple[int, str], float]:
    """The largest |x| of each site. Keys and values are left alone by clamping: their nodes carry two different things."""
    return {
        (each.layer, each.site): each.absmax
        for each in bounds.records
        if each.expert < 0 and each.absmax > 0 and not (mode == "enforce" and each.site in LAST_WINS)
    }


class Clip:
    """Owns what was counted. `gate` is llama.cpp's eval callback; `turn` is called before each call of llama_decode.

    An exception must not travel through C, so the first is kept in `failure`, told in the counts, and nothing is watched behind it.
    """

    def __init__(self, config: ClipConfig) -> None:
        self._config, self._reader = config, Reader()
        self._n_calls, self._active = 0, False
        self.gate = Gate(self._callback)
        self._names: dict[bytes, tuple[int, str] | None] = {}
        self.counts = ClipCounts()
        self.failure: Exception | None = None

    def turn(self) -> None:
        """Decides whether the next call is watched."""
        self._active = self.failure is None and (self._config.mode == "enforce" or self._n_calls % self._config.every == 0)
        self._n_calls += 1
        self.gate.open(self._active)

    def _callback(self, address: int, ask: bool, _: Any) -> bool:
        """True when asked about a node that is of interest; after one was computed always, so that the graph goes on."""
        if not self._active:
            return not ask
        try:
            node = Node(address, self._reader)
            found = self._limit(node)
            if ask:
                return found is not None
            if found is not None:
                self._look(node, *found)
        except Exception as error:
            self.failure, self._active = error, False
            self.counts.failure = f"{type(error).__name__}: {error}"
        return not ask

    def _limit(self, node: Node) -> tuple[tuple[int, str], float] | None:
        name = node.name.encode()
        if name not in self._names:
            self._names[name] = site_of(node.name, self._config.recurrent, self._config.routed)
        site = self._names[name]
        limit = None if site is None else self._config.limits.get(site)
        return None if site is None or limit is None else (site, limit)

    def _look(self, node: Node, site: tuple[int, str], limit: float) -> None:
        values: NDArray[Any] | None = node.values()
        if values is None or values.dtype != np.float32:
            return
        sizes = np.abs(values)
        beyond = int(np.count_nonzero(sizes > limit))
        counts = self.counts
        counts.n_watched += values.size
        if not beyond:
            return
        counts.n_beyond += beyond
        counts.worst = max(counts.worst, float(sizes.max()) / limit)
        counts.by_site[site] = counts.by_site.get(site, 0) + beyond
        if self._config.mode == "enforce" and node.write(np.clip(values, -limit, limit)):
            counts.n_clamped += beyond
