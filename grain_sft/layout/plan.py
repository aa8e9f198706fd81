"""Plan: which pieces of which documents make each packed row, made once per machine and mapped by all its processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.corpus.document_finder import DocumentFinder
from grain_sft.corpus.documents import Documents
from grain_sft.errors import LayoutError
from grain_sft.layout.packing import ALGORITHMS, BY_EPOCH, PackOptions, Rows
from grain_sft.layout.packing.numpy_emulation import argsort_of, sort_of
from grain_sft.layout.packing.numpy_sort import numpy_sort
from grain_sft.layout.pieces import Ints
from grain_sft.storage import artifact as artefact

VERSION = 3
"""Of the algorithms and of what plans are found by; a new one makes other plans."""

Make = Callable[[], dict[str, npt.NDArray[Any]]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that a plan depends on, beside the corpus.

    Attributes: as the arguments of `PackedLayout`; the epoch, from 0; and the digest of a plan that is read, not made.
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

    def depends(self, corpus: Corpus, *, documents: DocumentFinder | None = None) -> dict[str, Any]:
        """As JSON, with the hash of all content that decides the documents; of seeds and CPUs only what the algorithm asks
        for."""
        fields = dataclasses.asdict(self)
        if self.algorithm not in BY_EPOCH:
            fields["seed"] = fields["epoch"] = 0
        documents = documents or self.finder(corpus)
        return {"plan": VERSION, "documents": documents.content, "recipe": fields, "numpy": self.made_by}

    def finder(self, corpus: Corpus) -> DocumentFinder:
        """What finds the documents that are packed."""
        return DocumentFinder(corpus, self.boundaries, self.bos_token_id)

    @property
    def made_by(self) -> dict[str, str] | None:
        """The version of numpy, and which of its sorts, that decide how documents of equal length are ordered; None where
        they don't."""
        sort = numpy_sort() if self.ties == "numpy" else sort_of(self.ties)
        return None if sort is None else {"version": np.__version__, "sort": sort}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Packed rows.

    Attributes:
      start: int64 [pieces], first token of each piece, counted through the corpus; row after row.
      length: uint32 [pieces].
      document: int64 [pieces].
      ends: int64 [rows], pieces up to and with each row.
      counts: "documents" there are, "dropped_documents" and "dropped_tokens" that no row holds, "cut_documents" and
        "cut_tokens" of documents that were truncated.
      highest_token: of the corpus, where that is known.
    """

    start: Ints
    length: npt.NDArray[np.uint32]
    document: Ints
    ends: Ints
    counts: dict[str, int]
    highest_token: int | None = None


_DTYPES = {"start": "i8", "length": "u4", "document": "i8", "ends": "i8", "counts": "i8", "highest_token": "i8"}
COUNTS = ("documents", "dropped_documents", "dropped_tokens", "cut_documents", "cut_tokens")


def load_plan(
    corpus: Corpus,
    recipe: Recipe,
    folder: str | Path | None = None,
    make: Make | None = None,
    *,
    documents: DocumentFinder | None = None,
) -> Plan:
    """The plan of a recipe: from the cache, or made (by `make`; None: by `make_plan`) and kept there.

    Args:
      documents: finds those that are packed; None: a new one does.

    Raises:
      LayoutError: nothing can be packed.
      CorpusError, CorpusFileError: the documents can't be found.
    """
    documents = documents or recipe.finder(corpus)
    make = make or functools.partial(make_plan, corpus, recipe, documents=documents)
    depends = recipe.depends(corpus, documents=documents)
    check = functools.partial(check_columns, corpus.num_tokens, recipe.sequence_length)
    arrays = artefact.load_or_make("plans", depends, make, folder, check=check)
    arrays = {name: array.view(np.ndarray) for name, array in arrays.items()}  # np.memmap is slow to index
    counts = dict(zip(COUNTS, arrays["counts"].tolist(), strict=True))
    highest = int(arrays["highest_token"][0]) if len(arrays["highest_token"]) else None
    return Plan(arrays["start"], arrays["length"], arrays["document"], arrays["ends"], counts, highest)


def make_plan(
    corpus: Corpus, recipe: Recipe, *, documents: DocumentFinder | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a plan, and its counts."""
    return _packed(corpus, recipe, (documents or recipe.finder(corpus)).documents)


def check_columns(num_tokens: int, sequence_length: int, arrays: artefact.Arrays) -> None:
    """Check that every row of a plan can be read: its pieces lie in the corpus and fit into the row.

    Raises:
      ValueError: one can't.
    """
    for name, dtype in _DTYPES.items():
        if name not in arrays or arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise ValueError(f"it lacks {name}, or has it in another type than {dtype} [n]")
    start, length, document, ends, counts = (arrays[name] for name in list(_DTYPES)[:5])
    if not len(start) == len(length) == len(document) or len(counts) != len(COUNTS):
        raise ValueError("its columns are of different lengths")
    pieces = np.diff(ends, prepend=0)
    if (ends[-1] if len(ends) else 0) != len(start) or (pieces < 1).any():
        raise ValueError("its rows do not end where its pieces do")
    if not len(start):
        return
    if start.min() < 0 or length.min() < 1 or (start > num_tokens - length.astype(np.int64)).any():
        raise ValueError("a piece lies outside the corpus")
    if np.add.reduceat(length, ends - pieces, dtype=np.int64).max() > sequence_length:
        raise ValueError(f"a row holds more than {sequence_length} tokens")
    if document.min() < 0 or document.max() >= counts[0]:
        raise ValueError("a piece is of a document that is not there")


def _packed(corpus: Corpus, recipe: Recipe, documents: Documents) -> dict[str, npt.NDArray[Any]]:
    document, start, length = _fit(documents, recipe)
    shard_ends = np.cumsum([shard.num_tokens for shard in corpus.shards])
    group = np.searchsorted(shard_ends, start, side="right") // recipe.source_group_size
    borders = np.flatnonzero(np.diff(group)) + 1
    packed: list[Rows] = []
    with argsort_of(recipe.ties) as argsort:
        options = PackOptions(
            recipe.ties, recipe.max_segments, recipe.seed, recipe.epoch, recipe.batch_rows, argsort=argsort
        )
        for begin, end in zip([0, *borders.tolist()], [*borders.tolist(), len(start)], strict=True):
            rows = ALGORITHMS[recipe.algorithm](length[begin:end], recipe.sequence_length, options)
            before = len(packed) and int(packed[-1].ends[-1])
            packed.append(rows._replace(document=rows.document + begin, ends=rows.ends + before))
    chosen = np.concatenate([rows.document for rows in packed])
    offset = np.concatenate([rows.offset for rows in packed])
    pieces = np.concatenate([rows.length for rows in packed])
    ends = np.concatenate([rows.ends for rows in packed])
    return columns(documents, document[chosen], start[chosen] + offset, pieces, ends)


def columns(documents: Documents, document: Ints, start: Ints, length: Ints, ends: Ints) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a plan whose pieces are these, row after row, and what they hold of `documents`."""
    whole = documents.length
    kept = np.bincount(document, weights=length, minlength=len(whole)).astype(np.int64)
    cut = (kept > 0) & (kept < whole)
    dropped = kept == 0
    counts = (len(whole), dropped.sum(), whole[dropped].sum(), cut.sum(), (whole - kept)[cut].sum())
    return {
        "start": start,
        "length": length.astype(np.uint32),
        "document": document,
        "ends": ends,
        "counts": np.array(counts, np.int64),
        "highest_token": np.array([] if documents.highest_token is None else [documents.highest_token], np.int64),
    }


def packed_documents(corpus: Corpus, boundaries: str, bos_token_id: int | None) -> Documents:
    """The documents that are packed: the corpus's own, or by its EOS tokens alone."""
    return DocumentFinder(corpus, boundaries, bos_token_id).documents


def _fit(documents: Documents, recipe: Recipe) -> tuple[Ints, Ints, Ints]:
    """(document, start, length) of what is packed: nothing longer than a row, nothing empty."""
    numbers = np.flatnonzero(documents.length > 0)
    start, length = documents.start[numbers], documents.length[numbers]
    if not len(numbers):
        raise LayoutError("no document to pack: the corpus has none with a token. Is its eos_token_id right?")
    most = recipe.sequence_length
    if recipe.algorithm == "concat_then_split" or not (length > most).any():
        return numbers, start, length
    if recipe.long_documents == "truncate":
        return numbers, start, np.minimum(length, most)
    parts = -(-length // most)
    part = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    numbers, start, length = (np.repeat(column, parts) for column in (numbers, start, length))
    return numbers, start + part * most, np.minimum(length - part * most, most)
