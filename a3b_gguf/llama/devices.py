"""The GPUs that llama.cpp would use, as its own device list reports them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from a3b_gguf.llama.symbols import ggml_function

# enum ggml_backend_dev_type of ggml-backend.h
KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A device of llama.cpp. kind: a value of KINDS; free and total are bytes, both 0 when the driver does not say.

    bus_id: its PCI address ("0000:c1:00.0"), empty when it has none or nobody knows.
    """

    name: str
    description: str
    kind: str
    backend: str
    free: int
    total: int
    bus_id: str = ""


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props of ggml-backend.h; room is left behind it for capabilities that later versions add."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 64),
    ]


def devices() -> tuple[ListedDevice, ...]:
    """Every device that the installed llama.cpp knows of, the CPU among them, in its order.

    Asking a GPU for its memory starts its driver in this process, so the serving process should not ask.
    """
    count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t, [])
    get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t])
    return tuple(_device(get(i)) for i in range(count()))


def gpus() -> tuple[ListedDevice, ...]:
    """Those that llama.cpp loads a model on when it is not told otherwise.

    Source: llama_prepare_model_devices in src/llama.cpp: all GPUs, and integrated ones only when there is no other.
    """
    listed = devices()
    real = tuple(d for d in listed if d.kind == "gpu" and d.backend != "RPC")
    return real or tuple(d for d in listed if d.kind == "igpu")


def _device(pointer: int) -> ListedDevice:
    def text(function: str, of: int) -> str:
        return str(ggml_function(function, ctypes.c_char_p, [ctypes.c_void_p])(of).decode(errors="replace"))

    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p])(pointer)
    registry = ggml_function("ggml_backend_dev_backend_reg", ctypes.c_void_p, [ctypes.c_void_p])(pointer)
    ask = ggml_function("ggml_backend_dev_get_props", None, [ctypes.c_void_p, ctypes.POINTER(_Properties)])
    told = _Properties()
    ask(pointer, ctypes.byref(told))
    return ListedDevice(
        name=text("ggml_backend_dev_name", pointer),
        description=text("ggml_backend_dev_description", pointer),
        kind=KINDS.get(kind, "other"),
        backend=text("ggml_backend_reg_name", registry),
        free=told.memory_free,
        total=told.memory_total,
        bus_id=(told.device_id or b"").decode(errors="replace"),
    )
