"""Checks of the arguments of functions and classes."""

import contextlib
import functools
import operator
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from grain_sft.errors import GrainSftError, LayoutError, WrongTypeError, shortened
from grain_sft.types import Ints

P = ParamSpec("P")
T = TypeVar("T")

MOST_TOKENS = 2**31 - 1
"""Maximum number of tokens in a row: positions are int32."""

MOST_AHEAD = 10_000
"""Limit for each of three numbers: threads, worker processes, and batches that are made ahead."""


def as_sequence_length(value: object, name: str = "sequence_length") -> int:
    """Return `value` as an int. Raise a `LayoutError` unless it is an integer from 1 to `MOST_TOKENS`."""
    length = as_integer(name, value, 1, LayoutError)
    if length > MOST_TOKENS:
        raise LayoutError(f"{name}={length}: positions are int32; expected less than 2**31.")
    return length


def as_integer(name: str, value: object, least: int, error: type[GrainSftError], most: int | None = None) -> int:
    """Return `value` as an int. Raise `error` unless it is an integer from `least` to `most`.

    NumPy's integers are accepted. A bool is refused.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or isinstance(value, bool):
        raise error(f"{name}={value!r}: expected an integer, {least} or more.")
    if most is not None and number > most:
        raise error(f"{name}={number}: expected at most {most}.")
    return number


def as_integers(name: str, values: object, error: type[GrainSftError]) -> Ints:
    """Return `values`, a sequence of integers, as int64 [n]; raise `error` for anything else. Bools are refused."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:
        return values
    items = _items(values)
    with contextlib.suppress(TypeError, OverflowError):
        if items is not None and bool not in map(type, items):
            return np.array(list(map(operator.index, items)), np.int64)
    raise error(f"{name}={shortened(repr(values))}: expected a sequence of integers.")


def as_pair(name: str, value: object, error: type[GrainSftError]) -> tuple[int, int]:
    """Return `value` as two ints of at least 0; raise `error` for anything else."""
    values = _items(value)
    if values is None or len(values) != 2:
        raise error(f"{name}={value!r}: expected two integers.")
    first, second = (as_integer(f"{name}={value!r}: a number", number, 0, error) for number in values)
    return first, second


def check_type(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise a `WrongTypeError` unless `value` has the type or union `kind`. `expected` describes it, such as "a path"."""
    if not isinstance(value, kind):
        raise _wrong_type(name, value, expected)


def _wrong_type(name: str, value: object, expected: str) -> WrongTypeError:
    found = shortened(" ".join(repr(value).split()))  # the repr of an array has newlines
    return WrongTypeError(f"{name} is {found} ({type(value).__name__}); expected {expected}.")


def _items(value: object) -> list[Any] | None:
    """Return the items of an iterable; None for other values, such as an integer or an array of 0 dimensions."""
    try:
        return list(cast("Any", value))
    except TypeError:
        return None


def as_objects(name: str, values: object, kind: type[T]) -> tuple[T, ...]:
    """Return `values`, an iterable of objects of the class `kind`, as a tuple; raise a `WrongTypeError` for anything else."""
    items = _items(values)
    if items is None:
        raise _wrong_type(name, values, f"a list of objects of {kind.__name__}")
    for item in items:
        check_type(f"{name}: an item", item, kind, f"an object of {kind.__name__}")
    return tuple(items)


def check_choice(name: str, value: object, choices: Collection[str], error: type[GrainSftError]) -> None:
    """Raise `error` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name}={value!r}: expected one of {', '.join(choices)}.")


def as_paths(name: str, value: object) -> list[str | os.PathLike[str]]:
    """Return `value`, one path or an ordered iterable of paths, as a list; raise a `WrongTypeError` for anything else."""
    if isinstance(value, str | os.PathLike):
        return [value]
    # iterables that are refused: their items have no order, or are not paths (keys, integers)
    items = None if isinstance(value, Mapping | set | frozenset | bytes | bytearray) else _items(value)
    if items is None:
        raise _wrong_type(name, value, "a path or a list of paths")
    for item in items:
        check_type(f"{name}: an item", item, str | os.PathLike, "a path")
    return items


def keyword_only(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that lets a method accept its keyword-only `names` by position too, with a deprecation warning."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        """Return `method` as a function that also takes `names` by position, after `self`."""

        @functools.wraps(method)
        def call(*values: Any, **named: Any) -> T:
            by_position = dict(zip(names, values[1:], strict=False))  # values[0] is `self`
            # If there are too many values, or a value is given twice, the unchanged arguments make `method` raise a TypeError.
            if 1 < len(values) <= 1 + len(names) and not by_position.keys() & named.keys():
                text = ", ".join(f"{name}={value!r}" for name, value in by_position.items())
                warnings.warn(f"Write {method.__name__}({text}).", DeprecationWarning, stacklevel=2)
                values, named = values[:1], by_position | named
            return method(*values, **named)

        return cast("Callable[P, T]", call)

    return decorate
