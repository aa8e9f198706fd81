"""Trainable tokens of pieces of rows: those that take loss as targets."""

from __future__ import annotations

import itertools

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.corpus import LossReader
from grain_sft.layout import Pieces
from grain_sft.pipeline import Pipeline
from grain_sft.transforms import trait

Ints = npt.NDArray[np.int64]

_TOKENS = 1 << 23  # whose loss is read together
_LONG = 512  # tokens of a piece, from which one call per piece is faster than a pass over all pieces


class TrainableTokens:
    """Counts the tokens of each piece that take loss as targets, that is, whose `targets_segmentation` is not 0.

    These are all tokens of a segment except its first, which has no input before it, as far as the corpus's loss files and
    the transforms before `ShiftTargets` let them take loss. Tokens are read only for such transforms.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._source = pipeline.source
        before = itertools.takewhile(lambda each: not trait(each, "shifts_targets"), pipeline.transforms)
        self._transforms: list[grain.transforms.Map] = [each for each in before if not trait(each, "trims_columns")]
        corpus = pipeline.source.layout.corpus
        self._loss = LossReader(corpus.loss_files, scattered=True, remote=corpus.remote) if corpus.has_loss else None

    def count(self, rows: Ints, pieces: Pieces) -> Ints:
        """Return the number of trainable tokens of each of the `pieces` of `rows`, which have no `FILL_ROW`."""
        first = (pieces.column if pieces.position is None else pieces.position) == 0
        if not self._transforms and self._loss is None:
            whole: Ints = pieces.length - first
            return whole
        found = np.empty(len(pieces.row), np.int64)
        length = self._source.layout.sequence_length
        per_block = max(1, _TOKENS // length)
        begin = 0
        for block in range(0, len(rows), per_block):
            end = int(pieces.row.searchsorted(min(block + per_block, len(rows))))
            some = Pieces(*(None if column is None else column[begin:end] for column in pieces))  # type: ignore[arg-type]
            if self._transforms:
                loss = self._transformed(rows[block : block + per_block])
                offsets = (some.row - block) * length + some.column
            else:
                assert self._loss is not None
                offsets = some.length.cumsum() - some.length
                total = int(some.length.sum())
                loss = self._loss.gather(some.shard, some.start, offsets, some.length, total)
                loss = loss if loss.dtype == np.bool_ else loss != 0
            found[begin:end] = _count(loss, offsets, some.length) - (loss[offsets] & first[begin:end])
            begin = end
        return found

    def _transformed(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which tokens of the rows, padding included, take loss after the transforms: flat."""
        element = self._source.read(rows)
        for transform in self._transforms:
            element = transform.map(element)
        mask: npt.NDArray[np.bool_] = element["loss_mask"].reshape(-1)
        return mask


def _count(loss: npt.NDArray[np.bool_], offsets: Ints, lengths: Ints) -> Ints:
    """Return how many of the `lengths` elements of `loss` from each offset on are True."""
    if not len(offsets):
        return np.zeros(0, np.int64)
    if len(loss) >= _LONG * len(offsets):
        ends = (offsets + lengths).tolist()
        counted = [np.count_nonzero(loss[begin:end]) for begin, end in zip(offsets.tolist(), ends, strict=True)]
        return np.array(counted, np.int64)
    totals = np.zeros(len(loss) + 1, np.int32)
    np.cumsum(loss, dtype=np.int32, out=totals[1:])
    found: Ints = totals[offsets + lengths].astype(np.int64) - totals[offsets]
    return found
