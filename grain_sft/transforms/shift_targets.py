"""`ShiftTargets`: the transform from the source's dict to a trainer's batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from grain.transforms import Map

from grain_sft.errors import TransformError
from grain_sft.source import Arrays, Element, NpyDataSource, ReadRows
from grain_sft.transforms.element import as_int32, require_keys
from grain_sft.transforms.ngram_filter import NgramFilter
from grain_sft.types import Ints


class ShiftTargets(Map):
    """Transform from the arrays of a source to the arrays that MaxText's trainer expects.

    The values are [L] or [rows, L], and int32 except the weights. The keys:
      inputs: The tokens.
      targets: The token after each input, 0 at the end of a row. The length stays L, because TPU attention kernels need a
        multiple of 128 or 512.
      inputs_position, targets_position: Positions of the tokens, the same array under both keys.
      inputs_segmentation: Segment ids of the tokens.
      targets_segmentation: Segment id of the input if its target is in the same segment and takes loss, else 0.
      targets_weights: float32, weight of the target; 0 if the target takes no loss. The key exists only if the source has
        `loss_weights`.

    `map` does not copy positions and segment ids: the batch has the arrays of the source's dict.
    """

    shifts_targets = True
    column_reach = (0, 1)  # reads the next token and its segment id

    def __init__(self) -> None:
        self._arrays = Arrays()  # reuses the memory of earlier batches

    def map(self, element: Element) -> Element:
        """Return the trainer's batch for `element`, a row or the rows of a source.

        Raises:
          TransformError: A token id does not fit in int32.
        """
        require_keys(self, element, ("tokens", "loss_mask", "segment_ids", "positions"))
        tokens, segments = as_int32(element["tokens"]), element["segment_ids"]
        targets = self._arrays.empty(tokens.shape, np.int32)
        targets[..., :-1] = tokens[..., 1:]
        targets[..., -1] = 0
        # The last token of a row is compared with the first token of the next row. The result is replaced by 0 below.
        flat, takes_loss = segments.reshape(-1), np.empty(segments.size, np.bool_)
        np.equal(flat[1:], flat[:-1], out=takes_loss[:-1])
        np.logical_and(takes_loss[:-1], element["loss_mask"].reshape(-1)[1:], out=takes_loss[:-1])
        segmentation = self._arrays.empty(segments.shape, np.int32)
        # `takes_loss` becomes int32 before the product, because numpy is slower if it multiplies int32 and bool arrays.
        segmentation[...] = takes_loss.reshape(segments.shape)
        segmentation *= segments
        segmentation[..., -1] = 0
        positions, weights = element["positions"], element.get("loss_weights")
        return _batch(ReadRows(tokens, targets, positions, segments, segmentation, weights))

    def read(self, source: NpyDataSource, rows: Ints, *, filters: Sequence[NgramFilter] = ()) -> Element:
        """Return the batch that `source.read`, `filters` and `map` would make of `rows`, in fewer passes over the arrays.

        Raises:
          TransformError: A token id does not fit in int32.
          RowIndexError, CorpusFileError: As in `source.read`.
        """
        read = source.read_rows(rows)
        if read is None:  # the source can't make targets of these rows, such as rows whose tokens may exceed int32
            element = source.read(rows)
            for ngram_filter in filters:
                element = ngram_filter.map(element)
            return self.map(element)
        for ngram_filter in filters:
            read = ngram_filter.filter_rows(read)
        return _batch(read)

    def __repr__(self) -> str:
        return "ShiftTargets()"


def reader_of(source: Any, transforms: Sequence[Map]) -> tuple[Callable[[Ints], Element], Sequence[Map]]:
    """Return a function that reads rows of `source`, and the transforms that are still to be applied to these rows.

    With [NgramFilter, ShiftTargets, TrimToMultiple], the function applies the first two while it reads, and [TrimToMultiple] is
    left. It applies no transform in three cases: `source` lacks `read_rows`, ShiftTargets is missing, or a transform before
    ShiftTargets is not an NgramFilter. A subclass of NgramFilter or ShiftTargets does not count, because it may override `map`.

    Raises:
      TransformError: ShiftTargets is applied to preference pairs.
    """
    if source.layout.of_pairs and any(isinstance(transform, ShiftTargets) for transform in transforms):
        raise TransformError("ShiftTargets would train on the pairs' rejected responses. Use SplitPairs, or a Map of yours.")
    kinds: list[type] = [type(transform) for transform in transforms]
    if hasattr(source, "read_rows") and ShiftTargets in kinds:
        index = kinds.index(ShiftTargets)
        if set(kinds[:index]) <= {NgramFilter}:
            shift: Any = transforms[index]
            return functools.partial(shift.read, source, filters=transforms[:index]), transforms[index + 1 :]
    return source.read, transforms


def _batch(read: ReadRows) -> Element:
    """Return the trainer's batch of rows. It has `targets_weights` only if `read.loss` has weights, which are float32."""
    inputs, targets, positions, segment_ids, target_segment_ids, loss, _ = read
    batch = {
        "inputs": inputs,
        "targets": targets,
        "inputs_position": positions,
        "targets_position": positions,
        "inputs_segmentation": segment_ids,
        "targets_segmentation": target_segment_ids,
    }
    if loss is not None and loss.dtype != np.bool_:
        weights = batch["targets_weights"] = np.zeros(inputs.shape, np.float32)
        weights[..., :-1] = loss[..., 1:]
        weights[target_segment_ids == 0] = 0
    return batch
