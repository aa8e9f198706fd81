"""Order of the columns over the devices that divide the sequence."""

import dataclasses

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError

Columns = tuple[int, int]
"""First column and the one after the last."""


@dataclasses.dataclass(frozen=True)
class ContextOrder:
    """Order of a row's columns in the global array.

    In the natural order, causal attention gives the devices that hold the beginning of a row less work than those that hold
    its end. The load-balanced order of n shards cuts a row into 2n chunks, and shard k has chunks k and 2n - 1 - k. MaxText's
    `reorder_causal_load_balanced` makes this order on TPUs (DUAL_CHUNK_SWAP).

    Args:
      shards: Number of shards of the load-balanced order, even; 1 for the natural order.

    Raises:
      PipelineError: The number of shards is odd.
    """

    shards: int = 1

    def __post_init__(self) -> None:
        as_integer("load_balanced_shards", self.shards, 1, PipelineError)
        if self.shards % 2 and self.shards != 1:
            raise PipelineError(
                f"load_balanced_shards={self.shards}: expected an even number, or 1 for the natural order."
            )

    def check(self, length: int) -> None:
        """Raise a PipelineError if rows of `length` tokens cannot be cut into equal chunks."""
        if self.shards > 1 and length % (2 * self.shards):
            found = f"rows of {length} tokens can't be cut into {2 * self.shards} equal chunks"
            raise PipelineError(f"load_balanced_shards={self.shards}: {found}. Change it, or sequence_length.")

    def sources(self, start: int, stop: int, length: int) -> list[Columns]:
        """Return the columns of a row of `length` tokens that are at columns [start, stop) of the global array, in order."""
        if self.shards == 1:
            return [(start, stop)]
        size, found = length // (2 * self.shards), list[Columns]()
        for number in range(start // size, -(-stop // size)):
            chunk = number // 2 if number % 2 == 0 else 2 * self.shards - 1 - number // 2
            offset = (chunk - number) * size
            first, last = max(start, number * size) + offset, min(stop, (number + 1) * size) + offset
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], last
            else:
                found.append((first, last))
        return found
