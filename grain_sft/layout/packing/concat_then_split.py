"""Concatenate, then split: documents one after the other, cut wherever a row is full. No padding but in the last row,
and documents in pieces: what packing is compared with."""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.rows import Ints, PackOptions, Rows


def concat_then_split(lengths: Ints, capacity: int, options: PackOptions) -> Rows:
    """Pack documents of any `lengths`, in their order."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.concatenate([ends - lengths, np.arange(0, total, capacity)])  # where pieces begin
    cuts.sort(kind="stable")  # two sorted halves: one merge
    cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])[: len(cuts)]]
    stops = np.append(cuts[1:], total)
    document = np.searchsorted(ends, cuts, side="right")
    offset = cuts - (ends - lengths)[document]
    rows = np.bincount(cuts // capacity, minlength=-(-total // capacity))
    return Rows(document, offset, stops - cuts, np.cumsum(rows))
