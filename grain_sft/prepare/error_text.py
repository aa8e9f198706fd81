"""Words for records: what was found, and what may have been meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from grain_sft.prepare.strict_json import shown


@functools.lru_cache(maxsize=1024)
def _closest(word: str, choices: tuple[str, ...], least: float) -> str:
    matches = difflib.get_close_matches(word[:100].lower(), choices, 1, least)
    return matches[0] if matches and matches[0] != word else ""


def suggestion(word: object, choices: Collection[str], least: float = 0.7) -> str:
    """ " Did you mean ...?" where one of `choices` is close to `word`, else nothing."""
    closest = _closest(word, tuple(choices), least) if isinstance(word, str) else ""
    return f" Did you mean {closest!r}?" if closest else ""


def found(entry: Mapping[str, Any], key: str) -> str:
    """What `entry` has under a key."""
    return kind(entry[key]) if key in entry else "is missing"


def kind(value: object) -> str:
    """What a value is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {shown(value)}"
    names: dict[type[object], str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}") + (
        f" ({shown(value)})" if isinstance(value, str) else ""
    )


def listed(names: Iterable[str]) -> str:
    """Names, quoted."""
    return ", ".join(repr(name) for name in names)
