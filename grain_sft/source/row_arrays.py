"""Segment ids and positions of the tokens of rows."""

import functools

import numpy as np

from grain_sft.layout import Pieces
from grain_sft.source.arrays import Int32s
from grain_sft.types import Array, Bools, Ints


def fill_segments(pieces: Pieces, firsts: Ints, tokens: Array, positions: Int32s, pad: int) -> tuple[Int32s, Ints]:
    """Pad `tokens` and fill `positions` in place. Return the segment ids and the index of each segment's last token.

    The index of a token counts through the flattened rows: with 8 columns, column 3 of row 1 has index 11.

    Args:
      pieces: Pieces of rows with padding.
      firsts: int64 [pieces], index of the first token of each piece.
      tokens: [rows, L], tokens of the pieces; any values at padding.
      positions: int32 [rows, L], uninitialised.

    Returns:
      Segment ids, int32 [rows, L], and the index of the last token of each segment, int64 [segments]. If the first row is only
      padding, the second array begins with a -1, the end of an empty piece. As an index, -1 is the last column of the last row,
      which has no target in any case.
    """
    if not tokens.size:
        return np.zeros(tokens.shape, np.int32), firsts
    row, length, segment, position = pieces.row, pieces.length, pieces.segment, pieces.position
    assert segment is not None and position is not None
    if not len(firsts) or firsts[0]:
        # the first row is only padding: insert an empty piece, because padding is filled from the end of a piece on
        columns = (row, length, segment, position, firsts)
        row, length, segment, position, firsts = (np.insert(column, 0, 0) for column in columns)
    ends = firsts + length
    run_lengths = np.empty_like(firsts)  # tokens from each piece's start to the next piece's start, padding included
    np.subtract(firsts[1:], firsts[:-1], out=run_lengths[:-1])
    run_lengths[-1] = tokens.size - firsts[-1]
    segments = segment.astype(np.int32).repeat(run_lengths).reshape(tokens.shape)
    # for each token, the flat index of position 0 of its segment
    segment_starts = (firsts - position).astype(np.int32).repeat(run_lengths)
    np.subtract(_arange(tokens.size), segment_starts, out=positions.reshape(-1))
    for piece in (run_lengths - length).nonzero()[0].tolist():
        padding = slice(ends[piece], firsts[piece] + run_lengths[piece])
        tokens.reshape(-1)[padding] = pad
        segments.reshape(-1)[padding] = 0
        positions.reshape(-1)[padding] = 0
    if position.any():  # a segment may have several pieces: keep the end of its last piece
        ends = ends[np.append((segment[1:] != segment[:-1]) | (row[1:] != row[:-1]), True)]
    return segments, ends - 1


@functools.lru_cache(maxsize=2)
def _arange(size: int) -> Int32s:
    """Return 0, 1, 2, ... from a cache: making an array of some hundred KB takes longer than a subtraction with it."""
    numbers = np.arange(size, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


@functools.lru_cache(maxsize=8)
def whole_rows(rows: int, length: int, first: int) -> tuple[Int32s, Int32s, Int32s, Bools]:
    """Return four read-only arrays [rows, length] for rows that have one segment each and no padding.

    The arrays are segment ids, positions from `first` on, segment ids of targets, and a mask of True.
    """
    segments = np.ones((rows, length), np.int32)
    positions = np.tile(np.arange(first, first + length, dtype=np.int32), (rows, 1))
    target_segments = segments.copy()
    target_segments[:, -1] = 0
    arrays = segments, positions, target_segments, np.ones((rows, length), np.bool_)
    for array in arrays:
        array.flags.writeable = False
    return arrays
