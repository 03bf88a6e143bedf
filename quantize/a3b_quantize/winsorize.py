"""Where activations are capped before they are squared: one token that an attention sink or a super expert sees would outweigh a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.roles import layer_of
from a3b_quantize.coverage import FEW
from a3b_quantize.inputs import Caps
from a3b_quantize.sites import Ranges
from a3b_quantize.weight_sites import input_site

FRACTION = 0.999  # of |x|: what is capped are the largest 1 in 1,000


def caps_from(ranges: Ranges, recurrent: frozenset[int]) -> Caps:
    """Caps by weight: the percentile FRACTION of the site that goes into it.

    An expert that saw at least FEW tokens has its own, the others that of their layer. No cap where no site is measured.
    """

    def caps(weight: str, owners: int, columns: int) -> NDArray[np.float32]:
        site, layer = input_site(weight, recurrent), layer_of(weight)
        seen = ranges.get((layer, site)) if site is not None and layer is not None else None
        if seen is None:
            return np.full(owners, np.inf, np.float32)
        found = np.full(owners, seen.percentile(FRACTION), np.float32)
        if len(seen.counts) == owners > 1:
            for owner in seen.owners():
                if seen.counts[owner].sum() >= FEW * columns:
                    found[owner] = seen.part(owner).percentile(FRACTION)
        return found

    return caps
