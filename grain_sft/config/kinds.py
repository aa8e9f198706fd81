"""Checks of a config's keys and values, one at a time."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from grain_sft.errors import ConfigError

Kind = type | tuple[type, ...] | tuple[str, ...]
"""What a key takes: types, or the words that it may be."""


def check_keys(stated: Mapping[Any, Any], known: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    """Refuse a key that is not among those that are known.

    Raises:
      ConfigError: naming the key and the nearest that there is.
    """
    for key in stated:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.0) if known else []
            hint = f" The nearest that there is: {near[0]!r}." if near else " It takes none."
            raise ConfigError(f"{where}: unknown key {key!r}.{hint}")


def check_kind(value: object, kind: Kind, where: str) -> None:
    """Refuse a value of another kind.

    Raises:
      ConfigError: naming what is expected at `where`.
    """
    if isinstance(kind, tuple) and isinstance(kind[0], str):
        if value not in kind:
            raise ConfigError(f"{where} is {value!r}; expected one of {', '.join(map(str, kind))}.")
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(
            "null" if each is type(None) else each.__name__ for each in names if isinstance(each, type)
        )
        raise ConfigError(f"{where} is {value!r}; expected {expected}.")
