"""Special text: where an ordinary text spells a special token."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from grain_sft.errors import RecordError


class SpecialText:
    """Finds the spellings of some special tokens; under 0.1 us for a short text without any of their first characters."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = frozenset(spelling for spelling in spellings if spelling)
        self._first = tuple({spelling[0] for spelling in self.spellings})
        longest_first = sorted(self.spellings, key=lambda spelling: (-len(spelling), spelling))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: str) -> tuple[str, int] | None:
        """(spelling, character) of the first special token that `text` spells."""
        for character in self._first:
            if character in text:
                found = self.pattern.search(text)
                return (found.group(), found.start()) if found else None
        return None

    def check(self, text: str, where: str) -> None:
        """Refuse a text that spells a special token.

        Raises:
          RecordError: it does; with the spelling and its place.
        """
        found = self.find(text)
        if found:
            raise RecordError(
                f"{where}: spells the special token {found[0]!r} at character {found[1]}. Remove it, or have it "
                "tokenized as ordinary text with --special-text encode."
            )


@functools.lru_cache(maxsize=16)
def special_text_of(spellings: tuple[str, ...]) -> SpecialText:
    """The finder of these spellings, made once."""
    return SpecialText(spellings)
