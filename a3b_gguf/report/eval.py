"""The table of `a3b eval`."""

from __future__ import annotations

from a3b_gguf.flows.evaluate import Evaluation
from a3b_gguf.report.console import note, say, say_table
from a3b_gguf.units import human_bytes
from a3b_quantize.estimates import Estimate

# field of Divergence, what a person calls it, digits behind the point
ROWS = (
    ("base_perplexity", "perplexity of the base", 4),
    ("perplexity_ratio", "perplexity / base", 5),
    ("kl_mean", "KL divergence, mean", 6),
    ("kl_median", "KL divergence, median", 6),
    ("kl_p99", "KL divergence, 99 %", 6),
    ("kl_p999", "KL divergence, 99.9 %", 6),
    ("kl_max", "KL divergence, maximum", 6),
    ("same_top_percent", "same top-1, %", 3),
    ("p_change_mean", "change of probability, mean, points", 3),
    ("p_change_rms", "change of probability, RMS, points", 3),
)


def show_evaluation(found: Evaluation) -> None:
    """The numbers, each with llama-perplexity's standard error and a 95 % interval."""
    scores, divergence = found.scores, found.scores.divergence
    against = f" against {found.base}" if found.base else ""
    say(
        f"{found.model} ({human_bytes(found.n_bytes)}){against}\n{found.text}, {scores.n_chunk} chunks of {scores.n_ctx:,} tokens, "
        f"{scores.n_scored:,} scored; KV cache {found.kv_type}" + (f", {found.n_expert_used} experts used" if found.n_expert_used else "")
    )
    rows = [_row("perplexity", scores.perplexity, 4)]
    if divergence is not None:
        rows += [_row(title, getattr(divergence, name), digits) for name, title, digits in ROWS]
    say_table("", ("", "value", "± (standard error)", "95 % interval"), rows, numeric=(1, 2, 3))
    say(f"{found.tokens_per_second:,.0f} tokens/s")
    if found.base_file:
        say(f"what the base said is kept in {found.base_file} ({human_bytes(found.base_file.stat().st_size)})")
    for text in found.notes:
        note(f"note: {text}")


def _row(title: str, estimate: Estimate, digits: int) -> tuple[str, ...]:
    stderr = "" if estimate.stderr is None else f"{estimate.stderr:.{digits}f}"
    return title, f"{estimate.value:,.{digits}f}", stderr, f"{estimate.low:,.{digits}f} to {estimate.high:,.{digits}f}"
