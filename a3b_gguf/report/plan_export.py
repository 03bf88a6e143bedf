"""A plan in the words of other programs: a llama-server command, an Ollama Modelfile, a llama-swap configuration.

Flags: common/arg.cpp of the llama.cpp that the installed llama-cpp-python vendors. Modelfile: docs/modelfile.mdx and the Runner options
of api/types.go of Ollama. llama-swap: its config-schema.json.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from a3b_gguf.planner.plan import Plan
from a3b_gguf.units import MIB

EXPERTS = r"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # what --n-cpu-moe matches: LLM_FFN_EXPS_REGEX in common/common.h


def arguments(plan: Plan) -> list[str]:
    """The words after `llama-server` that load exactly this plan. Its own fitting is off: it would ignore RAM and change the context."""
    load = plan.load
    words = [
        "--model", str(plan.facts.path), "--ctx-size", str(load.n_ctx), "--parallel", str(load.n_seq_max),
        "--n-gpu-layers", str(load.n_gpu_layers), "--batch-size", str(load.n_batch), "--ubatch-size", str(load.n_ubatch),
        "--cache-type-k", load.kv_type_k, "--cache-type-v", load.kv_type_v, "--flash-attn", "on" if load.flash_attn else "off",
        "--threads", str(load.n_threads), "--threads-batch", str(load.n_threads_batch),
        "--load-mode", "mmap" if load.use_mmap else "none", "--fit", "off",
        "--kv-unified" if load.kv_unified else "--no-kv-unified",
    ]  # fmt: skip
    if load.tensor_split:
        words += ["--tensor-split", ",".join(f"{share:g}" for share in load.tensor_split)]
    words += experts(plan)
    words += ["--ctx-checkpoints", str(n_checkpoints(plan)), "--cache-ram", str(load.text_bytes // MIB)]
    if load.n_draft:
        words += ["--spec-type", "draft-mtp" if load.load_mtp else "ngram-simple", "--spec-draft-n-max", str(load.n_draft)]
    if plan.facts.projector:
        words += ["--mmproj", str(plan.facts.projector.path)]
    return words


def experts(plan: Plan) -> list[str]:
    """Experts in RAM: whole layers from the first by count, others by pattern, single tensors before them since the first match counts."""
    layers, patterns = plan.load.cpu_expert_layers, [pattern for pattern, _ in plan.load.tensor_overrides]
    if layers != tuple(range(len(layers))):
        patterns += [EXPERTS % layer for layer in layers]
        layers = ()
    words = ["--override-tensor", ",".join(f"{pattern}=CPU" for pattern in patterns)] if patterns else []
    return words + (["--n-cpu-moe", str(len(layers))] if layers else [])


def n_checkpoints(plan: Plan) -> int:
    """How many copies of one slot's state the plan's RAM holds, for each slot."""
    one = plan.facts.state_bytes
    return plan.load.checkpoint_bytes // one // plan.load.n_seq_max if one else 0


def llama_server(plan: Plan) -> str:
    """One command, a flag a line."""
    words, lines = arguments(plan), []
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    environment = "".join(f"{name}={value} " for name, value in plan.environment)
    return " \\\n    ".join([f"{environment}llama-server", *lines]) + "\n"


def ollama(plan: Plan) -> str:
    """A Modelfile. What Ollama cannot say there goes into comments: variables of `ollama serve`, and what it has no words for."""
    load = plan.load
    variables = [("OLLAMA_FLASH_ATTENTION", "1"), ("OLLAMA_KV_CACHE_TYPE", load.kv_type_k), ("OLLAMA_NUM_PARALLEL", str(load.n_seq_max))]
    if load.cpu_expert_layers:
        variables.append(("LLAMA_ARG_N_CPU_MOE", str(len(load.cpu_expert_layers) + bool(load.tensor_overrides))))
    variables += plan.environment
    lines = ["# start Ollama with these, they hold for all models:", *(f"#   {name}={value}" for name, value in variables)]
    if load.kv_type_k != load.kv_type_v:
        lines.append(f"# Ollama takes one type for both caches; the plan has {load.kv_type_v} for V")
    if load.tensor_overrides or load.tensor_split:
        lines.append("# Ollama cannot place single tensors and splits GPUs by itself: one layer more of experts is in RAM than planned")
    lines += [
        f"FROM {plan.facts.path.resolve()}",
        f"PARAMETER num_ctx {load.n_ctx // load.n_seq_max}",  # Ollama multiplies by OLLAMA_NUM_PARALLEL
        f"PARAMETER num_gpu {load.n_gpu_layers}",
        f"PARAMETER num_batch {load.n_ubatch}",
        f"PARAMETER num_thread {load.n_threads}",
        f"PARAMETER use_mmap {str(load.use_mmap).lower()}",
    ]
    if load.n_draft:
        lines.append(f"PARAMETER draft_num_predict {load.n_draft}")
    return "\n".join(lines) + "\n"


def llama_swap(plan: Plan) -> str:
    """A configuration with one model that llama-server runs. JSON strings are YAML strings too."""
    name = plan.facts.path.stem
    command = shlex.join(["llama-server", "--host", "127.0.0.1", "--port", "${PORT}", *arguments(plan)]).replace("'${PORT}'", "${PORT}")
    lines = ["models:", f"  {json.dumps(name)}:", f"    name: {json.dumps(plan.facts.name)}", f"    cmd: {json.dumps(command)}"]
    lines += ["    checkEndpoint: /health"]
    if plan.environment:
        lines += ["    env:", *(f"      - {json.dumps(f'{name}={value}')}" for name, value in plan.environment)]
    return "\n".join(lines) + "\n"


EXPORTS: dict[str, Callable[[Plan], str]] = {"llama-server": llama_server, "ollama": ollama, "llama-swap": llama_swap}
