"""Checks of arguments that many parts take."""

from __future__ import annotations

import operator

from grain_sft.errors import GrainSftError, LayoutError

MOST_TOKENS = 2**31 - 1
"""Tokens a row: positions in it are int32."""


def as_sequence_length(value: object) -> int:
    """Return `value` as the number of tokens in a row.

    Raises:
      LayoutError: it is not an integer from 1 to `MOST_TOKENS`.
    """
    length = as_integer("sequence_length", value, 1, LayoutError)
    if length > MOST_TOKENS:
        raise LayoutError(
            f"sequence_length={length}: positions are int32, so expected less than 2**31. Give a smaller one."
        )
    return length


def as_integer(name: str, value: object, least: int, error: type[GrainSftError]) -> int:
    """`value` as a Python int, numpy's integers included.

    Raises:
      `error`: it is no integer, or is below `least`.
    """
    if type(value) is int and value >= least:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise error(f"{name}={value!r}: expected an integer, {least} or more.")
    return number
