"""ShiftTargets: the transform from the source's dict to a trainer's batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from grain.transforms import Map

from grain_sft.source import Arrays, Element, NpyDataSource, ReadRows
from grain_sft.transforms.element import as_int32, require_keys
from grain_sft.transforms.ngram_filter import NgramFilter

_Int64 = npt.NDArray[np.int64]


class ShiftTargets(Map):
    """Transform from the arrays of a source to the keys of MaxText's trainer, each [L] or [rows, L] and int32.

    `inputs` holds the tokens. `targets[i]` is `tokens[i + 1]`, or 0 at the end of a row. The length stays L, because TPU
    attention kernels want a multiple of 128 or 512. `inputs_position` and `targets_position` both hold the positions of the
    tokens, and `inputs_segmentation` holds their segment ids. `targets_segmentation` is the segment id if the target takes
    loss and is in the same segment, else 0: at padding, masked targets, and the last token of a segment or row. If the
    source has `loss_weights`, `targets_weights` (float32) is the weight of the target, or 0 if the target takes no loss.

    `map` copies neither positions nor segment ids.
    """

    shifts_targets = True
    column_reach = (0, 1)  # the next token, and whether it is in the same segment

    def __init__(self) -> None:
        self._arrays = Arrays()

    def map(self, element: Element) -> Element:
        """Return the trainer's batch for `element`, a row or the rows of a source.

        Raises:
          TransformError: a token id does not fit in int32.
        """
        require_keys(self, element, ("tokens", "loss_mask", "segment_ids", "positions"))
        tokens, segments = as_int32(element["tokens"]), element["segment_ids"]
        targets = self._arrays.empty(tokens.shape, np.int32)
        targets[..., :-1] = tokens[..., 1:]
        targets[..., -1] = 0
        flat, takes_loss = segments.reshape(-1), np.empty(segments.size, np.bool_)
        np.equal(flat[1:], flat[:-1], out=takes_loss[:-1])
        takes_loss[:-1] &= element["loss_mask"].reshape(-1)[1:]
        segmentation = self._arrays.empty(segments.shape, np.int32)
        segmentation[...] = takes_loss.reshape(segments.shape)  # `*=` with bool would cast in small buffers
        segmentation *= segments
        segmentation[..., -1] = 0  # the last token of a row has no target
        return _batch(
            ReadRows(tokens, targets, element["positions"], segments, segmentation, element.get("loss_weights"))
        )

    def read(self, source: NpyDataSource, rows: _Int64, *, filters: Sequence[NgramFilter] = ()) -> Element:
        """Return the batch of `rows`, equal to `map` of `source.read(rows)` after `filters`, in fewer passes over the arrays.

        Raises:
          TransformError: a token id does not fit in int32.
          RowIndexError, CorpusFileError: as in `source.read`.
        """
        read = source.read_rows(rows)
        if read is None:
            element = source.read(rows)
            for each in filters:
                element = each.map(element)
            return self.map(element)
        for each in filters:
            read = each.filter_rows(read)
        return _batch(read)

    def __repr__(self) -> str:
        return "ShiftTargets()"


def reader_of(source: Any, transforms: Sequence[Map]) -> tuple[Callable[[_Int64], Element], Sequence[Map]]:
    """Return a function that reads rows of `source`, and those of `transforms` that are left to apply.

    `ShiftTargets`, alone or after n-gram filters, is part of the reading if `source` has `read_rows`. Subclasses are not.
    """
    kinds: list[type] = [type(each) for each in transforms]
    if hasattr(source, "read_rows") and ShiftTargets in kinds:
        at = kinds.index(ShiftTargets)
        if set(kinds[:at]) <= {NgramFilter}:
            shift: Any = transforms[at]
            return functools.partial(shift.read, source, filters=transforms[:at]), transforms[at + 1 :]
    return source.read, transforms


def _batch(read: ReadRows) -> Element:
    batch = {
        "inputs": read.inputs,
        "targets": read.targets,
        "inputs_position": read.positions,
        "targets_position": read.positions,
        "inputs_segmentation": read.segment_ids,
        "targets_segmentation": read.target_segment_ids,
    }
    if read.loss is not None and read.loss.dtype != np.bool_:
        weights = batch["targets_weights"] = np.zeros(read.inputs.shape, np.float32)
        weights[..., :-1] = read.loss[..., 1:]
        weights[read.target_segment_ids == 0] = 0
    return batch
