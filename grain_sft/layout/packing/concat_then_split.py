"""Concatenate, then split: documents one after the other, cut where a row is full. Only the last row has padding. A baseline
for comparisons."""

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingAlgorithm, PackingOptions


def concat_then_split(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of any `lengths`, in their order."""
    ends, capacity = np.cumsum(lengths), options.sequence_length
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.concatenate([ends - lengths, np.arange(0, total, capacity)])  # where pieces begin
    cuts.sort(kind="stable")  # two sorted halves: one merge
    cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])[: len(cuts)]]
    stops = np.append(cuts[1:], total)
    document = np.searchsorted(ends, cuts, side="right")
    offset = cuts - (ends - lengths)[document]
    rows = np.bincount(cuts // capacity, minlength=-(-total // capacity))
    return PackedRows(document, offset, stops - cuts, np.cumsum(rows))


CONCAT_THEN_SPLIT = PackingAlgorithm(concat_then_split, splits_documents=True, bounds_segments=False)
