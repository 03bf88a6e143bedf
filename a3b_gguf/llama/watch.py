"""Activations while llama.cpp computes them: nodes of its graph, their names, inputs and values, as numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.hidden import hidden_rows, keep_hidden
from a3b_gguf.llama.load import LoadedModel, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.symbols import ggml_function

ELEMENTS: dict[int, Any] = {0: np.float32, 26: np.int32}  # ggml types that are read
# Every row of a batch gets logits, since llama.cpp cuts its last layer down to the rows that want them: a vocabulary of 248,320 takes
# 1 MB a row, twice (the graph's and the output buffer).
LOGIT_BYTES = 256 << 20
MOST_ROWS, FEWEST_ROWS = 512, 32


class GGMLTensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h as of llama-cpp-python 0.3.36, which does not bind it; a test pins the layout."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )  # fmt: skip


class Reader:
    """ggml's functions that read a tensor, looked up once."""

    def __init__(self) -> None:
        self.n_bytes = ggml_function("ggml_nbytes", ctypes.c_size_t, [ctypes.c_void_p])
        arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.get = ggml_function("ggml_backend_tensor_get", None, arguments)
        self.set = ggml_function("ggml_backend_tensor_set", None, arguments)
        self.is_host = ggml_function("ggml_backend_buffer_is_host", ctypes.c_bool, [ctypes.c_void_p])
        self._op_name: Callable[[int], bytes] = ggml_function("ggml_op_name", ctypes.c_char_p, [ctypes.c_int])
        self._op_names: dict[int, str] = {}

    def op_name(self, op: int) -> str:
        """`MUL_MAT`, `MUL_MAT_ID`, ...: ggml's own names."""
        if op not in self._op_names:
            self._op_names[op] = self._op_name(op).decode()
        return self._op_names[op]


class Node:
    """A tensor of the graph that is being computed. address: its ggml_tensor, a name for it as long as this batch lasts."""

    __slots__ = ("_reader", "_tensor", "address")

    def __init__(self, address: int, reader: Reader) -> None:
        self.address, self._tensor, self._reader = address, GGMLTensor.from_address(address), reader

    @property
    def name(self) -> str:
        """For a weight its name in the file, without what a copy to another device puts around it (`CUDA0#blk.0.attn_q.weight#0`)."""
        name: str = self._tensor.name.decode(errors="replace")
        return name.split("#")[1] if "#" in name else name

    @property
    def op(self) -> str:
        return self._reader.op_name(self._tensor.op)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """All four dimensions, row-major: columns last."""
        a, b, c, d = self._tensor.ne
        return d, c, b, a

    @property
    def readable(self) -> bool:
        """Whether its type is one of ELEMENTS."""
        return self._tensor.type in ELEMENTS

    def source(self, index: int) -> Node:
        """Input `index` of the operation, one that it has."""
        return Node(self._tensor.src[index], self._reader)

    def values(self) -> NDArray[Any] | None:
        """A copy, row-major and without leading ones; None for a type that is not in ELEMENTS.

        Works for views with gaps and for tensors that live on a GPU.
        """
        tensor = self._tensor
        dtype = ELEMENTS.get(tensor.type)
        if dtype is None:
            return None
        n_bytes = self._reader.n_bytes(self.address)
        copy = np.empty(n_bytes, np.uint8)
        self._reader.get(self.address, copy.ctypes.data, 0, n_bytes)
        n_dims = max((i + 1 for i in range(4) if tensor.ne[i] > 1), default=1)
        shape, strides = tuple(tensor.ne[:n_dims])[::-1], tuple(tensor.nb[:n_dims])[::-1]
        return np.lib.stride_tricks.as_strided(copy.view(dtype), shape, strides, writeable=False)

    def write(self, values: NDArray[np.float32]) -> bool:
        """Puts `values`, of the shape that `values()` has, in their place. False, and nothing is done, for a tensor with gaps, of another
        type, or outside of the CPU's memory."""
        tensor = self._tensor
        strides, step = [], np.dtype(np.float32).itemsize
        for size in tensor.ne:
            strides.append(step)
            step *= size
        packed = all(found == wanted for found, wanted, size in zip(tensor.nb, strides, tensor.ne, strict=True) if size > 1)
        if tensor.type != 0 or not packed or not tensor.buffer or not self._reader.is_host(tensor.buffer):
            return False
        rows = np.ascontiguousarray(values, np.float32)
        self._reader.set(self.address, rows.ctypes.data, 0, rows.nbytes)
        return True


class Observer(Protocol):
    """What is told about the nodes of a graph. What it raises ends the run and is raised by `Watch.run`."""

    def begin(self) -> None:
        """A new batch: addresses of nodes mean something else from now on."""
        ...

    def wants(self, node: Node) -> bool:
        """Asked for every node before it is computed; its inputs may not be computed yet. The computation stops after each wanted one."""
        ...

    def receive(self, node: Node) -> bool:
        """A wanted node was computed. False: nothing behind it matters, the rest of the batch's graph may stay uncomputed."""
        ...


class _Watched:
    """A context whose graphs `observer` sees, and its batch. What the observer raises is kept until `decode` raises it."""

    def __init__(self, model: LoadedModel, params: LoadParams, observer: Observer, reader: Reader, n_embd: int = 0) -> None:
        raised: list[BaseException] = []

        def callback(address: int, ask: bool, _: Any) -> bool:
            try:
                node = Node(address, reader)
                return observer.wants(node) if ask else observer.receive(node)
            except BaseException as error:  # it cannot travel through C; False stops the graph, and `decode` raises it
                raised.append(error)
                return False

        self.context = open_context(model, params, callback, mtp=n_embd > 0)
        self.batch, self._raised, self._observer = Batch(params.n_batch, n_embd), raised, observer

    def decode(self, start: int, tokens: Sequence[int], outputs: int) -> None:
        self.batch.clear()
        self.batch.add(0, start, tokens, outputs)
        self._observer.begin()
        status = decode(self.context, self.batch)
        if self._raised:
            raise self._raised[0]
        if status:
            path = self.context.model.path
            raise MachineLacks(f"llama.cpp cannot decode on {path}: llama_decode returned {status}", "look at the memory that is free")


class Watch:
    """Decodes while observers look. rows: how many tokens a batch has. With False from `receive` logits are garbage."""

    def __init__(self, trunk: _Watched, block: _Watched | None) -> None:
        self._trunk, self._block = trunk, block
        self.rows = len(trunk.batch.token)

    def run(self, tokens: Sequence[int]) -> None:
        """Decodes `tokens` as one sequence from its start. Raises MachineLacks when llama.cpp cannot."""
        C.llama_memory_clear(self._trunk.context.memory, True)
        if self._block:
            C.llama_memory_clear(self._block.context.memory, True)
            self._block.batch.hidden[:1] = 0
        for start in range(0, len(tokens), self.rows):
            rows = tokens[start : start + self.rows]
            self._trunk.decode(start, rows, len(rows))
            if self._block:
                self._guess(self._block, start, rows)

    def _guess(self, block: _Watched, start: int, tokens: Sequence[int]) -> None:
        """Shows the MTP block each token beside the hidden row of the token before it; zeros before the first."""
        hidden = block.batch.hidden
        found = hidden_rows(self._trunk.context, len(tokens), hidden.shape[1])
        hidden[1 : len(tokens)] = found[:-1]
        block.decode(start, tokens, 1)
        hidden[0] = found[-1]


@contextmanager
def watching(
    model: LoadedModel, n_ctx: int, observer: Observer, n_threads: int = 1, rows: int | None = None, block: Observer | None = None
) -> Iterator[Watch]:
    """A Watch for sequences of up to `n_ctx` tokens. rows: tokens in a batch, by default as many as LOGIT_BYTES allow.

    block: sees the graphs of the model's MTP block, which must have been loaded. `observer` must then let each graph come as far as
    the node `h_nextn`.
    """
    n_ctx = -(-n_ctx // 256) * 256
    n_rows = min(rows or rows_in_memory(model), n_ctx)
    params = LoadParams(
        n_ctx=n_ctx, n_batch=n_rows, n_ubatch=n_rows, n_outputs_max=n_rows, n_threads=n_threads, n_threads_batch=n_threads
    )  # fmt: skip
    reader = Reader()
    with ExitStack() as opened:
        trunk = _Watched(model, params, observer, reader)
        opened.enter_context(trunk.context)
        second = None
        if block is not None:
            keep_hidden(trunk.context)
            second = _Watched(model, params, block, reader, int(C.llama_model_n_embd_out(model.pointer)))
            opened.enter_context(second.context)
            keep_hidden(second.context)
        yield Watch(trunk, second)


def rows_in_memory(model: LoadedModel) -> int:
    """Tokens in a batch whose logits take at most LOGIT_BYTES."""
    n_vocab = int(C.llama_vocab_n_tokens(C.llama_model_get_vocab(model.pointer)))
    return max(FEWEST_ROWS, min(MOST_ROWS, LOGIT_BYTES // (4 * max(n_vocab, 1))))
