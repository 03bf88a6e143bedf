"""What `a3b plan` predicts against llama.cpp's own allocator, against published logs and readings, and how long planning takes.

Allocator: sparse files with the true headers of Qwen3.6-35B-A3B (with its MTP block) and Qwen3-30B-A3B, contexts of 4k to 256k, KV f16,
q8_0 and q4_0, ubatch 512 and 2,048, 1 and 4 slots: KV cache, recurrent state, output and compute buffers equal to the printed 0.01 MiB.
Published: tests/plan_readings.toml. A buffer that llama.cpp printed within 1 %; a whole card within 5 % or 400 MiB; no setup that
failed called a fit; at most one that worked called impossible; decoding speed within 35 %.
GPU buffers: the same llama.cpp with GPUs that are not there (tests/pretend_gpu.py), the cases of tests/gpu_buffers.py: within 0.1 MiB.
Speed: each machine within 35 % also when its own readings have no part in the fit.
Times, in seconds of CPU, which is what a quiet machine takes (one thread): a plan under 0.4 s as a command on a file with 248,320 tokens,
the search under 50 ms, a refusal with what would help under 0.3 s (medians of several machines).
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from a3b_gguf.errors import AnswerIsNo  # noqa: E402
from a3b_gguf.flows.plan import read_facts  # noqa: E402
from a3b_gguf.llama.params import LoadParams  # noqa: E402
from a3b_gguf.machine import Machine, with_ram, with_vram  # noqa: E402
from a3b_gguf.memory.compute import replayed, replayed_mtp  # noqa: E402
from a3b_gguf.memory.facts import Facts  # noqa: E402
from a3b_gguf.memory.placement import place  # noqa: E402
from a3b_gguf.memory.settings import Settings  # noqa: E402
from a3b_gguf.memory.terms import all_terms  # noqa: E402
from a3b_gguf.planner.decide import plan  # noqa: E402
from a3b_gguf.planner.plan import Wishes  # noqa: E402
from a3b_gguf.planner.refuse import OR  # noqa: E402
from a3b_gguf.units import GIB, MIB  # noqa: E402
from dry_run import dry_runs  # noqa: E402
from gpu_buffers import FILE, MODELS, cases, predicted  # noqa: E402
from kin_headers import sparse_30b, sparse_35b_mtp  # noqa: E402
from plan_readings import CLOSE, CLOSE_BYTES, EXACT, SPEED, Compared, held_out, logs, readings  # noqa: E402
from true_header import sparse_35b  # noqa: E402

PRINTED = 0.00501  # half of the last digit that llama.cpp prints, MiB
COMMAND_SECONDS, SEARCH_SECONDS, REFUSAL_SECONDS = 0.4, 0.05, 0.3
GPU_MIB = 0.1
TERMS = {
    "KV cache": "kv", "recurrent state": "recurrent", "output buffer": "output", "compute buffer": "compute",
    "MTP context: KV cache": "mtp kv", "MTP context: compute buffer": "mtp compute", "MTP context: output buffer": "mtp output",
}  # fmt: skip


def grid(mtp: bool) -> Iterator[LoadParams]:
    for n_ctx, kv, rows, slots in itertools.product((4096, 16384, 65536, 131072, 262144), ("f16", "q8_0", "q4_0"), (512, 2048), (1, 4)):
        yield LoadParams(n_ctx, slots, rows, rows, slots, kv_type_k=kv, kv_type_v=kv, load_mtp=mtp)


def settings_of(load: LoadParams) -> Settings:
    return Settings(load.n_ctx, load.n_seq_max, load.n_ubatch, load.n_outputs_max, load.kv_type_k, load.kv_type_v, load_mtp=load.load_mtp)


def allocator(name: str, path: Path, mtp: bool) -> bool:
    """A line of the largest difference of each term; whether one is larger than what llama.cpp prints."""
    facts, loads, worst = read_facts(path), list(grid(mtp)), dict.fromkeys(TERMS, 0.0)
    for load, real in zip(loads, dry_runs(path, loads), strict=True):
        found = {term.name: term.n_bytes / MIB for term in all_terms(facts, (), place(facts.n_layer_all, (), 0), settings_of(load))}
        for term, key in TERMS.items():
            worst[term] = max(worst[term], abs(found.get(term, 0.0) - real.get(key, 0.0)))
    print(f"\n{name}: {len(loads)} contexts, largest difference to the printed MiB")
    for term, off in worst.items():
        print(f"  {term:32}{off:8.4f}")
    return max(worst.values()) > PRINTED


def published() -> bool:
    """Both tables; whether a limit is broken."""
    print(f"\n{'log':14}{'buffer':32}{'published MiB':>14}{'predicted':>12}{'off':>9}")
    broken = False
    for row in logs():
        limit = CLOSE if row.what.startswith("f16 copy") else EXACT
        broken |= abs(row.off) > limit
        print(f"{row.id:14}{row.what:32}{row.published:14.2f}{row.predicted:12.2f}{row.off:+9.2%}")
    columns = f"{'VRAM MiB':>10}{'predicted':>11}{'off':>8}{'tokens/s':>11}{'predicted':>11}{'off':>8}"
    print(f"\n{'reading':9}{'outcome':15}{'verdict':10}{columns}")
    wrong_fits = wrong_refusals = 0
    for each in readings():
        wrong_fits, wrong_refusals = wrong_fits + each.wrong_fit, wrong_refusals + each.wrong_refusal
        print(f"{each.id:9}{each.outcome:15}{each.verdict:10}{shown(each.vram, 10, 11)}{shown(each.decode, 11, 11)}")
        vram, decode = each.vram, each.decode
        broken |= vram is not None and abs(vram.off) > CLOSE and abs(vram.predicted - vram.published) * MIB > CLOSE_BYTES
        broken |= decode is not None and abs(decode.off) > SPEED
    print("\neach machine predicted with shares fitted to the other one's readings, tokens/s")
    for row in held_out():
        print(f"  {row.id:9}{row.published:8.1f}{row.predicted:8.1f}{row.off:+8.1%}")
        broken |= abs(row.off) > SPEED
    print(f"called a fit and failed: {wrong_fits}; worked and called impossible: {wrong_refusals}")
    return broken or wrong_fits > 0 or wrong_refusals > 1


def on_gpus(folder: Path) -> bool:
    """The largest difference to what llama.cpp reserves on GPUs that are not there, by kind of placement; whether it is beyond 0.1 MiB."""
    worst: dict[str, float] = {}
    known = {name: read_facts(make(folder / f"gpu-{name}.gguf")) for name, make in MODELS.items()}
    for case, real in zip(cases(), json.loads(FILE.read_text()), strict=True):
        found = predicted(known[case.model], case)
        for device, size in real.items():
            kind = "layers in RAM" if case.load.n_gpu_layers < 99 else "experts in RAM" if case.load.cpu_expert_layers else "all on GPUs"
            where = "GPU" if device == "CUDA0" else "second GPU" if device != "RAM" else "host"
            key = f"{where}, {kind}"
            worst[key] = max(worst.get(key, 0.0), abs(found[device] - size), key=abs)
    print("\ncompute buffers with GPUs that are not there, largest difference in MiB")
    for key, off in worst.items():
        print(f"  {key:32}{off:8.2f}")
    return max(worst["GPU, all on GPUs"], worst["GPU, experts in RAM"]) > GPU_MIB


def shown(row: Compared | None, first: int, second: int) -> str:
    if row is None:
        return " " * (first + second + 8)
    return f"{row.published:{first}.1f}{row.predicted:{second}.1f}{row.off:+8.1%}"


def times(path: Path) -> bool:
    """Prints medians of CPU time; whether one is over its limit."""
    facts = read_facts(path)
    searches = [search_seconds(facts, vram, n_ctx) for vram in ((8,), (12,), (16,), (24,), (12, 12)) for n_ctx in (64000, 262144)]
    command = [sys.executable, "-m", "a3b_gguf", "plan", str(path), "--ctx", "64000", "--vram", "12GiB", "--ram", "32GiB", "--json"]
    commands = []
    # Modules are compiled once, as installing a package does; the first run is not counted.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(path.with_name("compiled"))
    for _ in range(8):
        before = children_seconds()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        commands.append(children_seconds() - before)
    commands = commands[1:]
    refusals = [refusal_seconds(facts, vram, ram) for vram, ram in (((8,), 16), ((), 16), ((12,), 12), ((8, 8), 8))]
    search, whole = statistics.median(searches), statistics.median(commands)
    print(f"\nsearch over placements, nothing replayed before: {1000 * search:.0f} ms (limit {1000 * SEARCH_SECONDS:.0f}), ", end="")
    print(f"slowest of {len(searches)} machines {1000 * max(searches):.0f} ms")
    print(f"a3b plan of a file with 248,320 tokens: {whole:.2f} s (limit {COMMAND_SECONDS})")
    refusal = statistics.median(refusals)
    print(f"a refusal with three changes, nothing replayed before: {refusal:.2f} s (limit {REFUSAL_SECONDS}), ", end="")
    print(f"slowest {max(refusals):.2f} s")
    return search > SEARCH_SECONDS or whole > COMMAND_SECONDS or refusal > REFUSAL_SECONDS


def refusal_seconds(facts: Facts, vram: tuple[int, ...], ram: int) -> float:
    where = with_ram(with_vram(Machine(0, 0, 8), tuple(size * GIB for size in vram)), ram * GIB)
    replayed.cache_clear()
    start = time.process_time()
    try:
        plan(facts, where, Wishes(n_ctx=262144))
    except AnswerIsNo as error:
        seconds, n_changes = time.process_time() - start, error.hint.count(OR) + 1
        return seconds if n_changes == 3 else float("inf")
    return float("inf")  # this machine was to be refused


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def search_seconds(facts: Facts, vram: tuple[int, ...], n_ctx: int) -> float:
    where = with_ram(with_vram(Machine(0, 0, 8), tuple(size * GIB for size in vram)), 32 * GIB)
    found = []
    for _ in range(3):
        replayed.cache_clear()
        replayed_mtp.cache_clear()
        start = time.process_time()
        plan(facts, where, Wishes(n_ctx=n_ctx))
        found.append(time.process_time() - start)
    return min(found)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        mtp, plain = sparse_35b_mtp(Path(folder) / "35b-mtp.gguf", 248320), sparse_35b(Path(folder) / "35b.gguf", "iq4_nl")
        broken = allocator("Qwen3.6-35B-A3B with its MTP block", mtp, mtp=True)
        broken |= allocator("Qwen3-30B-A3B", sparse_30b(Path(folder) / "30b.gguf", n_vocab=151936), mtp=False)
        broken |= on_gpus(Path(folder))
        broken |= published()
        broken |= times(plain)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
