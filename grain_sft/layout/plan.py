"""Plan: which pieces of documents are in each packed row. A plan is made once per machine, and all processes map its file."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import DocumentFinder, Documents
from grain_sft.layout.packing import ALGORITHMS, PackingOptions, join_rows
from grain_sft.layout.packing.numpy_sort import argsorts, sort_of
from grain_sft.layout.pieces import check_documents, expand_counts
from grain_sft.registry import code_sha256
from grain_sft.storage import artifact
from grain_sft.types import Array, Ints

VERSION = 3
"""Version of the packing algorithms and of `depends_of`. The key of a cached plan includes it."""

Columns = dict[str, Array]
"""Arrays of a plan, as they are cached, by the names in `_DTYPES`."""

_DTYPES = {"start": "i8", "length": "u4", "document": "i8", "ends": "i8", "counts": "i8", "highest_token": "i8"}
# Names of a plan's counts. A dropped document is in no row. A cut document loses some of its tokens, the `cut_tokens`.
COUNTS = ("documents", "dropped_documents", "dropped_tokens", "cut_documents", "cut_tokens")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Packed rows, as arrays of pieces, row after row. A piece is the part of a document in one row, usually all of it."""

    start: Ints  # int64 [pieces], token offset of each piece in the corpus
    length: npt.NDArray[np.uint32]  # [pieces], tokens of each piece
    document: Ints  # int64 [pieces], number of each piece's document
    ends: Ints  # int64 [rows], number of pieces in the row and in all earlier rows
    counts: dict[str, int]  # by the names in `COUNTS`
    highest_token: int | None  # as `Traits.highest_token`

    def segments(self, rows: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Return (row, column, start, length, segment, document) of every piece in `rows`: the arguments of `pieces_of`."""
        ends, begins = self.ends[rows], self.ends[rows - 1]
        begins[rows == 0] = 0  # for row 0, `rows - 1` is -1, the last row
        counts = ends - begins
        row, within = expand_counts(counts)
        piece = begins[row] + within
        length = self.length[piece].astype(np.int64)
        tokens_before = length.cumsum() - length  # for each piece, tokens of all earlier pieces
        first_of_row = counts.cumsum() - counts
        column = tokens_before - tokens_before[first_of_row][row]
        return row, column, self.start[piece], length, within + 1, self.document[piece]


def load_plan(
    finder: DocumentFinder, options: PackingOptions, folder: str | Path | None, make: Callable[[], Columns] | None
) -> Plan:
    """Return the plan of the finder's documents from the cache, or make and cache the plan.

    `folder` has the cached plans; None means the cache folder. `make` returns the arrays of a plan that is not cached; None
    means `make_plan`.

    Raises:
      LayoutError, CorpusError, CorpusFileError: Nothing can be packed, or the documents cannot be found.
    """
    make = make or functools.partial(make_plan, finder, options)
    check = functools.partial(check_columns, finder.corpus.num_tokens, options.sequence_length)
    arrays = artifact.load_or_make("plans", depends_of(finder, options), make, folder, check=check)
    arrays = {name: array.view(np.ndarray) for name, array in arrays.items()}  # np.memmap is slow to index
    counts = dict(zip(COUNTS, arrays["counts"].tolist(), strict=True))
    highest = int(arrays["highest_token"][0]) if len(arrays["highest_token"]) else None
    return Plan(arrays["start"], arrays["length"], arrays["document"], arrays["ends"], counts, highest)


def depends_of(finder: DocumentFinder, options: PackingOptions) -> dict[str, Any]:
    """Return everything that decides a plan, ready for JSON."""
    recipe, algorithm = options.stated(), ALGORITHMS[options.algorithm]
    if code := code_sha256(algorithm.pack, algorithm):  # only for an algorithm from another package
        recipe["code"] = code
    if not algorithm.packs_per_epoch:  # the plan is the same for every seed and epoch
        recipe["seed"] = recipe["epoch"] = 0
    return {"plan": VERSION, "documents": finder.content, "recipe": recipe, "numpy": numpy_for_ties(options)}


def numpy_for_ties(options: PackingOptions) -> dict[str, str] | None:
    """Return NumPy's version and the sort, which decide the order of equal lengths; None if `options.ties` is "stable"."""
    sort = sort_of(options.ties)
    return None if sort is None else {"version": np.__version__, "sort": sort}


def make_plan(finder: DocumentFinder, options: PackingOptions) -> Columns:
    """Return the arrays of a plan of the finder's documents. Groups of `source_group_size` shards are packed separately."""
    documents = check_documents(finder.documents)
    document, start, length = pieces_to_pack(documents, options)
    group_size = min(options.source_group_size, 2**62)  # the option may exceed int64
    group = (finder.corpus.shard_borders.searchsorted(start, side="right") - 1) // group_size  # group of each piece
    groups = np.split(length, np.flatnonzero(np.diff(group)) + 1)
    sorted_groups = argsorts(options.ties, [-lengths for lengths in groups])  # None if the algorithm itself has to sort
    packed, algorithm, begin = [], ALGORITHMS[options.algorithm], 0
    for lengths, longest_first in zip(groups, sorted_groups, strict=True):
        rows = algorithm(lengths, dataclasses.replace(options, longest_first=longest_first))
        packed.append(rows._replace(document=rows.document + begin))  # the algorithm numbers each group's pieces from 0
        begin += len(lengths)
    index, offset, piece_length, ends = join_rows(packed)  # `index` is an index into `document` and `start`
    return plan_columns(documents, document[index], start[index] + offset, piece_length, ends)


def check_columns(num_tokens: int, sequence_length: int, arrays: artifact.Arrays) -> None:
    """Raise a ValueError if rows of a plan can't be read, such as a row of more tokens than `sequence_length`.

    `num_tokens` is the number of tokens of the corpus. The messages say "it" for the file of the plan.
    """
    for name, dtype in _DTYPES.items():
        if name not in arrays or arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise ValueError(f"its {name} is missing or not a {dtype} array [n]")
    start, length, document, ends, counts, _ = (arrays[name] for name in _DTYPES)
    if not len(start) == len(length) == len(document):
        raise ValueError("its columns are of different lengths")
    if len(counts) != len(COUNTS):
        raise ValueError(f"it has {len(counts)} counts; expected {len(COUNTS)}")
    pieces = np.diff(ends, prepend=0)
    if (pieces < 1).any():
        row = int((pieces < 1).argmax())
        raise ValueError(f"row {row} begins at piece {ends[row] - pieces[row]} and ends at piece {ends[row]}")
    if pieces.sum() != len(start):
        raise ValueError(f"the last row ends at piece {pieces.sum()} of {len(start)}")
    if not len(start):  # A plan without rows, which `PackedLayout` refuses. The checks below need one piece or more.
        return
    outside = (start < 0) | (length < 1) | (start > num_tokens - length.astype(np.int64))
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(f"piece {at}, {length[at]} tokens from {start[at]} on, is outside the corpus")
    tokens = np.add.reduceat(length, ends - pieces, dtype=np.int64)
    if tokens.max() > sequence_length:
        raise ValueError(f"row {tokens.argmax()} holds {tokens.max()} tokens, more than {sequence_length}")
    if document.min() < 0 or document.max() >= counts[0]:
        raise ValueError(f"its documents are {document.min()} to {document.max()}, but the corpus has {counts[0]}")


def plan_columns(documents: Documents, document: Ints, start: Ints, length: Ints, ends: Ints) -> Columns:
    """Return the arrays of a plan. `document`, `start`, `length` and `ends` are columns as in `Plan`, all int64."""
    whole = documents.length
    kept = np.bincount(document, weights=length, minlength=len(whole)).astype(np.int64)
    cut, dropped = (kept > 0) & (kept < whole), kept == 0
    counts = (len(whole), dropped.sum(), whole[dropped].sum(), cut.sum(), (whole - kept)[cut].sum())
    highest = [] if documents.highest_token is None else [documents.highest_token]
    columns = start, length.astype(np.uint32), document, ends, np.array(counts, np.int64), np.array(highest, np.int64)
    return dict(zip(_DTYPES, columns, strict=True))


def pieces_to_pack(documents: Documents, options: PackingOptions) -> tuple[Ints, Ints, Ints]:
    """Return (document, start, length) of the pieces to pack. They fit into a row, unless the algorithm splits documents."""
    numbers = np.flatnonzero(documents.length > 0)
    start, length = documents.start[numbers], documents.length[numbers]
    most = options.sequence_length
    if ALGORITHMS[options.algorithm].splits_documents or not (length > most).any():
        return numbers, start, length
    if options.long_documents == "truncate":
        return numbers, start, np.minimum(length, most)
    index, part = expand_counts(-(-length // most))  # part: the piece's number in its document
    return numbers[index], start[index] + part * most, np.minimum(length[index] - part * most, most)
