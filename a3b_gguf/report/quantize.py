"""Tables of `a3b quantize`."""

from __future__ import annotations

from a3b_gguf.flows.quantize import Quantized
from a3b_gguf.report.console import note, say, say_table
from a3b_gguf.report.convert import named, show_files
from a3b_gguf.units import human_bytes

SHOWN = 5  # tensors that are listed before "and n more"


def show_quantized(done: Quantized) -> None:
    """What each role became, the file's exact size, then what the user should know."""
    rows = [
        (share.role, share.type, str(share.tensors), f"{share.weights:,}", human_bytes(share.nbytes), f"{share.bits_per_weight:.2f}")
        for share in done.shares
    ]
    say_table(f"{done.policy}: {done.description}", ("role", "type", "tensors", "weights", "bytes", "bits"), rows, numeric=(2, 3, 4, 5))
    verb = "wrote" if done.written else "would write"
    say(f"{verb} {named(done.files)}: {done.nbytes:,} bytes ({human_bytes(done.nbytes)}), {done.bits_per_weight:.3f} bits a weight")
    show_files(done.files)
    if done.bounds:
        say(f"wrote {done.bounds}: activation ranges of this file")
    if done.fell_back:
        note(f"{len(done.fell_back)} tensors whose rows do not fit their type got another:")
        for each in done.fell_back[:SHOWN]:
            note(f"  {each.name}: {each.reason}")
        if len(done.fell_back) > SHOWN:
            note(f"  and {len(done.fell_back) - SHOWN} more")
    for text in done.notes:
        note(f"note: {text}")
