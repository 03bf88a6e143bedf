"""Tables of `a3b quantize`."""

from __future__ import annotations

from collections.abc import Sequence

from a3b_gguf.flows.allocate import Allocation
from a3b_gguf.flows.quantize import Quantized, Share
from a3b_gguf.flows.quantize_report import Report, RoleError
from a3b_gguf.report.console import note, say, say_table
from a3b_gguf.report.convert import named, show_files
from a3b_gguf.units import human_bytes

SHOWN = 5  # tensors that are listed before "and n more"
COLUMNS = ("role", "type", "group", "tensors", "weights", "bytes", "bits")
ERRORS = ("error", "weighted", "coverage", "price of groups")


def show_quantized(done: Quantized) -> None:
    """What each role became, the file's exact size, then what the user should know."""
    errors = {(role.role, role.type, role.group_size): role for role in done.report.roles} if done.report else {}
    rows = [(*_share(share), *_errors(errors.get((share.role, share.type, share.group_size)))) for share in done.shares]
    shown = [index for index, name in enumerate((*COLUMNS, *ERRORS)) if index < 2 or any(row[index] for row in rows)]
    columns = [(*COLUMNS, *ERRORS)[index] for index in shown]
    say_table(f"{done.policy}: {done.description}", columns, [[row[i] for i in shown] for row in rows], numeric=range(2, len(columns)))
    verb = "wrote" if done.written else "would write"
    say(f"{verb} {named(done.files)}: {done.nbytes:,} bytes ({human_bytes(done.nbytes)}), {done.bits_per_weight:.3f} bits a weight")
    show_files(done.files)
    if done.allocation:
        show_allocation(done.allocation)
    if done.bounds:
        say(f"wrote {done.bounds}: activation ranges of this file")
    if done.report:
        show_report(done.report)
    if done.fell_back:
        note(f"{len(done.fell_back)} tensors whose rows do not fit their type got another:")
        _first([f"{each.name}: {each.reason}" for each in done.fell_back])
    for text in done.notes:
        note(f"note: {text}")


def show_allocation(found: Allocation) -> None:
    """What the choice is predicted to lose, and what can be asked for."""
    kind = "predicted mean KL divergence" if found.measured else "predicted loss, for comparing"
    say(
        f"{kind}: {found.loss:.6f}; of recipe {found.base} ({found.base_bytes:,} bytes): {found.base_loss:.6f}. Sensitivity {found.how}\n"
        f"targets from {found.smallest:,} to {found.largest:,} bytes make a difference"
    )
    if found.policy:
        say(f"wrote {found.policy}: the types, for reading, editing and --policy")
    for each in found.protected:
        say(f"protected by measured ranges: {each}: {each.why}")
    if found.free_loss is not None:
        say(f"without that protection the same bytes would be predicted to lose {found.free_loss:.6f}")
    for text in found.notes:
        note(f"note: {text}")


def show_report(report: Report) -> None:
    """The tensors and rows that lost most; the rest is in the file."""
    say(f"wrote {report.path}: the error of every tensor, squared and relative; of the whole file {report.error:.3g}")
    worst = sorted((each for each in report.tensors if each.error), key=lambda each: -each.error)[:SHOWN]
    for each in worst:
        where = "".join(
            f"; row {row.row}{'' if row.expert is None else f' of expert {row.expert}'} {row.error:.3g}" for row in each.worst[:1]
        )
        say(f"  {each.name} ({each.type}): {each.error:.3g}{where}")


def _share(share: Share) -> Sequence[str]:
    group = str(share.group_size) if share.group_size != 32 else ""
    size = f"{share.weights:,}", human_bytes(share.nbytes), f"{share.bits_per_weight:.2f}"
    return share.role, share.type, group, str(share.tensors), *size


def _errors(role: RoleError | None) -> Sequence[str]:
    if role is None:
        return ("",) * len(ERRORS)
    weighted = "" if role.weighted_error is None else f"{role.weighted_error:.3g}"
    coverage = "" if role.coverage is None else f"{role.coverage:.1%}"
    price = "" if role.group_price is None else f"{role.group_price:+.1%}"
    return f"{role.error:.3g}", weighted, coverage, price


def _first(lines: Sequence[str]) -> None:
    for text in lines[:SHOWN]:
        note(f"  {text}")
    if len(lines) > SHOWN:
        note(f"  and {len(lines) - SHOWN} more")
