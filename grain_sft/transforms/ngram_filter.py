"""`NgramFilter`: a transform with the rule of OLMo-core's `find_periodic_sequences`."""

from __future__ import annotations

import functools
import math
from threading import get_ident
from typing import TYPE_CHECKING

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import TransformError
from grain_sft.source import Element, ReadRows
from grain_sft.storage import activity
from grain_sft.transforms.element import require_keys

if TYPE_CHECKING:
    from jaxtyping import Bool, Integer

_PROBES = 8  # number of columns that the search tests on each side; see `NgramFilter`

Tokens = npt.NDArray[np.integer]
Indices = npt.NDArray[np.intp]


class NgramFilter(grain.transforms.Map):
    """Transform that takes the loss off rows where some n-gram repeats too often. Put it before `ShiftTargets`.

    A row fails if some n-gram of p tokens, `min_period <= p <= max_period`, occurs `max_count` times or more in immediate
    succession. A partial last repeat does not count: "abababa" has three repeats of "ab", and "ababa" has two. As in OLMo-core,
    a `max_count` below 3 acts as 3.

    OLMo-core 3.0.0 takes no loss on rows with a False `instance_mask`. The same rows fail here, for these datasets and layouts:
      `NumpyFSLDataset` and layout windows.
      `NumpyPaddedFSLDataset` and layout padded with `keep="first"`, if `count_padding` is False: OLMo-core filters these rows
        before it pads them.
      `NumpyPackedFSLDataset` and layout packed, if `count_padding` is True: OLMo-core filters these rows after it pads them.
        So a row that ends in `max_count` padding tokens takes no loss.

    Search: call column i equal for p = 2 if `tokens[i] == tokens[i - 2]`. With `max_count` = 32, a row that fails has a run of
    2 * 31 = 62 consecutive equal columns: those of all repeats but the first. So the search first tests only every 62nd column:
    one of these is in the run. If a tested column is equal, the search tests the next 8 columns on each side. If all 8 of one
    side are equal, the search measures the whole run.

    Args:
      max_period: Number of tokens of the longest n-grams that are counted.
      min_period: Number of tokens of the shortest n-grams that are counted.
      max_count: Smallest number of repeats for which a row takes no loss.
      count_padding: Whether padding (segment id 0) counts like any other token.
    """

    filters_repetition = True

    def __init__(self, max_period: int = 13, min_period: int = 1, max_count: int = 32, *, count_padding: bool = False) -> None:
        self.max_period = as_integer("NgramFilter: max_period", max_period, 1, TransformError)
        self.min_period = as_integer("NgramFilter: min_period", min_period, 1, TransformError)
        self.max_count = as_integer("NgramFilter: max_count", max_count, 1, TransformError)
        if min_period > max_period:
            raise TransformError(f"NgramFilter: min_period={min_period}: expected at most max_period={max_period}.")
        check_type("NgramFilter: count_padding", count_padding, bool, "True or False")
        self.count_padding = count_padding
        self.repeats = max(self.max_count, 3)

    def map(self, element: Element) -> Element:
        """Return `element` with a `loss_mask` that is all False in rows that fail. If no row fails, return `element` itself."""
        require_keys(self, element, ("tokens", "loss_mask"))
        failing = self.fails(element["tokens"], element.get("segment_ids"))
        if not failing.any():
            return element
        activity.count("filtered_rows", int(np.count_nonzero(failing)))
        return {**element, "loss_mask": element["loss_mask"] & ~failing[..., np.newaxis]}

    def filter_rows(self, read: ReadRows) -> ReadRows:
        """Return `read`, the shifted rows of a source, with `target_segment_ids` 0 in rows that fail.

        The batch is the same as with `map` before `ShiftTargets`.
        """
        # `pieces.segment` is None only if no row has padding. Rows without `pieces` may have padding.
        padded = read.pieces is None or read.pieces.segment is not None
        failing = self.fails(read.inputs, read.segment_ids if padded else None)
        if not failing.any():
            return read
        activity.count("filtered_rows", int(np.count_nonzero(failing)))
        return read._replace(target_segment_ids=read.target_segment_ids * ~failing[:, np.newaxis])

    def fails(
        self, tokens: Integer[np.ndarray, "*rows length"], segment_ids: Integer[np.ndarray, "*rows length"] | None = None
    ) -> Bool[np.ndarray, "*rows"]:
        """Return whether each row fails: bool [] for tokens [L], bool [rows] for tokens [rows, L].

        `segment_ids` is 0 at padding, and None if no row has padding.
        """
        # Records what this thread does. The pipeline records only the transforms that it calls itself, and `ShiftTargets.read`
        # may call this method.
        activity.doing[get_ident()] = activity.TRANSFORMING, self
        rows = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
        segments = None if segment_ids is None or self.count_padding else segment_ids.reshape(rows.shape)
        later, earlier, period = _samples(rows.shape[1], self.min_period, self.max_period, self.repeats)
        equal = rows.take(later, axis=1) == rows.take(earlier, axis=1)
        row, sample = np.divmod(np.flatnonzero(equal), len(later))  # takes a third of the time of `np.nonzero`
        if segments is not None:
            inside = segments[row, later[sample]] != 0  # checks only the later token; `_has_run` checks both tokens
            row, sample = row[inside], sample[inside]
        failing = np.zeros(len(rows), np.bool_)
        suspects = _suspects(rows, row, later[sample], period[sample], self.repeats) if len(row) else []
        for suspect, p in suspects:
            if not failing[suspect]:
                of_row = None if segments is None else segments[suspect]
                failing[suspect] = _has_run(rows[suspect], of_row, p, p * (self.repeats - 1))
        return failing.reshape(tokens.shape[:-1])

    @property
    def no_loss_reason(self) -> str:
        """End of the warning "NgramFilter(...) took the loss off all 8 rows that were checked: "."""
        return f"each repeats an n-gram {self.repeats} times or more. Give a greater max_count, or remove the filter."

    def __repr__(self) -> str:
        options = ("max_period", "min_period", "max_count", "count_padding")
        return f"NgramFilter({', '.join(f'{name}={getattr(self, name)}' for name in options)})"


@functools.lru_cache(maxsize=16)
def _samples(length: int, min_period: int, max_period: int, repeats: int) -> tuple[Indices, Indices, Indices]:
    """Return the pairs of tokens to compare in rows of `length` tokens: later column i, earlier column i - p and period p.

    For period p, the later columns are `p * (repeats - 1)` apart, which is the length of the shortest run that fails a row. The
    first later column is `p * repeats - 1`, where the earliest such run ends: it begins at column p.
    """
    # a row that fails has at least three repeats, so the period is at most a third of the row's length
    periods = range(min_period, min(max_period, length // 3) + 1)
    columns = [np.arange(p * repeats - 1, length, p * (repeats - 1)) for p in periods]
    later = np.concatenate([*columns, np.zeros(0, np.intp)]).astype(np.intp)
    period = np.repeat(np.array(periods, np.intp), [len(each) for each in columns])
    return later, later - period, period


def _suspects(rows: Tokens, row: Indices, at: Indices, period: Indices, repeats: int) -> list[tuple[int, int]]:
    """Return the (row, period) of the equal pairs that may belong to a run that is long enough to fail its row.

    An equal pair is two equal tokens in a `row`, in columns `at` and `at - period`.
    """
    # A run that fails its row has at least n = p * (repeats - 1) equal pairs, one of them at `at`. So one side of `at` has at
    # least (n - 1) // 2 of the others. Each side gets at most that many probes: the number for the smallest p serves all.
    probes = np.arange(1, min(_PROBES, (int(period.min()) * (repeats - 1) - 1) // 2) + 1)
    # The first round tests only the next column on each side. It saves 40% of the time for tokens that follow Zipf's law.
    for distances in (probes[:1], probes):
        keep, row_of = np.zeros(len(row), np.bool_), row[:, np.newaxis]
        for side in (distances, -distances):
            later = at[:, np.newaxis] + side
            earlier = later - period[:, np.newaxis]
            inside = (earlier >= 0) & (later < rows.shape[1])
            equal = rows[row_of, np.where(inside, later, 0)] == rows[row_of, np.where(inside, earlier, 0)]
            keep |= (inside & equal).all(axis=1)
        row, at, period = row[keep], at[keep], period[keep]
        if not len(row):
            break
    return sorted(set(zip(row.tolist(), period.tolist(), strict=True)))


def _has_run(tokens: Tokens, segments: Tokens | None, period: int, length: int) -> bool:
    """Return whether `length` consecutive tokens each equal the token `period` columns before. Padding equals no token."""
    equal = tokens[period:] == tokens[:-period]
    if segments is not None:
        real = segments != 0
        equal = equal & real[period:] & real[:-period]
    # if a False in `equal` is n + 1 columns after the False before it, there are n equal tokens between them
    distances = np.diff(np.flatnonzero(~equal), prepend=-1, append=len(equal))
    return int(distances.max()) > length
