"""Groups of equal numbers in an array."""

from collections.abc import Iterator

import numpy as np

from grain_sft.types import Ints


def groups(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each distinct number, ascending, and the indices at which `numbers` has it: int64 [n].

    For [7, 4, 7], this yields (4, [1]) and (7, [0, 2]).
    """
    for number in sorted(set(numbers.tolist())):  # 1.3 us for 32 numbers, where np.unique takes 6.6
        yield number, np.flatnonzero(numbers == number)
