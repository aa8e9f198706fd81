"""NgramFilter: rows that repeat themselves too often take no loss; OLMo-core's verdict.

The rule: allenai/OLMo-core, `find_periodic_sequences` and `InstanceFilterConfig` (src/olmo_core/data/).
"""

from __future__ import annotations

import functools

import grain
import numpy as np
import numpy.typing as npt

from grain_sft import metrics
from grain_sft.arguments import as_integer
from grain_sft.errors import TransformError
from grain_sft.sources import Element
from grain_sft.transforms.element import require_keys

_PROBES = 8  # neighbours looked at before a suspect is examined in full

Tokens = npt.NDArray[np.integer]
Indices = npt.NDArray[np.intp]


class NgramFilter(grain.transforms.Map):
    """Takes the loss off rows in which some n-gram repeats too often. Takes and returns the source's dict.

    A row of L tokens fails if for a period p, `min_period <= p <= min(max_period, L // 3)`, some n-gram of p tokens
    stands `max_count` times or more in immediate succession, a partial last repeat not counted: that is, if `r`
    consecutive pairs `tokens[i] == tokens[i - p]` are equal and `(r + p) // p >= max_count`. OLMo-core can't see fewer
    than 3 repeats, so a smaller `max_count` acts as 3.

    It costs little because a failing row holds a run of at least `p * (max_count - 1)` equal pairs. One pair in so
    many is compared; only where that one is equal, and its neighbours to one side are too, the run is measured.

    Args:
      max_period, min_period: lengths in tokens of the n-grams looked for.
      max_count: so many repeats fail a row.
    """

    def __init__(self, max_period: int = 13, min_period: int = 1, max_count: int = 32) -> None:
        self.max_period = as_integer("NgramFilter: max_period", max_period, 1, TransformError)
        self.min_period = as_integer("NgramFilter: min_period", min_period, 1, TransformError)
        self.max_count = as_integer("NgramFilter: max_count", max_count, 1, TransformError)
        if min_period > max_period:
            raise TransformError(
                f"NgramFilter(min_period={min_period}, max_period={max_period}): expected 1 <= min_period <= max_period."
            )

    def map(self, element: Element) -> Element:
        """`element`, its `loss_mask` all False in rows that fail. Nothing is copied where none does."""
        require_keys(self, element, ("tokens", "loss_mask"))
        tokens = element["tokens"]
        failing = self._failing(tokens.reshape(-1, tokens.shape[-1]))
        if failing is None:
            return element
        metrics.filtered(int(np.count_nonzero(failing)))
        loss_mask = element["loss_mask"] & ~failing.reshape(*tokens.shape[:-1], 1)
        return {**element, "loss_mask": loss_mask}

    def fails(self, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Whether each row fails: bool [] for tokens [L], bool [rows] for tokens [rows, L]."""
        failing = self._failing(tokens.reshape(-1, tokens.shape[-1]))
        return np.zeros(tokens.shape[:-1], np.bool_) if failing is None else failing.reshape(tokens.shape[:-1])

    def _failing(self, rows: Tokens) -> npt.NDArray[np.bool_] | None:
        """Which rows fail: bool [rows]; None where none does."""
        repeats = max(self.max_count, 3)
        later, earlier, period = _samples(rows.shape[1], self.min_period, self.max_period, repeats)
        equal = rows.take(later, axis=1) == rows.take(earlier, axis=1)
        if not equal.any():
            return None
        row, sample = np.nonzero(equal)
        verdict = np.zeros(len(rows), np.bool_)
        self._examine(rows, row, later[sample], period[sample], repeats, verdict)
        return verdict if verdict.any() else None

    @staticmethod
    def _examine(
        rows: Tokens, row: Indices, at: Indices, period: Indices, repeats: int, verdict: npt.NDArray[np.bool_]
    ) -> None:
        """Set `verdict` for rows in which an equal pair (row, at, at - period) belongs to a long enough run."""
        probes = min(_PROBES, (int(period.min()) * (repeats - 1) - 1) // 2)
        for count in (1, probes):  # most suspects fall at their first neighbours
            keep = np.zeros(len(row), np.bool_)
            steps = np.arange(1, count + 1)
            for side in (steps, -steps):  # a run reaches at least half its length to one side of any place in it
                later = at[:, np.newaxis] + side
                earlier = later - period[:, np.newaxis]
                inside = (earlier >= 0) & (later < rows.shape[1])
                pairs = rows[row[:, np.newaxis], np.where(inside, later, 0)]
                keep |= (inside & (pairs == rows[row[:, np.newaxis], np.where(inside, earlier, 0)])).all(axis=1)
            row, at, period = row[keep], at[keep], period[keep]
            if not len(row):
                return
        for suspect, p in sorted(set(zip(row.tolist(), period.tolist(), strict=True))):
            if not verdict[suspect]:
                tokens = rows[suspect]
                verdict[suspect] = _longest_run(tokens[p:] == tokens[:-p]) >= p * (repeats - 1)

    def __repr__(self) -> str:
        return f"NgramFilter(max_period={self.max_period}, min_period={self.min_period}, max_count={self.max_count})"


@functools.lru_cache(maxsize=16)
def _samples(length: int, min_period: int, max_period: int, repeats: int) -> tuple[Indices, Indices, Indices]:
    """Places i, i - p and periods p, so that no run of `p * (repeats - 1)` pairs (i, i - p) passes between them."""
    periods = range(min_period, min(max_period, length // 3) + 1)
    needed = [p * (repeats - 1) for p in periods]
    places = [np.arange(p + need - 1, length, need) for p, need in zip(periods, needed, strict=True)]
    later = np.concatenate([*places, np.zeros(0, np.intp)]).astype(np.intp)
    period = np.repeat(np.array(periods, np.intp), [len(place) for place in places])
    return later, later - period, period


def _longest_run(flags: npt.NDArray[np.bool_]) -> int:
    """Length of the longest run of True."""
    breaks = np.flatnonzero(~flags)
    edges = np.concatenate(([-1], breaks, [len(flags)]))
    return int(np.diff(edges).max()) - 1
