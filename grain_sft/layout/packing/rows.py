"""What packing algorithms take and give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout.packing.numpy_sort import SORTS

Ints = npt.NDArray[np.int64]
Argsort = Callable[[Ints], Ints]

TIES = ("stable", "numpy", *(f"numpy:{sort}" for sort in SORTS))
"""How documents of equal length may be ordered: see `PackedLayout`."""


class Rows(NamedTuple):
    """Packed rows, as columns.

    Attributes:
      document: int64 [pieces], row after row, in the order in which they stand there.
      offset: int64 [pieces], tokens of the document that come before the piece.
      length: int64 [pieces].
      ends: int64 [rows], pieces up to and with each row.
    """

    document: Ints
    offset: Ints
    length: Ints
    ends: Ints


@dataclasses.dataclass(frozen=True)
class PackOptions:
    """What an algorithm may be told; each reads what it has.

    Attributes:
      ties: one of `TIES`.
      argsort: that of numpy on another CPU, where `ties` asks for one; None: numpy's here.
      max_segments: documents a row; None: any number.
      seed, epoch: of what is shuffled.
      batch_rows: rows of one batch (multipack).
      chunk: documents that are packed together, at most (shuffled_best_fit).
    """

    ties: str = "stable"
    max_segments: int | None = None
    seed: int = 0
    epoch: int = 0
    batch_rows: int = 1
    chunk: int = 1 << 16
    argsort: Argsort | None = None


def longest_first(lengths: Ints, options: PackOptions) -> Ints:
    """Order of documents by length, longest first. With other ties than "stable", equal lengths stand as OLMo-core's
    `np.argsort(-1 * lengths)` puts them, which depends on the CPU's vector units and on numpy's version."""
    if options.argsort is not None:
        return options.argsort(-lengths)
    return np.argsort(-lengths, kind="stable" if options.ties == "stable" else None)


def rows_of(order: Ints, lengths: Ints, bins: Ints, count: int) -> Rows:
    """Rows of whole documents.

    Args:
      order: documents in the order in which they were placed.
      lengths: of all documents.
      bins: the row of each document of `order`.
      count: of rows.
    """
    document = order[np.argsort(bins, kind="stable")]
    ends = np.cumsum(np.bincount(bins, minlength=count))
    return Rows(document, np.zeros(len(document), np.int64), lengths[document], ends)


def runs(lengths: Ints) -> zip[tuple[int, int, int]]:
    """(length, first, end) of each run of equal lengths."""
    borders = np.flatnonzero(np.diff(lengths)) + 1
    firsts = np.concatenate([[0], borders])[: len(lengths)]
    ends = np.append(borders, len(lengths))[: len(firsts)]
    return zip(lengths[firsts].tolist(), firsts.tolist(), ends.tolist(), strict=True)
