"""A GPU that is not there, for llama.cpp's scheduler and allocator: what they would reserve on one is then told without one.

A device of ggml whose functions are Python: it can do everything, takes an operation with weights in RAM over from 32 rows on, aligns to
128 bytes and, like CUDA's since llama.cpp pull 23907, keeps f16 copies of a quantized cache behind the result of attention. Nothing can be
computed on it: for contexts of models that are opened with no_alloc, in a process of its own. Like CUDA's it keeps the results of experts
until they are summed up, which is the largest of its fusions; the others keep less than a MiB for 512 tokens.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from a3b_gguf.llama.params import LoadParams, params_of

SIZE, POINTER, BOOL, TEXT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_bool, ctypes.c_char_p
API_VERSION, GPU_TYPE, ALIGNMENT, OFFLOAD_ROWS = 2, 1, 128, 32
GET_ROWS, MUL_MAT, MUL_MAT_ID, ROPE, FLASH_ATTN_EXT = "GET_ROWS", "MUL_MAT", "MUL_MAT_ID", "ROPE", "FLASH_ATTN_EXT"
MOST_EXPERTS = 15  # MOE_WEIGHTED_REDUCTION_MAX_EXPERTS
F16 = 1  # GGML_TYPE_F16
COMPUTE = re.compile(r"(\w+) compute buffer size = +([\d.]+) MiB")


class Tensor(ctypes.Structure):
    """The head of struct ggml_tensor, ggml/include/ggml.h."""

    _fields_ = [
        ("type", ctypes.c_int), ("buffer", POINTER), ("ne", ctypes.c_int64 * 4), ("nb", SIZE * 4), ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32), ("src", POINTER * 10),
    ]  # fmt: skip


class Props(ctypes.Structure):
    """struct ggml_backend_dev_props, ggml/include/ggml-backend.h."""

    _fields_ = [
        ("name", POINTER), ("description", POINTER), ("free", SIZE), ("total", SIZE), ("type", ctypes.c_int), ("id", POINTER),
        ("async_", BOOL), ("host_buffer", BOOL), ("buffer_from_host_ptr", BOOL), ("events", BOOL), ("mmap", BOOL),
    ]  # fmt: skip


class Graph(ctypes.Structure):
    """The head of struct ggml_cgraph, ggml/src/ggml-impl.h."""

    _fields_ = [("size", ctypes.c_int), ("n_nodes", ctypes.c_int), ("n_leafs", ctypes.c_int), ("nodes", ctypes.POINTER(POINTER))]


class Optimize(ctypes.Structure):
    """struct ggml_backend_graph_optimize_params, ggml/src/ggml-backend-impl.h."""

    _fields_ = [("add_alloc_dep", ctypes.CFUNCTYPE(None, POINTER, POINTER, POINTER)), ("user_data", POINTER)]


def table(*rows: tuple[str, Any, Sequence[Any]]) -> type[ctypes.Structure]:
    """A struct of function pointers: name, result, arguments."""
    fields = [(name, ctypes.CFUNCTYPE(result, *arguments)) for name, result, arguments in rows]
    return type("Table", (ctypes.Structure,), {"_fields_": fields})


# The interfaces of ggml/src/ggml-backend-impl.h, API version 2.
Buft = table(
    ("get_name", POINTER, (POINTER,)), ("alloc_buffer", POINTER, (POINTER, SIZE)), ("get_alignment", SIZE, (POINTER,)),
    ("get_max_size", SIZE, (POINTER,)), ("get_alloc_size", SIZE, (POINTER, ctypes.POINTER(Tensor))), ("is_host", BOOL, (POINTER,)),
)  # fmt: skip
Backend = table(
    ("get_name", POINTER, (POINTER,)), ("free", None, (POINTER,)), *((f"unused{i}", None, ()) for i in range(5)),
    ("synchronize", None, (POINTER,)), *((f"unused{i}", None, ()) for i in range(5, 9)),
    ("graph_compute", ctypes.c_int, (POINTER, POINTER)), ("event_record", None, (POINTER, POINTER)),
    ("event_wait", None, (POINTER, POINTER)),
    ("graph_optimize", None, (POINTER, ctypes.POINTER(Graph), ctypes.POINTER(Optimize))),
)  # fmt: skip
Device = table(
    ("get_name", POINTER, (POINTER,)), ("get_description", POINTER, (POINTER,)),
    ("get_memory", None, (POINTER, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE))), ("get_type", ctypes.c_int, (POINTER,)),
    ("get_props", None, (POINTER, ctypes.POINTER(Props))), ("init_backend", POINTER, (POINTER, TEXT)),
    ("get_buffer_type", POINTER, (POINTER,)), ("get_host_buffer_type", POINTER, (POINTER,)), ("buffer_from_host_ptr", None, ()),
    ("supports_op", BOOL, (POINTER, POINTER)), ("supports_buft", BOOL, (POINTER, POINTER)),
    ("offload_op", BOOL, (POINTER, ctypes.POINTER(Tensor))), ("event_new", POINTER, (POINTER,)), ("event_free", None, (POINTER, POINTER)),
    ("event_synchronize", None, (POINTER, POINTER)),
)  # fmt: skip
Registry = table(
    ("get_name", POINTER, (POINTER,)), ("get_device_count", SIZE, (POINTER,)), ("get_device", POINTER, (POINTER, SIZE)),
    ("get_proc_address", POINTER, (POINTER, TEXT)),
)  # fmt: skip


class BuftObject(ctypes.Structure):
    _fields_ = [("iface", Buft), ("device", POINTER), ("context", POINTER)]


class BackendObject(ctypes.Structure):
    _fields_ = [("guid", POINTER), ("iface", Backend), ("device", POINTER), ("context", POINTER)]


class DeviceObject(ctypes.Structure):
    _fields_ = [("iface", Device), ("reg", POINTER), ("context", POINTER)]


class EventObject(ctypes.Structure):
    _fields_ = [("device", POINTER), ("context", POINTER)]


class RegistryObject(ctypes.Structure):
    _fields_ = [("api_version", ctypes.c_int), ("iface", Registry), ("context", POINTER)]


BUFT_OF_BUFFER = 11 * ctypes.sizeof(POINTER)  # in struct ggml_backend_buffer: behind the functions of a buffer


class PretendGPUs:
    """Registers devices CUDA0, CUDA1, ... with ggml. Owns the objects that ggml points to: keep it as long as the process.

    is_cuda: they do what CUDA's do; else only what all do.
    """

    def __init__(self, n: int, n_bytes: int, is_cuda: bool = True) -> None:
        from a3b_gguf.llama.symbols import ggml_function

        self.n_bytes, self.is_cuda = n_bytes, is_cuda
        self.op_name = ggml_function("ggml_op_name", TEXT, (ctypes.c_int,))
        self.mul = next(op for op in range(1000) if self.op_name(op) == b"MUL")
        self.nbytes = ggml_function("ggml_nbytes", SIZE, (POINTER,))
        self.host_type = ggml_function("ggml_backend_cpu_buffer_type", POINTER, ())
        self.host_alloc = ggml_function("ggml_backend_buft_alloc_buffer", POINTER, (POINTER, SIZE))
        self.guid = ctypes.create_string_buffer(b"a3b pretend gpu.", 16)
        self.texts = [ctypes.create_string_buffer(text) for text in (*(b"CUDA%d" % i for i in range(n)), b"CUDA", b"not there")]
        *self.names, self.kind, self.description = (ctypes.addressof(text) for text in self.texts)
        self.registry = RegistryObject()
        self.devices = [DeviceObject() for _ in range(n)]
        self.bufts = [BuftObject() for _ in range(n)]
        self.backends: list[BackendObject] = []
        self.events = [EventObject(device=ctypes.addressof(device)) for device in self.devices]
        for i in range(n):
            self.fill(i)
        at = ctypes.addressof
        self.registry.api_version = API_VERSION
        put(self.registry.iface, get_name=lambda _reg: self.kind, get_device_count=lambda _reg: n)
        put(self.registry.iface, get_device=lambda _reg, i: at(self.devices[i]), get_proc_address=lambda _reg, _name: None)
        ggml_function("ggml_backend_register", None, (POINTER,))(at(self.registry))

    def fill(self, i: int) -> None:
        at, name = ctypes.addressof, self.names[i]
        buft, device = self.bufts[i], self.devices[i]
        put(buft.iface, get_name=lambda _b: name, alloc_buffer=lambda _b, size: self.allocated(i, size), get_alignment=lambda _b: ALIGNMENT)
        put(buft.iface, get_alloc_size=lambda _b, tensor: self.alloc_size(tensor), is_host=lambda _b: False)
        buft.device = at(device)
        device.reg = at(self.registry)
        put(device.iface, get_name=lambda _d: name, get_description=lambda _d: self.description, get_type=lambda _d: GPU_TYPE)
        put(device.iface, get_memory=lambda _d, free, total: self.memory(free, total), get_props=lambda _d, props: self.props(name, props))
        put(device.iface, init_backend=lambda _d, _p: self.backend(i), get_buffer_type=lambda _d: at(buft))
        put(device.iface, get_host_buffer_type=lambda _d: self.host_type(), supports_op=lambda _d, _op: True)
        put(device.iface, supports_buft=lambda _d, other: other == at(buft), offload_op=lambda _d, op: self.rows(op) >= OFFLOAD_ROWS)
        put(device.iface, event_new=lambda _d: at(self.events[i]), event_free=lambda _d, _e: None, event_synchronize=lambda _d, _e: None)

    def allocated(self, i: int, size: int) -> int:
        """Memory of the host that says it is the device's: recurrent states are allocated even for a dry run."""
        buffer: int = self.host_alloc(self.host_type(), size + ALIGNMENT)  # which need not begin at a multiple of it
        ctypes.c_void_p.from_address(buffer + BUFT_OF_BUFFER).value = ctypes.addressof(self.bufts[i])
        return buffer

    def alloc_size(self, pointer: Any) -> int:
        """Source: ggml_cuda_flash_attn_ext_get_f16_extra_data in ggml/src/ggml-cuda/fattn-common.cuh."""
        size: int = self.nbytes(pointer)
        tensor = pointer.contents
        if not self.is_cuda or self.op_name(tensor.op).decode() != FLASH_ATTN_EXT:
            return size
        for source in tensor.src[1:3]:
            cache = Tensor.from_address(source)
            if cache.type != F16:
                size = -(-size // ALIGNMENT) * ALIGNMENT + 2 * prod(cache.ne)
        return size

    def rows(self, pointer: Any) -> int:
        """Source: get_op_batch_size in ggml/src/ggml-cuda/ggml-cuda.cu."""
        tensor = pointer.contents
        name, shape = self.op_name(tensor.op).decode(), tensor.ne
        if name == GET_ROWS:
            return 0
        if name == MUL_MAT:
            return int(shape[1])
        return int(shape[2]) if name in (MUL_MAT_ID, ROPE) else prod(shape[1:])

    def keep_experts(self, graph: Graph, asked: Optimize) -> None:
        """Source: ggml_cuda_match_moe_weighted_reduction and ggml_backend_cuda_graph_optimize in ggml/src/ggml-cuda/ggml-cuda.cu."""
        nodes = [Tensor.from_address(graph.nodes[i]) for i in range(graph.n_nodes)]
        for i, node in enumerate(nodes):
            if node.op != self.mul or not node.src[1] or not 2 <= node.ne[1] <= MOST_EXPERTS:
                continue
            experts, weights = (Tensor.from_address(source) for source in node.src[:2])
            alike = list(experts.ne) == list(node.ne) and list(weights.ne) == [1, *node.ne[1:]]
            last = i + 2 * node.ne[1] - 1
            if alike and last < len(nodes) and all(self.op_name(other.op) in (b"VIEW", b"ADD") for other in nodes[i + 1 : last + 1]):
                for source in node.src[:2]:
                    asked.add_alloc_dep(asked.user_data, source, graph.nodes[last])

    def memory(self, free: Any, total: Any) -> None:
        free[0] = total[0] = self.n_bytes

    def props(self, name: int, props: Any) -> None:
        found = props.contents
        found.name, found.description, found.type, found.id = name, self.description, GPU_TYPE, None
        found.free = found.total = self.n_bytes
        found.async_ = found.host_buffer = found.events = True
        found.buffer_from_host_ptr = found.mmap = False

    def backend(self, i: int) -> int:
        made = BackendObject(guid=ctypes.addressof(self.guid), device=ctypes.addressof(self.devices[i]))
        put(made.iface, get_name=lambda _b: self.names[i], free=lambda _b: None, synchronize=lambda _b: None)
        if self.is_cuda:
            put(made.iface, graph_optimize=lambda _b, graph, asked: self.keep_experts(graph.contents, asked.contents))
        put(made.iface, event_record=lambda _b, _e: None, event_wait=lambda _b, _e: None)
        self.backends.append(made)
        return ctypes.addressof(made)


def put(iface: ctypes.Structure, **functions: Any) -> None:
    kinds = dict(iface._fields_)  # type: ignore[arg-type]
    for name, function in functions.items():
        setattr(iface, name, kinds[name](function))


def buffers_on_gpus(path: Path, loads: Sequence[LoadParams], n_gpus: int = 1, is_cuda: bool = True) -> list[dict[str, float]]:
    """Compute buffers that llama.cpp would reserve for each of `loads`, in MiB: of CUDA0, CUDA1, ... and of the host ("RAM")."""
    words = json.dumps([dataclasses.asdict(load) for load in loads])
    command = [sys.executable, __file__, str(path), str(n_gpus), str(int(is_cuda))]
    done = subprocess.run(command, input=words, capture_output=True, text=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
    if done.returncode:
        raise RuntimeError(f"the pretended GPU failed with {done.returncode}: {done.stderr[-2000:]}")
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def reserved(path: Path, loads: Sequence[LoadParams], n_gpus: int, is_cuda: bool) -> list[dict[str, float]]:
    """The same in this process, which is spoiled for anything else by it."""
    from a3b_gguf.llama.load import load_model, open_context

    gpus = PretendGPUs(n_gpus, 64 << 30, is_cuda)
    found = []
    for load in loads:
        with load_model(path, load, dry=True) as model, open_context(model, load) as context:
            sizes = {device: float(size) for line in context.log for device, size in COMPUTE.findall(line.text)}
            found.append({"RAM" if name == "CPU" else name: size for name, size in sizes.items()})
    gpus.backends.clear()
    return found


if __name__ == "__main__":
    rows = [params_of(row) for row in json.loads(sys.stdin.read())]
    sys.stdout.write(json.dumps(reserved(Path(sys.argv[1]), rows, int(sys.argv[2]), sys.argv[3] == "1")) + "\n")
