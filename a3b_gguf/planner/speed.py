"""How fast a plan will be: bytes that a token reads over the bandwidth of where they lie, and a bound by arithmetic for prompts.

The shares below were fitted to published readings (rows N1, N3, N4, N6-N11 and N14-N18 of tests/plan_readings.toml) and are
the same for all machines; a prediction is a range because the same setup is measured 20 % apart by different people.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from a3b_gguf.machine import Device, Machine
from a3b_gguf.memory.cache import kv_row_bytes
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings

GPU_SHARE, CPU_SHARE = 0.55, 0.70  # of the published bandwidth that decoding reaches
LAYER_SECONDS, CROSSING_SECONDS = 55e-6, 140e-6  # starting one layer's kernels; handing one layer's experts to the CPU and back
PINNED_SHARE, MAPPED_SHARE = 0.80, 0.43  # of PCIe's bandwidth from pinned memory and from pages of a file
MATRIX_SHARE = 0.20  # of the published matrix speed that a prompt reaches through many small experts
CORE_FLOPS = 50e9  # multiply-adds of a common core on quantized blocks, a second
# Multiply-adds a second of a core in attention, with flash attention and without it: two cores with AVX-512, heads of 256, after 2,000 to
# 8,000 tokens (benchmarks/bench_attention.py).
ATTENTION_FLASH, ATTENTION_PLAIN = 7e9, 9e9
SPREAD = 0.25
ASSUMED_PCIE, ASSUMED_RAM = 31.5e9, 51.2e9  # PCIe 4.0 with 16 lanes, two channels of DDR4-3200
GPU_A_BYTE, GPU_LEAST, GPU_MOST = 37.0, 250e9, 900e9  # bandwidth of a card for each byte of its memory, as common cards have it
FLOPS_A_BYTE = 100.0  # matrix operations for each byte a second, where only the bandwidth is known
TURN_PROMPT, TURN_ANSWER = 4096, 512  # tokens of the request by which settings are compared
OFFLOAD_STEP, OFFLOAD_MOST = 32, 4096


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens a second, from the least to the most that is expected."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Speed:
    """prefill: reading a long prompt; decode: writing with an empty context, decode_full: with a full one.

    assumed: what was not known of the machine and taken to be common.
    """

    prefill: Span
    decode: Span
    decode_full: Span
    assumed: tuple[str, ...] = ()

    @property
    def turn_seconds(self) -> float:
        """A request with a prompt of TURN_PROMPT tokens and an answer of TURN_ANSWER."""
        return TURN_PROMPT / self.prefill.middle + TURN_ANSWER / self.decode.middle


def predict(facts: Facts, machine: Machine, placement: Placement, settings: Settings) -> Speed:
    """The speed of one request alone. Drafts are not counted: how often they are right depends on the text."""
    empty = decode_seconds(facts, machine, placement, settings, 0)
    full = decode_seconds(facts, machine, placement, settings, settings.n_ctx_seq)
    return Speed(
        span(1 / prefill_seconds(facts, machine, placement, settings)), span(1 / empty), span(1 / full), assumed(machine, placement)
    )


def span(middle: float) -> Span:
    return Span(middle * (1 - SPREAD), middle * (1 + SPREAD))


def assumed(machine: Machine, placement: Placement) -> tuple[str, ...]:
    """What the machine did not tell."""
    used = [gpu for gpu in machine.gpus if gpu.name in placement.layers or gpu.name == placement.output]
    told = "GB/s of memory, as cards of its size have; --gpu NAME tells"
    said = [f"{gpu.name}: {gpu_bandwidth(gpu) / 1e9:.0f} {told}" for gpu in used if gpu.bandwidth is None]
    if machine.ram_bandwidth is None:
        said.append(f"RAM: {ASSUMED_RAM / 1e9:.1f} GB/s, like two channels of DDR4-3200; --ram-bandwidth tells")
    return tuple(said)


def decode_seconds(facts: Facts, machine: Machine, placement: Placement, settings: Settings, n_past: int) -> float:
    """One token after n_past others: every active weight and every cached row is read once; on a CPU arithmetic may take longer."""
    bytes_on = active_bytes(facts, placement)
    seconds = 0.0
    for i, layer in enumerate(facts.layers):
        state = 2 * 4 * facts.ssm_state if layer.recurrent else 0  # read and written
        cached = kv_row_bytes(facts, layer.n_head_kv, settings) * n_past
        bytes_on[placement.layers[i]] += cached + state
        if placement.layers[i] == HOST and cached:
            seconds += max(0.0, attention_seconds(facts, machine, settings, n_past) - cached / read_speed(machine, HOST))
    seconds += sum(n_bytes / read_speed(machine, device) for device, n_bytes in bytes_on.items())
    crossings = {i for i in range(facts.n_layer) if placement.layers[i] != HOST and in_ram(facts, placement, i)}
    return seconds + LAYER_SECONDS * facts.n_layer + CROSSING_SECONDS * len(crossings)


def attention_seconds(facts: Facts, machine: Machine, settings: Settings, n_past: int) -> float:
    """Arithmetic of one layer on the CPU: each head multiplies one row of K and one of V for every cached token."""
    speed = ATTENTION_FLASH if settings.flash_attn else ATTENTION_PLAIN
    return facts.n_head * (facts.k_dim + facts.v_dim) * n_past / (speed * machine.n_cores)


def active_bytes(facts: Facts, placement: Placement) -> dict[str, float]:
    """Weights that one token reads, by device."""
    found: dict[str, float] = defaultdict(float)
    for i, layer in enumerate(facts.layers):
        found[placement.layers[i]] += layer.dense + layer.norms
        for name, n_bytes in layer.expert_tensors:
            found[placement.expert_device(i, name)] += n_bytes * facts.used_share
    found[placement.output] += (facts.output_bytes or facts.embedding_bytes) + facts.other_bytes
    return found


def read_speed(machine: Machine, device: str) -> float:
    """Bytes a second that decoding reads there."""
    gpu = gpu_of(machine, device)
    if gpu is None:
        return CPU_SHARE * ram_bandwidth(machine)
    return GPU_SHARE * (gpu_bandwidth(gpu))


def gpu_of(machine: Machine, device: str) -> Device | None:
    return next((gpu for gpu in machine.gpus if gpu.name == device), None)


def gpu_bandwidth(gpu: Device) -> float:
    return gpu.bandwidth or min(max(GPU_A_BYTE * gpu.total, GPU_LEAST), GPU_MOST)


def ram_bandwidth(machine: Machine) -> float:
    return machine.ram_bandwidth or ASSUMED_RAM


def in_ram(facts: Facts, placement: Placement, layer: int) -> int:
    """Bytes of the layer's experts that are in RAM."""
    return sum(n for name, n in facts.layers[layer].expert_tensors if placement.expert_device(layer, name) == HOST)


def prefill_seconds(facts: Facts, machine: Machine, placement: Placement, settings: Settings) -> float:
    """One token of a long prompt that is read in pieces of n_ubatch: arithmetic, weights read once a piece, experts copied once a piece.

    Layers in RAM are computed on the CPU; experts in RAM of layers on a GPU are copied to it (op offload in ggml-backend.cpp).
    """
    rows = settings.n_rows
    seconds = 0.0
    for i, layer in enumerate(facts.layers):
        used = 2 * (layer.dense_weights + layer.expert_weights * facts.used_share)  # a multiplication and an addition for each
        gpu = gpu_of(machine, placement.layers[i])
        if gpu is None:
            seconds += max(rows * used / cpu_flops(machine), layer.n_bytes / (CPU_SHARE * ram_bandwidth(machine)))
            continue
        bandwidth = gpu_bandwidth(gpu)
        arithmetic = rows * used / (MATRIX_SHARE * (gpu.flops or FLOPS_A_BYTE * bandwidth))
        seconds += max(arithmetic, layer.n_bytes / (GPU_SHARE * bandwidth))
        seconds += in_ram(facts, placement, i) / copy_speed(gpu, settings)
    return (seconds + LAYER_SECONDS * facts.n_layer) / rows


def copy_speed(gpu: Device, settings: Settings) -> float:
    """Bytes a second from RAM to the GPU."""
    return (MAPPED_SHARE if settings.use_mmap else PINNED_SHARE) * (gpu.pcie or ASSUMED_PCIE)


def cpu_flops(machine: Machine) -> float:
    return CORE_FLOPS * machine.n_cores


def offload_rows(facts: Facts, machine: Machine, placement: Placement, settings: Settings) -> int | None:
    """Tokens from which copying a layer's experts to the GPU beats computing them on the CPU; None when none are in RAM.

    Source: op_offload_min_batch_size in ggml/src/ggml-cuda/ggml-cuda.cu; its 32 suits dense layers, while a piece of a few tokens
    touches a few experts only (https://github.com/ikawrakow/ik_llama.cpp/pull/520).
    """
    layers = [i for i in range(facts.n_layer) if placement.layers[i] != HOST and in_ram(facts, placement, i)]
    gpu = gpu_of(machine, placement.layers[layers[0]]) if layers else None
    if gpu is None:
        return None
    layer, held = facts.layers[layers[0]], in_ram(facts, placement, layers[0])
    share = held / layer.experts
    copied = held / copy_speed(gpu, settings)
    for rows in range(OFFLOAD_STEP, OFFLOAD_MOST, OFFLOAD_STEP):
        touched = held * (1 - (1 - facts.used_share) ** rows) / (CPU_SHARE * ram_bandwidth(machine))
        computed = 2 * layer.expert_weights * share * facts.used_share * rows / cpu_flops(machine)
        if max(touched, computed) > copied:
            return rows
    return OFFLOAD_MOST
