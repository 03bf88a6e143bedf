"""llama.cpp's own count of the memory that LoadParams take, from a child process: the oracle of the planner's tests.

    python tests/dry_run.py MODEL.gguf '[{"n_ctx": 4096, ...}, ...]' [--real]

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
from collections.abc import Sequence
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
MTP_CONTEXT = 1  # llama_context_params.ctx_type
Sizes = dict[str, float]


def dry_run(path: Path, load: LoadParams, real: bool = False) -> Sizes:
    """Sums of the sizes that llama.cpp logs, in MiB: the keys of LINES (model and repacked are 0 unless real), and n_ctx in tokens.

    With load_mtp also those of the MTP context: "mtp kv", "mtp compute" and so on.
    """
    return dry_runs(path, [load], real)[0]


def dry_runs(path: Path, loads: Sequence[LoadParams], real: bool = False) -> list[Sizes]:
    """The same for many contexts on one model, which is opened once, as the first of `loads` says."""
    words = json.dumps([dataclasses.asdict(load) for load in loads])
    command = [sys.executable, __file__, str(path), words, *(["--real"] if real else [])]
    # Without this a failed assertion of llama.cpp starts gdb and takes seconds.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
    if done.returncode:
        raise RuntimeError(f"dry run failed with {done.returncode}: {done.stderr[-2000:]}")
    found: list[Sizes] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(path: str, loads: Sequence[LoadParams], real: bool) -> list[Sizes]:
    import ctypes

    import llama_cpp.llama_cpp as C

    said: list[str] = []

    @C.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(_level: int, text: bytes, _data: Any) -> None:
        said.append(text.decode(errors="replace"))

    C.llama_log_set(on_log, ctypes.c_void_p(0))
    C.llama_backend_init()
    asked = C.llama_model_default_params()
    asked.no_alloc, asked.n_gpu_layers, asked.load_mtp = not real, loads[0].n_gpu_layers, loads[0].load_mtp
    asked.load_mode = C.LLAMA_LOAD_MODE_MMAP if real and loads[0].use_mmap else C.LLAMA_LOAD_MODE_NONE
    model = C.llama_model_load_from_file(path.encode(), asked)
    if not model:
        raise SystemExit("".join(said)[-1000:])
    loading, results = "".join(said), []
    for load in loads:
        found = opened(C, model, said, context_params(C, load), loading)
        if load.load_mtp:
            draft = context_params(C, load)
            draft.ctx_type, draft.n_rs_seq, draft.n_outputs_max, draft.n_outputs_max_per_seq = MTP_CONTEXT, 0, load.n_seq_max, 1
            found |= {f"mtp {name}": size for name, size in opened(C, model, said, draft, "").items()}
        results.append(found)
    C.llama_model_free(model)
    return results


def context_params(C: Any, load: LoadParams) -> Any:
    params = C.llama_context_default_params()
    for field in ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_outputs_max", "n_threads", "n_threads_batch", "kv_unified"):
        setattr(params, field, getattr(load, field))
    params.n_rs_seq, params.n_outputs_max_per_seq = load.n_draft, max(1, load.n_outputs_max // load.n_seq_max)
    params.type_k, params.type_v = TYPES[load.kv_type_k].number, TYPES[load.kv_type_v].number
    params.flash_attn_type = int(load.flash_attn)
    return params


def opened(C: Any, model: Any, said: list[str], params: Any, loading: str) -> Sizes:
    """What is said while a context is opened, and was said while the model was loaded."""
    said.clear()
    context = C.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("".join(said)[-1000:])
    text = loading + "".join(said)
    found = {name: sum(float(size) for size in pattern.findall(text)) for name, pattern in LINES.items()}
    found["n_ctx"] = float(C.llama_n_ctx(context))
    C.llama_free(context)
    return found


if __name__ == "__main__":
    rows = json.loads(sys.argv[2])
    for row in rows:
        for name in ("cpu_expert_layers", "tensor_split", "tensor_overrides"):
            row[name] = tuple(tuple(each) if isinstance(each, list) else each for each in row.get(name, ()))
    sys.stdout.write(json.dumps(measure(sys.argv[1], [LoadParams(**row) for row in rows], "--real" in sys.argv[3:])) + "\n")
