"""Muon for the hidden matrices, AdamW for embeddings, output, norms and the small projections."""
from __future__ import annotations

import torch

BY_ADAM = ("embed_tokens", "lm_head", "conv1d", "mlp.gate.", "in_proj_a", "in_proj_b", "shared_expert_gate")


def orthogonal(x, steps=5):
    """Replaces the singular values of each matrix by values near 1 (Newton-Schulz, bf16). x: [M, R, C]. Returns [M, R, C] float32."""
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal. Parameters: [R, C], or [E, R, C] for experts; a packed gate_up [E, 2 * I, C] counts as 2 * E matrices."""

    def __init__(self, parameters, rate, momentum=0.95, decay=0.1):
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "decay": decay})
        self.shapes = {}
        for group in self.param_groups:
            for p in group["params"]:
                self.shapes.setdefault(self.matrix(p), []).append(p)

    @staticmethod
    def matrix(p):
        """(rows, columns) of the matrices in p."""
        rows, columns = p.shape[-2:]
        return (rows // 2, columns) if p.dim() == 3 and rows == 2 * columns else (rows, columns)

    @torch.no_grad()
    def step(self):
        """One update of every parameter."""
        group = self.param_groups[0]
        for (rows, columns), members in self.shapes.items():
            gradient = torch.cat([p.grad.view(-1, rows, columns) for p in members])
            kept = self.state[members[0]].setdefault("momentum", torch.zeros_like(gradient))
            kept.lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(gradient.lerp(kept, group["momentum"]))
            rate = group["lr"] * max(1, rows / columns) ** 0.5
            for p, part in zip(members, update.split([p.numel() // (rows * columns) for p in members]), strict=True):
                p.mul_(1 - group["lr"] * group["decay"]).sub_(part.view_as(p), alpha=rate)


def build(named, muon_rate, adam_rate):
    """Splits (name, parameter) pairs between the two. Returns [Muon, AdamW]."""
    matrices, rest = [], []
    for name, p in named:
        (matrices if p.dim() > 1 and not any(part in name for part in BY_ADAM) else rest).append(p)
    groups = [{"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.05},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    return [Muon(matrices, muon_rate), torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.98), fused=True)]
