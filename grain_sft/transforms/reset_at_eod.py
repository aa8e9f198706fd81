"""`ResetAtEod`: a transform that begins segments or positions anew after each EOD token."""

import grain
import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import TransformError
from grain_sft.source import Element
from grain_sft.transforms.element import require_keys
from grain_sft.types import Bools, Integers


class ResetAtEod(grain.transforms.Map):
    """Transform that divides the segments of a trainer's batch after each EOD (end-of-document) token.

    It does what Megatron's options `reset_attention_mask` and `reset_position_ids` do. Put it after ShiftTargets and
    DropLastPosition. It changes no loss: `MaskEod` does that.

    Args:
      eod_token_id: Token that ends a document.
      attention: Whether a segment ends after each EOD.
      positions: Whether positions begin anew after each EOD.
      min_segment_length: Length of the longest segment that is joined with the next one, as in MaxText. 0 and 1 join no
        segments.

    Attributes:
      divides_segments: Whether segments end at EOD tokens.
      positions_apart: Whether only one of `attention` and `positions` is true.
    """

    def __init__(
        self, eod_token_id: int, *, attention: bool = True, positions: bool = True, min_segment_length: int = 0
    ) -> None:
        self.eod_token_id = as_integer("ResetAtEod: eod_token_id", eod_token_id, 0, TransformError)
        check_type("ResetAtEod: attention", attention, bool, "True or False")
        check_type("ResetAtEod: positions", positions, bool, "True or False")
        self.attention, self.positions = attention, positions
        self.divides_segments, self.positions_apart = attention, attention != positions
        self.min_segment_length = as_integer("ResetAtEod: min_segment_length", min_segment_length, 0, TransformError)

    def map(self, element: Element) -> Element:
        """Return `element` with new segment ids and positions, int32. In padding, they stay 0.

        Raises:
          TransformError: `element` is the source's dict, without shifted targets.
        """
        require_keys(self, element, ("inputs", "inputs_segmentation", "targets_segmentation", "inputs_position"))
        segments = element["inputs_segmentation"]
        begins = self._begins(element["inputs"], segments)
        batch = dict(element)
        if self.attention:
            ids = np.cumsum(begins, axis=-1, dtype=np.int32)  # from 1, because column 0 begins a segment
            batch["inputs_segmentation"] = np.where(segments != 0, ids, np.int32(0))
            batch["targets_segmentation"] = np.where(element["targets_segmentation"] != 0, ids, np.int32(0))
        if self.positions:
            columns = np.arange(begins.shape[-1], dtype=np.int32)
            # each column minus the column at which its segment begins
            positions = columns - np.maximum.accumulate(np.where(begins, columns, np.int32(0)), axis=-1)
            positions[segments == 0] = 0
            batch["inputs_position"] = batch["targets_position"] = positions
        return batch

    def _begins(self, tokens: Integers, segments: Integers) -> Bools:
        """Return whether a segment begins at each token: bool, in the shape of `tokens`."""
        begins: Bools = np.ones(tokens.shape, np.bool_)
        np.equal(tokens[..., :-1], self.eod_token_id, out=begins[..., 1:])
        begins[..., 1:] |= segments[..., 1:] != segments[..., :-1]
        if self.min_segment_length > 1:  # 1 joins no segments, not even segments of one token
            for row in begins.reshape(-1, begins.shape[-1]):
                last_begin = 0
                for begin in np.flatnonzero(row)[1:].tolist():
                    if begin - last_begin > self.min_segment_length:
                        last_begin = begin
                    else:  # joins the short segment from `last_begin` with the one from `begin`
                        row[begin] = False
        return begins

    def __repr__(self) -> str:
        options = ("eod_token_id", "attention", "positions", "min_segment_length")
        return f"ResetAtEod({', '.join(f'{name}={getattr(self, name)}' for name in options)})"
