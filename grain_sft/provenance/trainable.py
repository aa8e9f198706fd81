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
_LONG = 512  # tokens of pieces from which a call for each costs less than a pass over all


class TrainableTokens:
    """Counts the tokens of each piece that take loss as targets: the tokens for which a batch has a target with a
    `targets_segmentation` that is not 0, counted at the piece that the target (not the input before it) belongs to.

    That is all tokens of a segment but its first, which no input of the segment comes before, as far as the corpus's loss
    files let them take loss and no transform before `ShiftTargets` (such as `NgramFilter`) takes it off the row.
    Where there are such transforms the tokens are read; else at most the loss files.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._source = pipeline.source
        before = itertools.takewhile(lambda each: not trait(each, "shifts_targets"), pipeline.transforms)
        self._transforms: list[grain.transforms.Map] = [each for each in before if not trait(each, "trims_columns")]
        corpus = pipeline.source.layout.corpus
        self._loss = LossReader(corpus.loss_files, scattered=True, remote=corpus.remote) if corpus.has_loss else None

    def count(self, rows: Ints, pieces: Pieces) -> Ints:
        """int64 [pieces] of the pieces of `rows` (int64 [rows], no filling rows).

        Raises:
          CorpusFileError, CorpusError: files can't be read.
        """
        first = (pieces.column if pieces.position is None else pieces.position) == 0
        if not self._transforms and self._loss is None:
            whole: Ints = pieces.length - first
            return whole
        found = np.empty(len(pieces.row), np.int64)
        begin = 0
        length = self._source.layout.sequence_length
        per_block = max(1, _TOKENS // length)
        for block in range(0, len(rows), per_block):
            end = int(pieces.row.searchsorted(min(block + per_block, len(rows))))
            some = Pieces(*(None if column is None else column[begin:end] for column in pieces))  # type: ignore[arg-type]
            if self._transforms:
                loss = self._transformed(rows[block : block + per_block])
                places = (some.row - block) * length + some.column
            else:
                places = some.length.cumsum() - some.length
                loss = self._of_files(some, places)
            found[begin:end] = _count(loss, places, some.length) - (loss[places] & first[begin:end])
            begin = end
        return found

    def _of_files(self, pieces: Pieces, places: Ints) -> npt.NDArray[np.bool_]:
        """Which tokens of the pieces, one piece after the other, may take loss."""
        assert self._loss is not None
        count = int(pieces.length.sum())
        loss = self._loss.gather(pieces.shard, pieces.start, places, pieces.length, count)
        return loss if loss.dtype == np.bool_ else loss != 0

    def _transformed(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which tokens of the rows, padding included, may take loss after the transforms: flat."""
        element = self._source.read(rows)
        for transform in self._transforms:
            element = transform.map(element)
        mask: npt.NDArray[np.bool_] = element["loss_mask"].reshape(-1)
        return mask


def _count(loss: npt.NDArray[np.bool_], places: Ints, lengths: Ints) -> Ints:
    """How many of `loss` are True from each place on, so many tokens."""
    if not len(places):
        return np.zeros(0, np.int64)
    if len(loss) >= _LONG * len(places):
        ends = (places + lengths).tolist()
        counted = [np.count_nonzero(loss[begin:end]) for begin, end in zip(places.tolist(), ends, strict=True)]
        return np.array(counted, np.int64)
    totals = np.zeros(len(loss) + 1, np.int32)
    np.cumsum(loss, dtype=np.int32, out=totals[1:])
    found: Ints = totals[places + lengths].astype(np.int64) - totals[places]
    return found
