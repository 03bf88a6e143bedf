"""What the planner needs of a model: layers and their kinds, dimensions, bytes by role. `memory.read` fills it in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one block. dense: all matrices but routed experts; norms: norms, gates and other small vectors.

    expert_tensors: (name without "blk.N." and ".weight", bytes) of each tensor of routed experts, dense_tensors of each other matrix.
    expert_weights, dense_weights:
    how many weights these bytes hold. repacked: bytes of matrices that the CPU kernels copy into their own order, experts among
    them. n_head_kv: 0 in a recurrent layer.
    """

    recurrent: bool
    n_head_kv: int
    expert_tensors: tuple[tuple[str, int], ...] = ()
    expert_weights: int = 0
    dense: int = 0
    dense_tensors: tuple[tuple[str, int], ...] = ()
    dense_weights: int = 0
    norms: int = 0
    repacked: int = 0

    @property
    def experts(self) -> int:
        return sum(n_bytes for _, n_bytes in self.expert_tensors)

    @property
    def n_bytes(self) -> int:
        return self.experts + self.dense + self.norms


@dataclass(frozen=True, slots=True)
class Projector:
    """A vision encoder, from an mmproj file. n_patches: of the image that llama.cpp reserves memory for."""

    path: Path
    weight_bytes: int
    n_embd: int
    n_ff: int
    n_patches: int


@dataclass(frozen=True, slots=True)
class Facts:
    """A model in numbers. layers: the trunk; nextn: its MTP blocks, whose tensors are loaded only when asked for.

    k_dim, v_dim: elements of one head; conv_state, ssm_state: elements of one sequence's state in one recurrent layer, ssm_inner: of
    one token there, in ssm_heads heads.
    output_bytes is 0 when the output shares the token embedding. projector: the vision encoder that is loaded with it.
    pools: it makes vectors.
    notes: what this file does not let the planner know.
    """

    path: Path
    architecture: str
    name: str
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_head: int
    k_dim: int
    v_dim: int
    n_expert: int
    n_expert_used: int
    n_ff: int
    n_ff_expert: int
    n_ff_shared: int
    conv_channels: int
    conv_state: int
    ssm_state: int
    ssm_inner: int
    ssm_heads: int
    embedding_bytes: int
    output_bytes: int
    other_bytes: int
    layers: tuple[Layer, ...]
    nextn: tuple[Layer, ...] = ()
    projector: Projector | None = None
    pools: bool = False
    notes: tuple[str, ...] = ()

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_layer_all(self) -> int:
        """Layers as llama.cpp counts them for placement: the MTP blocks too, loaded or not."""
        return len(self.layers) + len(self.nextn)

    @property
    def n_attention(self) -> int:
        return sum(1 for layer in self.layers if layer.n_head_kv)

    @property
    def n_recurrent(self) -> int:
        return sum(1 for layer in self.layers if layer.recurrent)

    @property
    def expert_bytes(self) -> int:
        return sum(layer.experts for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """All that is loaded without the MTP blocks."""
        return self.embedding_bytes + self.output_bytes + self.other_bytes + sum(layer.n_bytes for layer in self.layers)

    @property
    def used_share(self) -> float:
        """The share of the routed experts that one token reads."""
        return self.n_expert_used / self.n_expert if self.n_expert else 1.0

    @property
    def state_bytes(self) -> int:
        """The recurrent state of one sequence, which is what a checkpoint copies."""
        return 4 * (self.conv_state + self.ssm_state) * self.n_recurrent

    @property
    def active_bytes(self) -> int:
        """Weights read for one token: of the routed experts only those used, of the embedding nothing worth counting."""
        used = self.used_share
        dense = sum(layer.dense + layer.norms for layer in self.layers)
        return int(dense + self.expert_bytes * used) + (self.output_bytes or self.embedding_bytes) + self.other_bytes
