"""Markers for the texts of a chat, made of characters that occur nowhere in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.strict_json import strings


def unused_characters(count: int, *values: Any, codes: Iterable[int] = range(0xF0000, 0x10FFFE)) -> str:
    """Return `count` characters that occur in none of the strings of the values.

    Args:
      codes: where to look for them: by default the code points that Unicode leaves to private use.

    Raises:
      RecordError: there are not enough.
    """
    used = {character for _, text in strings(list(values)) for character in set(text)}
    free = (character for code in codes if (character := chr(code)) not in used and code & 0xFFFE != 0xFFFE)
    found = "".join(itertools.islice(free, count))
    if len(found) < count:
        raise RecordError(
            "messages: have too many different characters to find out what a chat template makes of them."
        )
    return found


class Marks:
    """Markers that no text of a chat contains."""

    def __init__(self, *values: Any) -> None:
        self._open, self._close = list(unused_characters(2, *values))
        self.pattern = re.compile(f"{self._open}([0-9]+){self._close}")

    def mark(self, place: int) -> str:
        """The marker of a number."""
        return f"{self._open}{place}{self._close}"
