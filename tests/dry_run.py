"""llama.cpp's own count of the memory that LoadParams take, from a child process: the oracle of the planner's tests.

    python tests/dry_run.py MODEL.gguf '{"n_ctx": 4096, ...}' [--real]

Without --real nothing is allocated but recurrent states (llama_model_params.no_alloc), so sparse files can be asked about.
With --real the model is loaded; never do that to a sparse file. Prints the sizes that llama.cpp logs, as JSON, in MiB.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from a3b_gguf.llama.params import LoadParams
from a3b_gguf.tensors import TYPES

LINES = {
    "kv": re.compile(r"llama_kv_cache: size = +([\d.]+) MiB"),
    "recurrent": re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB"),
    "output": re.compile(r"output buffer size = +([\d.]+) MiB"),
    "compute": re.compile(r"compute buffer size = +([\d.]+) MiB"),
    "model": re.compile(r"\S+ model buffer size = +([\d.]+) MiB"),
    "repacked": re.compile(r"CPU_REPACK model buffer size = +([\d.]+) MiB"),
}


def dry_run(path: Path, load: LoadParams, real: bool = False) -> dict[str, float]:
    """Sums of the sizes that llama.cpp logs, in MiB: the keys of LINES (model and repacked are 0 unless real), and n_ctx in tokens."""
    command = [sys.executable, __file__, str(path), json.dumps(dataclasses.asdict(load)), *(["--real"] if real else [])]
    # Without this a failed assertion of llama.cpp starts gdb and takes seconds.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
    if done.returncode:
        raise RuntimeError(f"dry run failed with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(path: str, load: LoadParams, real: bool) -> dict[str, float]:
    import ctypes

    import llama_cpp.llama_cpp as C

    said: list[str] = []

    @C.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(_level: int, text: bytes, _data: Any) -> None:
        said.append(text.decode(errors="replace"))

    C.llama_log_set(on_log, ctypes.c_void_p(0))
    C.llama_backend_init()
    asked = C.llama_model_default_params()
    asked.no_alloc, asked.n_gpu_layers, asked.load_mtp = not real, load.n_gpu_layers, load.load_mtp
    asked.load_mode = C.LLAMA_LOAD_MODE_MMAP if real and load.use_mmap else C.LLAMA_LOAD_MODE_NONE
    model = C.llama_model_load_from_file(path.encode(), asked)
    if not model:
        raise SystemExit("".join(said)[-1000:])
    params = C.llama_context_default_params()
    for field in ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_outputs_max", "n_threads", "n_threads_batch", "kv_unified"):
        setattr(params, field, getattr(load, field))
    params.n_outputs_max_per_seq = max(1, load.n_outputs_max // load.n_seq_max)
    params.type_k, params.type_v = TYPES[load.kv_type_k].number, TYPES[load.kv_type_v].number
    params.flash_attn_type = int(load.flash_attn)
    context = C.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("".join(said)[-1000:])
    text = "".join(said)
    found = {name: sum(float(size) for size in pattern.findall(text)) for name, pattern in LINES.items()}
    found["n_ctx"] = float(C.llama_n_ctx(context))
    C.llama_free(context)
    C.llama_model_free(model)
    return found


if __name__ == "__main__":
    values = json.loads(sys.argv[2])
    values["cpu_expert_layers"] = tuple(values.get("cpu_expert_layers", ()))
    sys.stdout.write(json.dumps(measure(sys.argv[1], LoadParams(**values), "--real" in sys.argv[3:])) + "\n")
