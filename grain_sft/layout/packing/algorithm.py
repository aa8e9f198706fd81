"""Interface of packing algorithms: their options, results and traits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length, check_choice, check_type
from grain_sft.errors import LayoutError
from grain_sft.registry import entry_errors, is_ours
from grain_sft.types import Bools, Ints

if TYPE_CHECKING:
    from jaxtyping import Int64


Ties = Literal["stable", "numpy", "numpy:avx512", "numpy:avx2", "numpy:baseline"]
LongDocuments = Literal["truncate", "fragment"]
Boundaries = Literal["auto", "eos"]

_CHOICES = {"long_documents": get_args(LongDocuments), "ties": get_args(Ties), "boundaries": get_args(Boundaries)}
# Minimum of each integer option except `sequence_length`.
_LEAST = {"source_group_size": 1, "max_segments": 1, "bos_token_id": 0, "seed": 0, "batch_rows": 1}


class PackedRows(NamedTuple):
    """Packed rows, as arrays of pieces, row after row. A piece is the part of a document that is in one row.

    Attributes:
      document: int64 [pieces], number of the document that each piece belongs to.
      offset: int64 [pieces], number of tokens of the document before the piece.
      length: int64 [pieces], number of tokens in the piece.
      ends: int64 [rows], number of pieces in the row and in all earlier rows: 3 and 5 if row 0 has 3 pieces and row 1 has 2.
    """

    document: Int64[np.ndarray, " pieces"]
    offset: Int64[np.ndarray, " pieces"]
    length: Int64[np.ndarray, " pieces"]
    ends: Int64[np.ndarray, " rows"]

    @classmethod
    def checked(cls, columns: Any, lengths: Ints, options: PackingOptions, batch_rows: int = 1) -> PackedRows:
        """Check `columns`, which an algorithm returned for `lengths`, and return them as int64 `PackedRows`.

        Raises:
          LayoutError: A row is wrong, a token is in two rows, or the number of rows is not a multiple of `batch_rows`.
        """
        found = f"algorithm {options.algorithm}: a result of type {type(columns).__name__}"
        with entry_errors(LayoutError, found, "Expected int64 columns."):
            rows = cls._make(np.asarray(column).astype("i8", casting="safe") for column in columns)
            shapes = [column.shape for column in rows]
            if len(set(shapes[:3])) > 1 or any(len(shape) != 1 for shape in shapes):
                raise ValueError(f"columns of the shapes {shapes}")
        for fault, wrong in rows._faults(lengths, options, batch_rows).items():
            if wrong.any():
                number, kind = int(wrong.argmax()), "row" if fault.startswith("a row") else "piece"
                where = f", such as {kind} {number}" if wrong.ndim else ""
                raise LayoutError(f"algorithm {options.algorithm}: its rows have {fault}{where}. Fix the algorithm.")
        return rows

    def _faults(self, lengths: Ints, options: PackingOptions, batch_rows: int) -> dict[str, Bools]:
        """Return {text of a fault: mask of the pieces or rows that have it, or one bool [] for a fault of the whole result}."""
        document, offset, length, ends = self
        counts, stop = np.diff(ends, prepend=0), offset + length
        order = np.lexsort((offset, document))  # pieces of one document become neighbors
        before, after = order[:-1], order[1:]
        twice = (document[before] == document[after]) & (stop[before] > offset[after])
        totals = np.append(0, length.cumsum()).take(ends, mode="clip")  # "clip", because `ends` may be wrong
        last, most, capacity = ends[-1] if len(ends) else 0, options.max_segments, options.sequence_length
        return {
            f"`ends` up to {last}, but {len(length)} as the number of pieces": np.array(last != len(length)),
            "a document that does not exist": (document < 0) | (document >= len(lengths)),
            "a piece without tokens": length < 1,
            "tokens past the end of a document": (offset < 0) | (stop > lengths.take(document, mode="clip")),
            "a token twice": np.isin(np.arange(len(document)), after[twice]),
            "a row without pieces": counts < 1,
            f"a row of more than {capacity} tokens": np.diff(totals, prepend=0) > capacity,
            f"a row of more documents than max_segments={most}": counts > (len(length) if most is None else most),
            f"a last batch of fewer than {batch_rows} rows": np.array(len(ends) % batch_rows != 0),
        }


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """Everything that a plan depends on, except the corpus.

    Attributes:
      epoch: Number of the epoch to pack, from 0.
      plan: Digest of a plan read from OLMo-core's files; None if the plan is computed.
      longest_first: int64 [documents], numbers of the documents, longest first, if `ties` is numpy's sort on another CPU; else
        None.

    The other attributes are arguments of `PackedLayout`.
    """

    sequence_length: int
    algorithm: str = "best_fit_decreasing"
    long_documents: str = "truncate"
    source_group_size: int = 1
    ties: str = "stable"
    max_segments: int | None = None
    boundaries: str = "auto"
    bos_token_id: int | None = None
    seed: int = 0
    batch_rows: int = 1
    epoch: int = 0
    plan: str | None = None
    longest_first: Ints | None = dataclasses.field(default=None, compare=False, repr=False)

    def checked(self) -> PackingOptions:
        """Return these options with Python ints. Raise a LayoutError for an invalid value."""
        values = self.stated()
        for name, choices in _CHOICES.items():
            check_choice(name, values[name], choices, LayoutError)
        values["sequence_length"] = as_sequence_length(values["sequence_length"])
        for name, least in _LEAST.items():
            default = getattr(PackingOptions, name)
            if values[name] is not None or default is not None:  # None is valid if it is the option's default
                values[name] = as_integer(name, values[name], least, LayoutError)
        return PackingOptions(**values)

    def stated(self) -> dict[str, Any]:
        """Return the options by name, except `longest_first`, which the lengths and `ties` decide."""
        return {name: value for name, value in vars(self).items() if name != "longest_first"}


@dataclasses.dataclass(frozen=True)
class PackingAlgorithm:
    """Packing algorithm with the traits that the rest of the package reads. A bare function gets the default traits.

    Attributes:
      pack: Function (lengths, options) that returns the rows. `lengths` is int64 [documents], the number of tokens of each
        document: 1 to `options.sequence_length`, or any number from 1 on if `splits_documents` is True.
      packs_per_epoch: Whether each epoch is packed anew, by `options.seed` and `options.epoch`. If so, an epoch's rows are
        read in the order in which `pack` returns them.
      whole_batches: Whether the algorithm packs batches of `options.batch_rows` rows.
      splits_documents: Whether documents of any length are cut where a row is full.
      bounds_segments: Whether `options.max_segments` limits the number of documents in a row.
      order: Name of the sampler's order that replays the original system of the algorithm, such as "openchat"; None if no order
        does.
    """

    pack: Callable[[Ints, PackingOptions], PackedRows]
    packs_per_epoch: bool = False
    whole_batches: bool = False
    splits_documents: bool = False
    bounds_segments: bool = True
    order: str | None = None

    @classmethod
    def of(cls, entry: PackingAlgorithm | Callable[[Ints, PackingOptions], PackedRows], name: str) -> PackingAlgorithm:
        """Return the entry `name` of the table: `entry`, or `cls(entry)` if it is not a `PackingAlgorithm`."""
        algorithm = entry if isinstance(entry, cls) else cls(entry)
        check_type(f"algorithm {name}: pack", algorithm.pack, Callable, "a function of lengths and PackingOptions")
        return algorithm

    def __call__(self, lengths: Int64[np.ndarray, " documents"], options: PackingOptions) -> PackedRows:
        """Return the rows of `pack`. If `pack` is a function of another package, check the rows."""
        if is_ours(self.pack):
            return self.pack(lengths, options)
        expected = "Expected a function of lengths and PackingOptions. Fix its code, or name another."
        with entry_errors(LayoutError, f"algorithm {options.algorithm}", expected):
            rows = self.pack(lengths, options)
        return PackedRows.checked(rows, lengths, options, options.batch_rows if self.whole_batches else 1)


def longest_first(lengths: Ints, options: PackingOptions) -> Ints:
    """Return the numbers of the documents, longest first, int64 [documents].

    Documents of equal length stay in their order with `options.ties` "stable". Otherwise, they are in the order of OLMo-core's
    `np.argsort(-1 * lengths)`.
    """
    if options.longest_first is not None:
        return options.longest_first
    return np.argsort(-lengths, kind="stable" if options.ties == "stable" else None)


def equal_lengths(lengths: Ints) -> Iterator[tuple[int, int]]:
    """Yield (length, number of documents) of each run of equal `lengths`: lengths 9, 9, 4 give (9, 2), (4, 1)."""
    lasts = np.flatnonzero(np.diff(lengths, append=0))  # the last document of each run; no length is 0
    return zip(lengths[lasts].tolist(), np.diff(lasts, prepend=-1).tolist(), strict=True)


def rows_of(order: Ints, lengths: Ints, bins: Ints) -> PackedRows:
    """Return packed rows of whole documents.

    Args:
      order: int64 [documents], numbers of the documents, in the order in which the algorithm placed them.
      lengths: int64 [documents], lengths of the documents by their numbers.
      bins: int64 [documents], row of each document in `order`. Every row has a document.
    """
    document = order[np.argsort(bins, kind="stable")]
    return PackedRows(document, np.zeros(len(document), np.int64), lengths[document], np.cumsum(np.bincount(bins)))


def join_rows(parts: Iterable[PackedRows]) -> PackedRows:
    """Return the rows of several packings as one packing."""
    parts = [PackedRows(*[np.zeros(0, np.int64)] * 4), *parts]  # `np.concatenate` needs one array or more
    document, offset, length, ends = map(np.concatenate, zip(*parts, strict=True))
    # `ends` counts the pieces of one part: add the number of pieces in all earlier parts
    pieces = np.array([len(part.document) for part in parts])
    ends += np.repeat(np.cumsum(pieces) - pieces, [len(part.ends) for part in parts])
    return PackedRows(document, offset, length, ends)
