"""Tables of `a3b calibrate`."""

from __future__ import annotations

from a3b_gguf.flows.calibrate import Calibrated
from a3b_gguf.report.console import note, say, say_table
from a3b_quantize.coverage import FEW, LayerCoverage


def show_calibrated(done: Calibrated) -> None:
    """How the experts were covered, what was written, then what the user should know."""
    if done.covered:
        rows = [_row(layer) for layer in done.covered]
        columns = ("layer", "experts", "fewest", "median", f"below {FEW}", "unseen")
        say_table("Tokens that each expert saw", columns, rows, numeric=range(len(columns)))
    resumed = f", {done.resumed} of them by an earlier run" if done.resumed else ""
    say(f"read {done.tokens:,} tokens of {done.data} in {done.chunks} of {done.chunks_given} chunks{resumed}")
    say(f"wrote {done.imatrix}: importance of {done.entries} tensors")
    if done.winsorized:
        say(f"wrote {done.winsorized}: the same with outliers capped")
    say(f"wrote {done.bounds}: activation ranges")
    say(f"wrote {done.histograms}: the histograms behind them")
    if done.stopped_early:
        note("note: stopped before the end of the text: every expert has seen enough (--enough)")
    few = sum(layer.few for layer in done.covered)
    if few:
        note(
            f"note: {few} experts in {sum(layer.few > 0 for layer in done.covered)} layers saw fewer than {FEW} tokens; their importance "
            "leans on that of their layer; more text (--data) would tell more"
        )
    for text in done.notes:
        note(f"note: {text}")


def _row(layer: LayerCoverage) -> tuple[str, ...]:
    numbers = (layer.layer, layer.n_experts, layer.fewest, layer.median, layer.few, layer.unseen)
    return tuple(f"{number:,}" for number in numbers)
