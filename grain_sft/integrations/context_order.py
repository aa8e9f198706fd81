"""Order of a row's columns in a global array, for devices that divide the sequence."""

import dataclasses

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError

Columns = tuple[int, int]
"""Range of columns: the first column, and the column after the last."""


@dataclasses.dataclass(frozen=True)
class ContextOrder:
    """Order of a row's columns in the global array.

    In the natural order, devices with the beginning of a row have less causal attention to compute than devices with the end
    of the row. For n shards, the load-balanced order cuts a row into 2n chunks. Shard k gets the chunks k and 2n - 1 - k.
    With 2 shards, the order of the chunks is 0, 3, 1, 2. Source: MaxText's `reorder_causal_load_balanced` (DUAL_CHUNK_SWAP).

    Args:
      shards: Number of shards of the load-balanced order, even; 1 for the natural order.

    Raises:
      PipelineError: The number of shards is neither 1 nor even.
    """

    shards: int = 1

    def __post_init__(self) -> None:
        as_integer("load_balanced_shards", self.shards, 1, PipelineError)
        if self.shards % 2 and self.shards != 1:
            raise PipelineError(f"load_balanced_shards={self.shards}: expected an even number, or 1 for the natural order.")

    def check(self, length: int) -> None:
        """Raise a PipelineError if rows of `length` tokens cannot be cut into equal chunks."""
        if self.shards > 1 and length % (2 * self.shards):
            found = f"rows of {length} tokens can't be cut into {2 * self.shards} equal chunks"
            raise PipelineError(f"load_balanced_shards={self.shards}: {found}. Change one of the two numbers.")

    def sources(self, start: int, stop: int, length: int) -> list[Columns]:
        """Return the ranges of a row's columns that, joined in this order, make the columns [start, stop) of the global array.

        `length` is the number of columns of the row. Example: 2 shards, and a row of 16 tokens. Columns [0, 8) of the array are
        columns [0, 4) and [12, 16) of the row.
        """
        if self.shards == 1:
            return [(start, stop)]
        size = length // (2 * self.shards)
        ranges: list[Columns] = []
        for place in range(start // size, -(-stop // size)):  # number of a chunk in the array
            chunk = place // 2 if place % 2 == 0 else 2 * self.shards - 1 - place // 2  # the chunk's number in the row
            shift = (chunk - place) * size  # from a column of the array to the column of the row
            ranges.append((max(start, place * size) + shift, min(stop, (place + 1) * size) + shift))
        return ranges
