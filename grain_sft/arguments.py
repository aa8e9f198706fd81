"""Checks of arguments that many parts take."""

from __future__ import annotations

import operator

from grain_sft.errors import GrainSftError


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
