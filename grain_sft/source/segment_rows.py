"""Rows of few long segments: their arrays from where the segments end, row by row, while a row is in the processor's cache.

What a step of the interpreter takes shows here, since the arrays of a batch drive its code and data out of the processor's
cache. So copies between buffers are the interpreter's own (numpy's take as long to begin as some KB take to copy), and a loop
is faster than `map`, which needs more code.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.source.arrays import Stack

ARRAYS = 5
"""Those of a `Stack` that `SegmentRow` is of: inputs, targets, segment ids, positions, segment ids of targets."""

ZERO = np.array(0, np.int32)


class Counting:
    """Numbers that rows are filled with; they are the same for all batches.

    Attributes:
      positions: 0, 1, ..., int32 [L].
      numbers: 1, 2, ..., each an array: numpy takes a while to make one of an integer.
    """

    def __init__(self, length: int) -> None:
        self.positions = np.arange(length, dtype=np.int32).data
        self.numbers: list[npt.NDArray[np.int32]] = []

    def more(self, count: int) -> list[npt.NDArray[np.int32]]:
        """`numbers` up to `count` and further."""
        self.numbers = [np.array(number, np.int32) for number in range(1, 2 * count + 1)]
        return self.numbers


class SegmentRow:
    """Views of one row's part of a batch's arrays.

    Attributes:
      inputs: int32 [L], the tokens.
    """

    def __init__(self, stack: Stack, row: int, counting: Counting) -> None:
        inputs, targets, segments, positions, target_segments = (array[row] for array in stack.arrays)
        self.inputs, self._counting = inputs, counting
        self._shifted = targets[:-1].data, inputs[1:].data, targets.data[-1:]
        self._views = len(inputs), segments, segments.data, positions, positions.data, target_segments.data

    def fill(self, ends: list[int], take_loss: bool) -> None:
        """Fill positions and segment ids; from the last end on there is padding.

        Args:
          ends: the place after each segment's last token, in order.
          take_loss: fill segment ids of targets too; every token takes loss.
        """
        length, segments, segments_data, positions, positions_data, target_segments = self._views
        counting, numbers, begin = self._counting.positions, self._counting.numbers, 0
        if len(numbers) < len(ends):
            numbers = self._counting.more(len(ends))
        for end, number in zip(ends, numbers):  # noqa: B905
            segments[begin:end] = number
            positions_data[begin:end] = counting[: end - begin]
            begin = end
        if begin < length:
            segments[begin:] = positions[begin:] = ZERO
        if take_loss:
            target_segments[:] = segments_data
            for end in ends:
                target_segments[end - 1] = 0

    def shift(self) -> None:
        """Fill targets from the tokens."""
        targets, following, last = self._shifted
        targets[:] = following
        last[0] = 0
