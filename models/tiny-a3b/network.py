"""Fast CPU forward pass of Qwen3_5MoeForCausalLM's weights and of its multi-token-prediction block.

Same mathematics as transformers' modules (`python network.py CHECKPOINT` compares them), with bf16 matrix products, experts on sorted rows
without scatter, no mask (chats are padded on the right and everything is causal), and logits for chosen rows alone.
Shapes: B chats, T tokens, H hidden size, N = B * T rows, E experts, K experts a row, V vocabulary.
"""
from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

CHUNK = 32


def product(x, *weights, dtype=torch.bfloat16):
    """x: [..., I] times the rows of all weights [O_i, I], in `dtype`. Returns [..., sum O_i] in `dtype`."""
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x.to(dtype), weight.to(dtype))


def norm(x, module):
    """RMS norm with a weight around zero, in float32. x: [..., H]."""
    return F.rms_norm(x.float(), x.shape[-1:], 1 + module.weight, module.eps)


class Spread(torch.autograd.Function):
    """Copies each row K times in the order of its experts; the gradient gathers them back, where indexing would scatter."""

    @staticmethod
    def forward(ctx, x, order, inverse, copies):
        """x: [N, H]; order: [N * K] sorted places; inverse: where each place went. Returns [N * K, H]."""
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx, gradient):
        inverse, = ctx.saved_tensors
        return gradient.index_select(0, inverse).view(-1, ctx.copies, gradient.shape[-1]).sum(1), None, None, None


class Gather(torch.autograd.Function):
    """Undoes the sorting of rows by expert: a permutation, so the gradient is one too."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        """x: [N * K, H] in sorted places. Returns the same rows in their first order."""
        ctx.save_for_backward(order)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx, gradient):
        order, = ctx.saved_tensors
        return gradient.index_select(0, order), None, None


def experts(x, mlp):
    """Routed and shared experts. x: [N, H] float32. Returns [N, H] float32 and the router's probabilities and counts for `balance`."""
    routed, count, copies = mlp.experts, mlp.gate.num_experts, mlp.gate.top_k
    probabilities = F.linear(x, mlp.gate.weight).softmax(-1)
    top, chosen = probabilities.topk(copies, -1)
    top = top / top.sum(-1, keepdim=True)
    order = chosen.view(-1).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    sizes = chosen.view(-1).bincount(minlength=count)
    low = x.to(torch.bfloat16)
    parts = Spread.apply(low, order, inverse, copies).split(sizes.tolist())
    gate_up, down = routed.gate_up_proj.to(torch.bfloat16), routed.down_proj.to(torch.bfloat16)
    out = []
    for expert, rows in enumerate(parts):
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, -1)
        out.append(F.linear(F.silu(gate) * up, down[expert]))
    y = Gather.apply(torch.cat(out), order, inverse).view(-1, copies, x.shape[-1])
    y = torch.einsum("nkh,nk->nh", y.float(), top)
    shared = mlp.shared_expert
    gate, up = product(low, shared.gate_proj.weight, shared.up_proj.weight).chunk(2, -1)
    y = y + product(F.silu(gate) * up, shared.down_proj.weight) * F.linear(x, mlp.shared_expert_gate.weight).sigmoid()
    return y, (probabilities, chosen)


def balance(routing, real):
    """How unevenly the experts are used, 1 at best. routing: what `experts` returned; real: [N] bool, False for padding."""
    probabilities, chosen = routing
    share = F.one_hot(chosen[real], probabilities.shape[-1]).float().sum(1).mean(0)
    return probabilities.shape[-1] * (share / chosen.shape[-1] * probabilities[real].mean(0)).sum()


def short_convolution(x, weight):
    """Causal convolution along T, each channel alone, then SiLU. x: [B, T, C]; weight: [C, 1, W]."""
    width = weight.shape[-1]
    return F.silu(F.conv1d(x.transpose(1, 2), weight, padding=width - 1, groups=weight.shape[0])[..., :x.shape[1]]).transpose(1, 2)


def delta_rule(query, key, value, decay, beta, chunk=CHUNK):
    """Gated delta rule in float32, chunk by chunk. query, key, value: [B, heads, T, D], decay (log) and beta: [B, heads, T]; T a
    multiple of `chunk`. Returns [B, heads, T, D]."""
    batch, heads, length, size = query.shape
    query, key, value = (x.reshape(batch * heads, length // chunk, chunk, size) for x in (query, key, value))
    decay, beta = (x.reshape(batch * heads, length // chunk, chunk) for x in (decay, beta))
    total = decay.cumsum(-1)
    future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    scaled = key * beta.unsqueeze(-1)
    system = (scaled @ key.transpose(-1, -2)) * between
    right = torch.cat([value * beta.unsqueeze(-1), scaled * total.exp().unsqueeze(-1)], -1)
    fresh, old = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).chunk(2, -1)
    inside = (query @ key.transpose(-1, -2)) * between
    query = query * total.exp().unsqueeze(-1)
    key = (key * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    last = total[..., -1].exp()[..., None, None]
    state, out = query.new_zeros(batch * heads, size, size), []
    for i in range(length // chunk):
        written = fresh[:, i] - old[:, i] @ state if i else fresh[:, i]
        read = inside[:, i] @ written
        out.append(read + query[:, i] @ state if i else read)
        state = state * last[:, i] + key[:, i] @ written
    return torch.stack(out, 1).view(batch, heads, length, size)


def delta_net(x, layer):
    """Gated delta-net mixer. x: [B, T, H] normed. Returns [B, T, H] bf16."""
    keys, values, size = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim
    mixed, z = product(x, layer.in_proj_qkv.weight, layer.in_proj_z.weight).split([layer.conv_dim, layer.value_dim], -1)
    b, a = F.linear(x, torch.cat([layer.in_proj_b.weight, layer.in_proj_a.weight])).chunk(2, -1)
    mixed = short_convolution(mixed.float(), layer.conv1d.weight)
    parts = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    query, key, value = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query, key = (part.repeat_interleave(values // keys, 1) for part in (query * size ** -0.5, key))
    decay = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).transpose(1, 2)
    out = delta_rule(query, key, value, decay, b.sigmoid().transpose(1, 2)).transpose(1, 2)
    out = F.rms_norm(out, (size,), layer.norm.weight, layer.layer_norm_epsilon) * F.silu(z.unflatten(-1, (-1, size)).float())
    return product(out.flatten(2), layer.out_proj.weight)


def rotate(x, angles):
    """Rotary embedding of the first dimensions. x: [B, heads, T, D]; angles: [T, R / 2]."""
    half = angles.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention(x, layer, angles):
    """Gated full attention. x: [B, T, H] normed; angles: [T, R / 2]. Returns [B, T, heads * D] before the output projection, bf16."""
    size = layer.head_dim
    query_size, kv = layer.q_proj.weight.shape[0], layer.k_proj.weight.shape[0]
    both, key, value = product(x, layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight).split([query_size, kv, kv], -1)
    query, gate = both.unflatten(-1, (-1, 2 * size)).chunk(2, -1)
    query, key = norm(query, layer.q_norm).transpose(1, 2), norm(key.unflatten(-1, (-1, size)), layer.k_norm).transpose(1, 2)
    query, key = (rotate(part, angles).to(torch.bfloat16) for part in (query, key))
    value = value.unflatten(-1, (-1, size)).transpose(1, 2)
    key, value = (part.repeat_interleave(layer.num_key_value_groups, 1) for part in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=layer.scaling)
    return (out.transpose(1, 2) * gate.sigmoid()).flatten(2)


def angles_of(model, first, length):
    """Rotary angles [length, R / 2] of positions first, first + 1, ..."""
    return torch.arange(first, first + length).float()[:, None] * model.model.rotary_emb.inv_freq.float()


class NextTokenHead(nn.Module):
    """Multi-token-prediction block: from the state at i and the token at i+1, predicts the token at i+2.

    Names and order of operations are those of the `mtp.*` tensors in a Qwen3.5 checkpoint.
    """

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5MoeRMSNorm(size, eps)


def trunk(model, tokens):
    """tokens: [B, T], T a multiple of CHUNK. Returns the state after the final norm, [N, H] float32, and each layer's routing."""
    x = F.embedding(tokens, model.model.embed_tokens.weight)
    angles, routings = angles_of(model, 0, tokens.shape[1]), []
    for layer in model.model.layers:
        mixed = norm(x, layer.input_layernorm)
        if layer.block_type == "linear_attention":
            x = x + delta_net(mixed, layer.linear_attn)
        else:
            x = x + product(attention(mixed, layer.self_attn, angles), layer.self_attn.o_proj.weight)
        y, routing = experts(norm(x, layer.post_attention_layernorm).flatten(0, 1), layer.mlp)
        x = x + y.view_as(x)
        routings.append(routing)
    return norm(x, model.model.norm).flatten(0, 1), routings


def two_ahead(model, head, hidden, tokens, rows):
    """The block's states for chosen rows. hidden: [N, H] of `trunk`; tokens: [B, T]; rows: [M] of B * (T - 1), b * (T - 1) + i for
    token i + 2. Returns [M, H] after the block's norm, and its routing."""
    states = hidden.view(*tokens.shape, -1)[:, :-1]
    embedded = F.embedding(tokens[:, 1:], model.model.embed_tokens.weight)
    pair = torch.cat([norm(embedded, head.pre_fc_norm_embedding), norm(states, head.pre_fc_norm_hidden)], -1)
    x = product(pair, head.fc.weight).float()
    layer = head.layers[0]
    mixed = attention(norm(x, layer.input_layernorm), layer.self_attn, angles_of(model, 1, x.shape[1]))
    x = x.flatten(0, 1)[rows] + product(mixed.flatten(0, 1)[rows], layer.self_attn.o_proj.weight)
    y, routing = experts(norm(x, layer.post_attention_layernorm), layer.mlp)
    return norm(x + y, head.norm), routing


def logits(model, states):
    """states: [M, H]. Returns float32 [M, V]."""
    return product(states, model.lm_head.weight).float()


@torch.no_grad()
def main():
    """Compares the logits of this module and of transformers for random tokens; bf16 and routers on the edge make them differ a little."""
    model = Qwen3_5MoeForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    tokens = torch.randint(0, model.config.vocab_size, (4, 4 * CHUNK))
    theirs, ours = model(input_ids=tokens).logits.flatten(0, 1), logits(model, trunk(model, tokens)[0])
    same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    print(f"mean distance {(theirs - ours).abs().mean():.4f} of {theirs.abs().mean():.4f}, same best token {same:.4f}")


if __name__ == "__main__":
    main()
