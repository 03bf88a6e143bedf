"""The machine as it is: RAM, cores and bandwidth from the operating system and by measuring, GPUs from llama.cpp's own device list.

What cannot be read is left out and said in a note; only a GPU that hides its memory is an error, since a plan would be a guess.
"""

from __future__ import annotations

import platform

from a3b_gguf.machine import Machine
from a3b_gguf.probe.bandwidth import ram_bandwidth
from a3b_gguf.probe.cores import cores
from a3b_gguf.probe.gpus import gpus as gpus_at_hand
from a3b_gguf.probe.ram import ram
from a3b_gguf.probe.traps import traps


def machine(gpus: bool = True, bandwidth: bool = True) -> Machine:
    """The machine at hand. gpus: without it llama.cpp is not loaded and the machine has no GPU.

    bandwidth: whether to measure that of RAM when it was not measured before, which takes a second. Raises MachineLacks when a GPU
    does not say how much memory it has.
    """
    memory, processors = ram(), cores()
    found, remarks = gpus_at_hand() if gpus else ((), ())
    speed, said = ram_bandwidth(processors.count) if bandwidth else (None, ())
    return Machine(
        ram_total=memory.total,
        ram_available=memory.available,
        n_cores=processors.count,
        gpus=found,
        notes=(*memory.notes, *processors.notes, *remarks, *said, *traps(platform.system(), platform.release(), found)),
        ram_bandwidth=speed,
        system=platform.system(),
    )
