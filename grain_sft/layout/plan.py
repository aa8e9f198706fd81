"""Plan: which pieces of which documents make each packed row, made once per machine and mapped by all its processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft import artefact
from grain_sft.corpus import Corpus
from grain_sft.corpus.documents import Documents, by_eos
from grain_sft.errors import LayoutError
from grain_sft.layout.other_cpu import argsort_of, sort_of
from grain_sft.layout.packing import ALGORITHMS, BY_EPOCH, PackOptions, Rows
from grain_sft.layout.packing.numpy_sort import numpy_sort

VERSION = 2
"""Of the algorithms; a new one makes other plans."""

Ints = npt.NDArray[np.int64]
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

    def depends(self, corpus: Corpus) -> dict[str, Any]:
        """As JSON, with the corpus; of seeds and CPUs only what the algorithm asks for."""
        fields = dataclasses.asdict(self)
        if self.algorithm not in BY_EPOCH:
            fields["seed"] = fields["epoch"] = 0
        return {"plan": VERSION, "corpus": corpus.fingerprint, "recipe": fields, "numpy": self.made_by}

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


COUNTS = ("documents", "dropped_documents", "dropped_tokens", "cut_documents", "cut_tokens")


def load_plan(corpus: Corpus, recipe: Recipe, folder: str | Path | None = None, make: Make | None = None) -> Plan:
    """The plan of a recipe: from the cache, or made (by `make`; None: by `make_plan`) and kept there.

    Raises:
      LayoutError: nothing can be packed.
      CorpusError, CorpusFileError: the documents can't be found.
    """
    make = make or functools.partial(make_plan, corpus, recipe)
    arrays = artefact.load_or_make("plans", recipe.depends(corpus), make, folder)
    arrays = {name: array.view(np.ndarray) for name, array in arrays.items()}  # np.memmap is slow to index
    counts = dict(zip(COUNTS, arrays["counts"].tolist(), strict=True))
    highest = arrays.get("highest_token")  # earlier versions kept none
    known = None if highest is None or not len(highest) else int(highest[0])
    return Plan(arrays["start"], arrays["length"], arrays["document"], arrays["ends"], counts, known)


def make_plan(corpus: Corpus, recipe: Recipe) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a plan, and its counts."""
    documents = packed_documents(corpus, recipe.boundaries, recipe.bos_token_id)
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
    if boundaries == "eos" or bos_token_id is not None:
        return by_eos(corpus, bos_token_id)
    return corpus.documents


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
