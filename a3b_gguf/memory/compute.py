"""Compute buffers, estimated: what a graph holds at its worst moment.

llama.cpp's allocator places every tensor of the graph and reuses freed space (ggml/src/ggml-alloc.c); its exact answer needs the
graph. These sums name the tensors that are alive together at the worst moment of each kind of layer. They were checked against
dry runs of the installed llama.cpp for the widths of Qwen3.6-35B-A3B, Qwen3-30B-A3B, Qwen3-Next-80B-A3B, tiny-a3b and
SmolLM2: within 6 % (tests/test_memory.py). Mask, inputs and logits are exact. On GPUs they were checked against the few published
logs that name these buffers.
"""

from __future__ import annotations

from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings

F32 = 4


def mask(settings: Settings) -> int:
    """The attention mask in f16, as wide as a sequence's context. Source: build_attn_inp_kv in src/llama-graph.cpp."""
    return 2 * settings.n_ctx_seq * settings.n_rows


def host_inputs(facts: Facts, settings: Settings) -> int:
    """What stays in RAM when all layers are on GPUs: the mask, and the embedded tokens on their way there, twice."""
    return mask(settings) + 2 * F32 * settings.n_rows * facts.n_embd


def logits(facts: Facts, settings: Settings) -> int:
    """Rows of logits beside the last layer's output and its norm. Source: sched_reserve (n_outputs_pp) in src/llama-context.cpp."""
    rows = min(settings.n_rows, max(settings.n_outputs_max, settings.n_seq_max))
    return F32 * (facts.n_vocab * rows + 2 * facts.n_embd * settings.n_rows)


def activations(facts: Facts, settings: Settings) -> int:
    """The worst moment of the worst layer."""
    rows, hidden = settings.n_rows, F32 * facts.n_embd
    kinds = [rows * attention(facts)]
    if facts.n_recurrent:
        kinds += [rows * (3 * F32 * facts.conv_channels + 3 * hidden), delta_net(facts, settings)]
    kinds.append(rows * (experts(facts) if facts.n_expert else dense_ffn(facts)))
    return max(kinds)


def attention(facts: Facts) -> int:
    """Bytes a token: queries with their gates, both made contiguous, beside the residual. Source: src/models/qwen35moe.cpp."""
    heads = F32 * facts.n_head * facts.k_dim
    return (4 if facts.n_recurrent else 2) * heads + 4 * F32 * facts.n_embd


def delta_net(facts: Facts, settings: Settings) -> int:
    """Convolution input and output beside q, k, v, and the states of all sequences before and after.

    Source: build_layer_attn_linear in src/models/qwen35moe.cpp, src/models/delta-net-base.cpp.
    """
    rows = settings.n_rows * F32 * (3 * facts.conv_channels + 2 * facts.n_embd)
    return rows + 2 * F32 * facts.ssm_state * settings.n_seq_max


def experts(facts: Facts) -> int:
    """Bytes a token: outputs of all used experts before and after weighting; gate and up beside them unless a shared expert reuses
    their place. Source: build_moe_ffn in src/llama-graph.cpp."""
    down = F32 * facts.n_expert_used * facts.n_embd
    up = F32 * facts.n_expert_used * facts.n_ff_expert
    if not facts.n_ff_shared:
        return 2 * down + 2 * up
    return max(2 * down + 2 * F32 * facts.n_embd, 3 * up + 4 * F32 * facts.n_embd)


def dense_ffn(facts: Facts) -> int:
    """Bytes a token: gate, up and their product beside the residual. Source: build_ffn in src/llama-graph.cpp."""
    return 3 * F32 * facts.n_ff + 4 * F32 * facts.n_embd


def expert_staging(facts: Facts, placement: Placement) -> int:
    """A GPU that reads a prompt computes with experts that are in RAM: one expert tensor at a time is copied over.

    Source: ggml_backend_sched_backend_id_from_cur and the split rule for offloaded weights in ggml/src/ggml-backend.cpp.
    """
    held = [facts.layers[i].largest_expert for i in range(facts.n_layer) if placement.expert_device(i) == HOST]
    return max(held, default=0)
