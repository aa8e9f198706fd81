"""Formats of prepared corpora, by name: how each is found at a path, and opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import episodes, olmo, openchat, primer, rows
from grain_sft.corpus.formats.listed import corpus_of_files, find_loss, is_metadata, split_files
from grain_sft.corpus.formats.olmo import without_validation
from grain_sft.corpus.formats.options import Options
from grain_sft.corpus.formats.tree import Tree


class Format(NamedTuple):
    """A format of corpora on disk.

    Attributes:
      find: what `read` takes, if a path is of this format; else None.
      read: the corpus that is there.
      expected: what a path of this format is.
    """

    find: Callable[[str, Tree], str | None]
    read: Callable[[str, Options, Tree], Corpus]
    expected: str


FORMATS: dict[str, Format] = {
    "olmo": Format(olmo.find, olmo.read, olmo.EXPECTED),
    "episodes": Format(episodes.find, episodes.read, episodes.EXPECTED),
    "primer": Format(primer.find, primer.read, primer.EXPECTED),
    "openchat": Format(openchat.find, openchat.read, openchat.EXPECTED),
    "rows": Format(rows.find, rows.read, rows.EXPECTED),
}

__all__ = [
    "FORMATS",
    "Format",
    "Options",
    "Tree",
    "corpus_of_files",
    "find_loss",
    "is_metadata",
    "split_files",
    "without_validation",
]
