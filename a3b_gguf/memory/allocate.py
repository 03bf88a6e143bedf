"""llama.cpp's graph allocator, replayed: the bytes that a graph's intermediate tensors take when freed places are used again.

Mirrors ggml/src/ggml-alloc.c (ggml_gallocr_alloc_graph_impl and the best fit of ggml_dyn_tallocr) and, with a GPU, the parts of
ggml_backend_sched_split_graph in ggml/src/ggml-backend.cpp that decide when inputs and offloaded weights are copied over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HOST_ALIGNMENT, GPU_ALIGNMENT = 32, 128  # bytes; ggml-backend.cpp's CPU buffers, ggml-cuda.cu's
ENDLESS = 1 << 62


class Tensor:
    """A node or leaf of a graph. layout: equal for tensors that could share memory; root: the tensor that a view looks into.

    kind: "made" (allocated here), "kept" (weights and caches, allocated elsewhere), "stored" (written into such a cache), "input",
    "copied" (a weight in RAM that a GPU computes with), "cached" (such a cache), "dependency" (keeps its source until it is copied).
    reuses: its operation may write over its source. on_host: computed by the CPU even with a GPU.
    """

    __slots__ = ("at", "home", "kind", "layout", "n_bytes", "n_children", "n_views", "on_host", "owned", "reuses", "root", "sources")

    def __init__(
        self,
        n_bytes: int,
        sources: tuple[Tensor, ...] = (),
        layout: object = None,
        kind: str = "made",
        reuses: bool = False,
        root: Tensor | None = None,
    ) -> None:
        self.n_bytes, self.sources, self.kind, self.reuses, self.root = n_bytes, sources, kind, reuses, root
        self.layout = layout if layout is not None else self
        self.on_host = self.owned = False
        self.n_children = self.n_views = self.at = 0
        self.home: Allocator | None = None


class Graph:
    """Nodes in the order of computing, leafs in the order of meeting. Source: ggml_visit_parents_graph in ggml/src/ggml.c."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self._seen: set[Tensor] = set()

    def expand(self, tensor: Tensor) -> None:
        """Adds `tensor` and all that it is made of, sources first, the first source first."""
        seen = self._seen
        if tensor in seen:
            return
        seen.add(tensor)
        stack: list[tuple[Tensor, Iterator[Tensor]]] = [(tensor, iter(tensor.sources))]
        while stack:
            node, rest = stack[-1]
            for source in rest:
                if source not in seen:
                    seen.add(source)
                    if source.sources:
                        stack.append((source, iter(source.sources)))
                        break
                    self.leafs.append(source)
            else:
                stack.pop()
                (self.nodes if node.sources else self.leafs).append(node)


class Allocator:
    """One buffer that grows at its end. Owns the list of free places, ordered by address, the endless last one among them."""

    def __init__(self, alignment: int) -> None:
        self.alignment, self.peak = alignment, 0
        self.free: list[list[int]] = [[0, ENDLESS]]  # [address, bytes]

    def take(self, n_bytes: int) -> int:
        """The address of a place: the smallest free one that is large enough, the last only when there is no other."""
        n_bytes = -(-n_bytes // self.alignment) * self.alignment
        best, least = len(self.free) - 1, ENDLESS
        for i in range(best):
            if n_bytes <= self.free[i][1] <= least:
                best, least = i, self.free[i][1]
        place = self.free[best]
        at = place[0]
        place[0] += n_bytes
        place[1] -= n_bytes
        if not place[1]:
            self.free.pop(best)
        self.peak = max(self.peak, at + n_bytes)
        return at

    def give_back(self, at: int, n_bytes: int) -> None:
        n_bytes = -(-n_bytes // self.alignment) * self.alignment
        if not n_bytes:
            return
        free, end, i = self.free, at + n_bytes, 0
        while free[i][0] < end:
            i += 1
        before = free[i - 1] if i and free[i - 1][0] + free[i - 1][1] == at else None
        after = free[i] if free[i][0] == end else None
        if before and after:
            before[1] += n_bytes + after[1]
            free.pop(i)
        elif before:
            before[1] += n_bytes
        elif after:
            after[0], after[1] = at, after[1] + n_bytes
        else:
            free.insert(i, [at, n_bytes])


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes of the buffers: device is 0 without a GPU."""

    host: int
    device: int


def peaks(graph: Graph, gpu: bool) -> Peaks:
    """What the graph's buffers take. gpu: all nodes but those marked on_host are computed by one GPU."""
    host, device = Allocator(HOST_ALIGNMENT), Allocator(GPU_ALIGNMENT)
    nodes = split_nodes(graph.nodes) if gpu else graph.nodes
    for leaf in graph.leafs:
        allocate(leaf, host)
    for node in nodes:
        if node.root is not None and node.kind != "dependency":
            node.root.n_views += 1
        for source in node.sources:
            source.n_children += 1
            if source.kind == "input":
                allocate(source, host)
    for node in nodes:
        home = device if gpu and not node.on_host else host
        for source in node.sources:
            allocate(source, home)
        allocate(node, home)
        for source in node.sources:
            release(source)
    return Peaks(host.peak, device.peak)


def allocate(tensor: Tensor, home: Allocator) -> None:
    """A place for `tensor`, its source's where its operation may write over it and nobody else needs that.

    Source: ggml_gallocr_allocate_node; a view's place is never taken over, since views do not count as allocated there.
    """
    if tensor.owned or tensor.root is not None or tensor.kind in ("kept", "copied", "cached"):
        return
    tensor.owned = True
    for source in tensor.sources if tensor.reuses else ():
        alone = source.owned and source.n_children == 1 and not source.n_views
        if alone and source.layout == tensor.layout:
            source.owned = False
            tensor.at, tensor.home = source.at, source.home
            return
    tensor.at, tensor.home = home.take(tensor.n_bytes), home


def release(source: Tensor) -> None:
    """One child of `source` is computed; with the last one its place is free, a view's when all views are done."""
    source.n_children -= 1
    if source.n_children or source.n_views:
        return
    root = source.root
    if root is None:
        held = source
    else:
        root.n_views -= 1
        if root.n_views or root.n_children:
            return
        held = root
    if held.owned and held.home is not None:
        held.home.give_back(held.at, held.n_bytes)
        held.owned = False


def split_nodes(nodes: Sequence[Tensor]) -> list[Tensor]:
    """The nodes with copies of what a GPU needs from RAM, each at the start of the split that needs it first.

    A weight in RAM starts a split of its own, so that the place of the weight before it is free again.
    """
    splits: list[tuple[list[Tensor], list[Tensor]]] = []
    copies: dict[int, Tensor] = {}
    on_host: bool | None = None
    for node in nodes:
        if node.root is not None and node.kind != "stored" and splits:
            splits[-1][1].append(node)
            continue
        if not splits or node.on_host != on_host or (splits[-1][0] and any(source.kind == "copied" for source in node.sources)):
            splits.append(([], []))
            on_host = node.on_host
        if not node.on_host:
            node.sources = tuple(copied(source, copies, splits[-1][0]) for source in node.sources)
        splits[-1][1].append(node)
    return [node for inputs, inside in splits for node in (*inputs, *inside)]


def copied(source: Tensor, copies: dict[int, Tensor], inputs: list[Tensor]) -> Tensor:
    """`source`, or its copy on the GPU when it lies in RAM; a first copy is put into `inputs` behind what keeps its source alive."""
    root = source.root or source
    if source.kind != "copied" and root.kind not in ("input", "cached") and not source.on_host:
        return source
    if id(source) not in copies:
        copies[id(source)] = Tensor(source.n_bytes or root.n_bytes, layout=source.layout)
        inputs += [Tensor(0, (source,), kind="dependency", root=root), copies[id(source)]]
    return copies[id(source)]
