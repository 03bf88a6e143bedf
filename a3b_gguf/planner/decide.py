"""`plan`: applies every rule and writes down the load parameters that follow."""

from __future__ import annotations

from a3b_gguf.clip_bounds import KVAdvice
from a3b_gguf.errors import UsageError
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.draft import Draft, blank
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.refuse import NoRoom, refusal
from a3b_gguf.planner.rules import RULES


def plan(facts: Facts, machine: Machine, wishes: Wishes, advice: KVAdvice | None = None) -> Plan:
    """How to load the model on the machine. advice: cache types that the model's measured activations allow.

    Raises AnswerIsNo when it does not fit, with what would help, and UsageError for a wish that cannot be.
    """
    try:
        return without_help(facts, machine, wishes, advice)
    except NoRoom as error:
        raise refusal(error.draft, fits) from None


def fits(draft: Draft) -> bool:
    """Whether the facts, machine and wishes of `draft` give a plan, made from the beginning."""
    try:
        without_help(draft.facts, draft.machine, draft.wishes, draft.advice)
    except (NoRoom, UsageError):
        return False
    return True


def without_help(facts: Facts, machine: Machine, wishes: Wishes, advice: KVAdvice | None = None) -> Plan:
    """The same as `plan`, but NoRoom does not say what would help, which takes time to find out."""
    draft = blank(facts, machine, wishes, advice)
    for rule in RULES:
        draft = rule(draft)
    return Plan(
        facts=facts,
        machine=machine,
        wishes=wishes,
        placement=draft.placement,
        terms=draft.terms,
        reasons=draft.reasons,
        warnings=(*facts.notes, *machine.notes, *draft.warnings),
        load=load_params(draft),
        speed=draft.speed,
        environment=draft.environment,
    )


def load_params(draft: Draft) -> LoadParams:
    """What `a3b_gguf.llama.load` obeys. n_gpu_layers 0 means that no GPU is to be used at all."""
    settings, placement = draft.settings, draft.placement
    return LoadParams(
        n_ctx=settings.n_ctx,
        n_seq_max=settings.n_seq_max,
        n_batch=settings.n_ubatch,
        n_ubatch=settings.n_ubatch,
        n_outputs_max=settings.n_outputs_max,
        n_gpu_layers=placement.n_gpu_layers,
        cpu_expert_layers=placement.cpu_experts,
        kv_type_k=settings.kv_type_k,
        kv_type_v=settings.kv_type_v,
        kv_unified=settings.kv_unified,
        flash_attn=settings.flash_attn,
        reproducible=draft.wishes.kv_split,
        use_mmap=settings.use_mmap,
        n_threads=draft.n_threads,
        n_threads_batch=draft.n_threads,
        load_mtp=settings.load_mtp,
        n_draft=settings.n_draft,
        checkpoint_bytes=settings.checkpoint_bytes,
        text_bytes=settings.text_bytes,
        tensor_overrides=tuple((override(layer, name), "CPU") for layer, name in placement.cpu_tensors),
        tensor_split=tuple(map(float, placement.tensor_split)),
    )


def override(layer: int, tensor: str) -> str:
    """What llama.cpp matches against the names of tensors. Source: tensor_buft_overrides in src/llama-model-loader.cpp (regex_search)."""
    return rf"^blk\.{layer}\.{tensor}\.weight$"
