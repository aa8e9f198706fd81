"""Format of rows that were written out: what a corpus holds for each row beside its tokens.

In a file a row's tokens are followed by what belongs to them, so that a row is one read. What belongs to them are arrays of
small integers or, where segments are long, the offsets at which they end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8  # bytes, of rows in a file
LONG = 1 << 10  # tokens, of segments on average


def are_long(sequence_length: int, mean_segments: float) -> bool:
    """Whether rows of so many segments on average are faster made segment by segment."""
    return sequence_length >= LONG * mean_segments


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Rows on disk.

    Attributes:
      sequence_length: of every row. A shard holds whole rows.
      positions_dtype: "uint8", "uint16" or "uint32"; "" where rows say where their segments end.
      segments_dtype: "uint8", "uint16" or "uint32"; "" where rows say where their segments end, and all tokens take loss.
      most_segments: that a row may have, where rows say where their segments end; else 0.
      made_of: what the rows were made of, in words: corpus, layout and their fingerprints.
    """

    sequence_length: int
    positions_dtype: str
    segments_dtype: str
    most_segments: int
    made_of: str

    @classmethod
    def of(
        cls, sequence_length: int, mean_segments: float, most_segments: int, has_loss: bool, made_of: str
    ) -> RowFormat:
        """In the smallest types that hold a position, and a row's segments; of few long segments, by where they end."""
        segments = np.min_scalar_type(most_segments).name
        if are_long(sequence_length, mean_segments) and 8 * most_segments <= sequence_length:
            return cls(sequence_length, "", segments if has_loss else "", most_segments, made_of)
        return cls(sequence_length, np.min_scalar_type(sequence_length - 1).name, segments, 0, made_of)

    def dtype(self, tokens: npt.DTypeLike) -> np.dtype[Any]:
        """Of a row in a shard. [sequence_length] each: its tokens, positions, segment ids, and the segment ids of its targets,
        0 where no loss is taken. Rows that say where their segments end have that instead of positions and segment ids, int64
        [1 + most_segments]: how many there are, and the place after each one's last token."""
        length = self.sequence_length
        planes: dict[str, tuple[npt.DTypeLike, int]] = {"tokens": (tokens, length)}
        if self.most_segments:
            planes["ends"] = np.int64, 1 + self.most_segments
        else:
            planes |= {"positions": (self.positions_dtype, length), "segment_ids": (self.segments_dtype, length)}
        if self.segments_dtype:
            planes["target_segment_ids"] = self.segments_dtype, length
        formats = [(np.dtype(dtype).newbyteorder("<"), (count,)) for dtype, count in planes.values()]
        offsets, size = [], 0
        for name, dtype in zip(planes, formats, strict=True):
            begin = _aligned(size) if name == "ends" else size
            offsets.append(begin)
            size = begin + np.dtype(dtype).itemsize
        return np.dtype({"names": list(planes), "formats": formats, "offsets": offsets, "itemsize": _aligned(size)})


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
