"""Segment ids and positions of the tokens of rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Pieces
from grain_sft.source.arrays import Int32s

Ints = npt.NDArray[np.int64]


def fill_segments(
    pieces: Pieces, firsts: Ints, tokens: npt.NDArray[Any], positions: Int32s, pad: int
) -> tuple[Int32s, Ints]:
    """Pad `tokens`, fill `positions`, and return segment ids and the index of every segment's last token in the flat rows.

    `firsts`, int64 [pieces], are the offsets of the pieces in the flat rows."""
    if not tokens.size:
        return np.zeros(tokens.shape, np.int32), firsts
    row, length, segment, position = pieces.row, pieces.length, pieces.segment, pieces.position
    assert segment is not None and position is not None
    if not len(firsts) or firsts[0]:  # the first row is padding alone: it gets a piece of no tokens
        columns = (row, length, segment, position, firsts)
        row, length, segment, position, firsts = (np.insert(column, 0, 0) for column in columns)
    ends = firsts + length
    runs = np.empty_like(firsts)  # from the first token of a piece to that of the next: padding is part of the run
    np.subtract(firsts[1:], firsts[:-1], out=runs[:-1])
    runs[-1] = tokens.size - firsts[-1]
    segments = segment.astype(np.int32).repeat(runs).reshape(tokens.shape)
    begins = (firsts - position).astype(np.int32).repeat(runs)
    np.subtract(_counting(tokens.size), begins, out=positions.reshape(-1))
    for piece in (runs - length).nonzero()[0].tolist():
        padding = slice(ends[piece], firsts[piece] + runs[piece])
        tokens.reshape(-1)[padding] = pad
        segments.reshape(-1)[padding] = 0
        positions.reshape(-1)[padding] = 0
    if position.any():  # some segment continues in the next piece
        ends = ends[np.append((segment[1:] != segment[:-1]) | (row[1:] != row[:-1]), True)]
    return segments, ends - 1


@functools.lru_cache(maxsize=2)
def _counting(size: int) -> Int32s:
    """Return 0, 1, 2, ... Cached, since a new array of some hundred KB takes longer than the arithmetic on it."""
    return np.arange(size, dtype=np.int32)


@functools.lru_cache(maxsize=8)
def whole_rows(rows: int, length: int, first: int) -> tuple[Int32s, Int32s, Int32s, npt.NDArray[np.bool_]]:
    """Return read-only segment ids, positions, segment ids of targets, and mask of rows that are one full segment each, from
    position `first` on."""
    segments = np.ones((rows, length), np.int32)
    positions = np.tile(np.arange(first, first + length, dtype=np.int32), (rows, 1))
    target_segments = segments.copy()
    target_segments[:, -1] = 0
    made = segments, positions, target_segments, np.ones((rows, length), np.bool_)
    for array in made:
        array.flags.writeable = False
    return made
