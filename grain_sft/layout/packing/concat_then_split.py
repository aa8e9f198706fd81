"""Packing that joins all documents into one sequence and cuts it into rows: a baseline to compare other algorithms with."""

import numpy as np

from grain_sft.layout.packing.algorithm import PackedRows, PackingAlgorithm, PackingOptions
from grain_sft.types import Ints


def concat_then_split(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Return the rows of documents of any `lengths`, in the order of the documents. Only the last row has padding."""
    ends, capacity = np.cumsum(lengths), options.sequence_length
    begins, num_tokens = ends - lengths, int(lengths.sum())
    cuts = np.union1d(begins, np.arange(0, num_tokens, capacity))  # a piece begins where a document or a row begins
    stops = np.append(cuts[1:], num_tokens)
    document = np.searchsorted(ends, cuts, side="right")
    pieces_of_rows = np.bincount(cuts // capacity)
    return PackedRows(document, cuts - begins[document], stops - cuts, np.cumsum(pieces_of_rows))


CONCAT_THEN_SPLIT = PackingAlgorithm(concat_then_split, splits_documents=True, bounds_segments=False)
