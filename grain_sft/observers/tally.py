"""What iterators handed out, each for itself."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Totals(NamedTuple):
    """Of an iterator, so far; seconds between its batches are the loop's."""

    steps: int = 0
    tokens: int = 0
    waited: float = 0.0
    elsewhere: float = 0.0
    ended: float = 0.0  # when the last batch came; 0: none did


class Tally:
    """What an iterator handed out, as far as it is counted.

    Attributes:
      here: whether `next` makes batches itself.
      totals: replaced as a whole.
      longest: wait, in seconds, since somebody set this to 0.
    """

    def __init__(self, here: bool) -> None:
        self.here, self.totals, self.longest = here, Totals(), 0.0

    def add(self, since: Sequence[float], came: Sequence[float], tokens: Sequence[int]) -> list[float]:
        """Count batches that were asked for and came then, in turn; returns how long each was waited for."""
        steps, so_far, waited, elsewhere, ended = self.totals
        waits = [*map(operator.sub, came, since)]
        ends = (ended or since[0], *came[:-1])
        elsewhere += sum(map(operator.sub, since, ends))
        self.totals = Totals(steps + len(waits), so_far + sum(tokens), waited + sum(waits), elsewhere, came[-1])
        self.longest = max(self.longest, *waits)
        return waits


def by_tally(tallies: list[Tally], columns: list[list[Any]]) -> Iterable[tuple[Tally, list[list[Any]]]]:
    """Of each tally, what `columns` have in its places."""
    if len(set(tallies)) == 1:  # as a rule
        yield tallies[0], columns
        return
    places: dict[Tally, list[int]] = {}
    for place, tally in enumerate(tallies):
        places.setdefault(tally, []).append(place)
    for tally, of_tally in places.items():
        yield tally, [[column[place] for place in of_tally] for column in columns]
