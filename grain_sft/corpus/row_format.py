"""`RowFormat`: the arrays in each row that `grain-sft pack --materialize` writes."""

import dataclasses
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.storage import Count

Positive = Annotated[int, msgspec.Meta(ge=1)]
IndexDtype = Annotated[str, msgspec.Meta(pattern="^(uint8|uint16|uint32)?$")]
"""Name of the dtype of stored positions or segment ids; "" if rows do not store them."""
LONG_SEGMENT = 1 << 10  # tokens; see `are_long`

_ROW_ALIGNMENT = 8  # bytes, so that the int64 array `ends` of a row is aligned


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Format of materialized rows on disk.

    Rows of short segments store a position and a segment id for each token. Rows of long segments store only where each segment
    ends.

    Attributes:
      sequence_length: Number of tokens in every row.
      positions_dtype: "uint8", "uint16" or "uint32"; "" if rows store the ends of segments.
      segments_dtype: "uint8", "uint16" or "uint32", the dtype of the arrays `segment_ids` and `target_segment_ids`; "" if rows
        have neither array.
      most_segments: Highest number of segments in a row if rows store the ends of segments, else 0.
      made_of: Corpus and layout that the rows come from, with their fingerprints, as text.
    """

    sequence_length: Positive
    positions_dtype: IndexDtype
    segments_dtype: IndexDtype
    most_segments: Count
    made_of: Annotated[str, msgspec.Meta(min_length=1)]

    @classmethod
    def of(cls, sequence_length: int, mean_segments: float, most_segments: int, has_loss: bool, made_of: str) -> Self:
        """Return the format for rows of `mean_segments` segments on average, and at most `most_segments`.

        `has_loss` states whether the packed corpus has loss files.
        """
        segments_dtype = np.min_scalar_type(most_segments).name
        # `ends` has an int64 for each segment; these must not take more than a byte for each token
        if are_long(sequence_length, mean_segments) and 8 * most_segments <= sequence_length:
            return cls(sequence_length, "", segments_dtype if has_loss else "", most_segments, made_of)
        positions_dtype = np.min_scalar_type(sequence_length - 1).name
        return cls(sequence_length, positions_dtype, segments_dtype, 0, made_of)

    def dtype(self, tokens: npt.DTypeLike) -> np.dtype[Any]:
        """Return the structured dtype of one row whose tokens have the dtype `tokens`.

        Fields are `tokens`, `positions`, `segment_ids` and `target_segment_ids` (0 where no loss is taken), each
        [sequence_length].

        Rows of long segments have `ends`, int64 [1 + most_segments], in place of `positions` and `segment_ids`. It holds the
        number of segments, then the column after the last token of each. Without loss files, `target_segment_ids` follow from
        `ends` and are not stored.
        """
        length = self.sequence_length
        fields: dict[str, tuple[npt.DTypeLike, int]] = {"tokens": (tokens, length)}
        if self.most_segments:
            fields["ends"] = (np.int64, 1 + self.most_segments)
        else:
            fields["positions"] = (self.positions_dtype, length)
            fields["segment_ids"] = (self.segments_dtype, length)
        if self.segments_dtype:
            fields["target_segment_ids"] = (self.segments_dtype, length)

        formats, offsets, size = [], [], 0
        for name, (dtype, count) in fields.items():
            field = np.dtype((np.dtype(dtype).newbyteorder("<"), (count,)))
            offset = _aligned(size) if name == "ends" else size
            formats.append(field)
            offsets.append(offset)
            size = offset + field.itemsize
        return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": _aligned(size)})


def _aligned(size: int) -> int:
    return -(-size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def are_long(sequence_length: int, mean_segments: float) -> bool:
    """Return whether segments are so long that copying them one by one is faster than processing whole rows.

    `mean_segments` is the mean number of segments in a row.
    """
    return sequence_length >= LONG_SEGMENT * mean_segments
