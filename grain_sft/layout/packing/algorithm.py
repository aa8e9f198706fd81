"""What packing algorithms take and give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer, as_sequence_length
from grain_sft.errors import LayoutError

if TYPE_CHECKING:
    from jaxtyping import Int64

Ints = npt.NDArray[np.int64]
Argsort = Callable[[Ints], Ints]

Ties = Literal["stable", "numpy", "numpy:avx512", "numpy:avx2", "numpy:baseline"]
LongDocuments = Literal["truncate", "fragment"]
Boundaries = Literal["auto", "eos"]
TIES: tuple[Ties, ...] = get_args(Ties)
"""How documents of equal length may be ordered: see `PackedLayout`."""

_CHOICES = {"long_documents": get_args(LongDocuments), "ties": TIES, "boundaries": get_args(Boundaries)}
_LEAST = {"source_group_size": 1, "max_segments": 1, "bos_token_id": 0, "seed": 0, "batch_rows": 1}
_OPTIONAL = ("max_segments", "bos_token_id")


class PackedRows(NamedTuple):
    """Packed rows, as columns.

    Attributes:
      document: int64 [pieces], number of the document of each piece, row after row, in their order in the row.
      offset: int64 [pieces], tokens of the document that come before the piece.
      length: int64 [pieces], tokens of the piece.
      ends: int64 [rows], number of pieces up to and with each row.
    """

    document: Int64[np.ndarray, " pieces"]
    offset: Int64[np.ndarray, " pieces"]
    length: Int64[np.ndarray, " pieces"]
    ends: Int64[np.ndarray, " rows"]


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """Everything but the corpus that a plan depends on.

    Attributes:
      epoch: Epoch that is packed, from 0.
      plan: Digest of a plan that is read from files of OLMo-core; None where the plan is made.
      argsort: Argsort of numpy on another CPU, where `ties` asks for one; None for numpy's here.
      All others: as the arguments of `PackedLayout`.
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
    argsort: Argsort | None = dataclasses.field(default=None, compare=False, repr=False)

    def checked(self) -> PackingOptions:
        """Return these options with Python's own integers.

        Raises:
          LayoutError: an option that is not what it should be.
        """
        stated = self.stated()
        for name, choices in _CHOICES.items():
            if stated[name] not in choices:
                raise LayoutError(f"{name}={stated[name]!r}: expected one of {', '.join(choices)}.")
        stated["sequence_length"] = as_sequence_length(stated["sequence_length"])
        for name, least in _LEAST.items():
            if stated[name] is not None or name not in _OPTIONAL:
                stated[name] = as_integer(name, stated[name], least, LayoutError)
        return PackingOptions(**stated)

    def stated(self) -> dict[str, Any]:
        """Return the options that decide the plan, by name."""
        return {name: value for name, value in vars(self).items() if name != "argsort"}

    @property
    def follows_corpus(self) -> bool:
        """Whether the documents that are packed are the corpus's own."""
        return self.boundaries == "auto" and self.bos_token_id is None


@dataclasses.dataclass(frozen=True)
class PackingAlgorithm:
    """A packing algorithm, and what the rest of the package must know of it. A bare function has the default traits.

    Attributes:
      pack: Function of the documents' lengths (int64 [documents], each from 1 to `options.sequence_length` unless
        `splits_documents`) and the options, to `PackedRows`.
      packs_per_epoch: Whether each epoch is packed anew, by seed and epoch. Its rows come in the order in which to read them.
      whole_batches: Whether the rows of a batch, `options.batch_rows` of them, are packed together.
      splits_documents: Whether documents of any length are cut where a row is full.
      bounds_segments: Whether `options.max_segments` bounds the documents of a row.
      order: Order of a sampler that the algorithm's rows have already; None for none.
      slow: Whether packing a million documents takes minutes.
    """

    pack: Callable[[Ints, PackingOptions], PackedRows]
    packs_per_epoch: bool = False
    whole_batches: bool = False
    splits_documents: bool = False
    bounds_segments: bool = True
    order: str | None = None
    slow: bool = False

    @classmethod
    def of(cls, entry: PackingAlgorithm | Callable[[Ints, PackingOptions], PackedRows]) -> PackingAlgorithm:
        """Return `entry`, or the algorithm of a bare function, with the default traits."""
        return entry if isinstance(entry, cls) else cls(entry)

    def __call__(self, lengths: Int64[np.ndarray, " documents"], options: PackingOptions) -> PackedRows:
        return self.pack(lengths, options)


def longest_first(lengths: Ints, options: PackingOptions) -> Ints:
    """Return the order of documents by length, longest first. With other ties than "stable", equal lengths are in the order
    of OLMo-core's `np.argsort(-1 * lengths)`, which depends on the CPU's vector units and on numpy's version."""
    if options.argsort is not None:
        return options.argsort(-lengths)
    return np.argsort(-lengths, kind="stable" if options.ties == "stable" else None)


def rows_of(order: Ints, lengths: Ints, bins: Ints, count: int) -> PackedRows:
    """Return rows of whole documents.

    Args:
      order: int64 [documents], documents in the order in which they were placed.
      lengths: int64, tokens of all documents.
      bins: int64 [documents], the row of each document of `order`.
      count: Number of rows.
    """
    document = order[np.argsort(bins, kind="stable")]
    ends = np.cumsum(np.bincount(bins, minlength=count))
    return PackedRows(document, np.zeros(len(document), np.int64), lengths[document], ends)


def join_rows(parts: Iterable[PackedRows]) -> PackedRows:
    """Return the rows of several packings, one packing after the other."""
    parts = [PackedRows(*[np.zeros(0, np.int64)] * 4), *parts]
    document, offset, length, ends = map(np.concatenate, zip(*parts, strict=True))
    pieces = np.array([len(part.document) for part in parts])
    ends += np.repeat(np.cumsum(pieces) - pieces, [len(part.ends) for part in parts])
    return PackedRows(document, offset, length, ends)
