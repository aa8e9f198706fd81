"""The vocabulary of a corpus: its size, by prepare.json or the tokenizer beside the corpus, and ids that are too high."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import PREPARE, Corpus, Json
from grain_sft.errors import MissingExtraError
from grain_sft.storage import files
from grain_sft.verify.finding import Report


def load_manifest(corpus: Corpus, where: str) -> Json | None:
    """Return the prepare.json of a corpus; None without one."""
    for folder in _candidate_folders(corpus, where):
        path = files.join(folder, PREPARE)
        if files.exists(path):
            return Json.load(path)
    return None


def vocabulary_size(report: Report, corpus: Corpus, where: str, manifest: Json | None) -> int | None:
    """Return the number of ids; None, with a note, where neither prepare.json nor a tokenizer states it."""
    stated = None if manifest is None else manifest.object("tokenizer").count("vocab_size")
    size = _check_tokenizer(report, corpus, where) if report.full or stated is None else None
    found = size if stated is None else stated
    if found is None:
        sentence = (
            "the size of the vocabulary is unknown: neither prepare.json nor a folder 'tokenizer' is beside the corpus. "
            "Give vocab_size (--vocab-size) to have the ids checked."
        )
        report.note("vocabulary", corpus.shards[0].path, sentence)
    return found


def _candidate_folders(corpus: Corpus, where: str) -> Iterator[str]:
    """Yield the folders that may hold what belongs to a corpus: what was opened, and those around its first file."""
    if where:
        yield where
        yield files.parent(where)
    yield from files.candidate_dirs(corpus.shards[0].path)


def _check_tokenizer(report: Report, corpus: Corpus, where: str) -> int | None:
    """Check the tokenizer beside a corpus against the corpus's hash of it, and return its size where it can be loaded."""
    from grain_sft.prepare import load_tokenizer  # imports tokenizers

    for folder in _candidate_folders(corpus, where):
        path = files.join(folder, "tokenizer")
        if not files.exists(path):
            continue
        with report.errors("vocabulary", path):
            try:
                tokenizer = load_tokenizer(path)
            except MissingExtraError as error:
                report.note("vocabulary", path, f"the tokenizer was not checked: {error}")
                return None
            if corpus.tokenizer_sha256 in (None, tokenizer.sha256):
                return tokenizer.vocab_size
            other = f"than the corpus was made with ({corpus.tokenizer_sha256}). Put that one there."
            report.wrong("vocabulary", path, f"is another tokenizer (sha256 {tokenizer.sha256}) {other}")
        return None
    return None


class VocabularyCheck:
    """Finds ids that are too high, a block at a time: of each shard the first, and how many there are."""

    def __init__(self, corpus: Corpus, size: int | None) -> None:
        self._ends = list(itertools.accumulate(shard.num_tokens for shard in corpus.shards))
        self._corpus, self._size = corpus, size
        self._first: dict[int, tuple[int, int]] = {}
        self._count: dict[int, int] = {}
        self._highest = -1

    def check(self, begin: int, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Check `tokens`, from the corpus's token `begin` on."""
        highest = int(tokens.max(initial=0))
        self._highest = max(self._highest, highest)
        if self._size is None or highest < self._size:
            return
        at = np.flatnonzero(tokens >= self._size)
        shards = np.searchsorted(self._ends, at + begin, side="right")
        for shard, first, count in zip(*np.unique(shards, return_index=True, return_counts=True), strict=True):
            number, index = int(shard), int(at[first])
            in_shard = begin + index - (self._ends[number - 1] if number else 0)
            self._first.setdefault(number, (in_shard, int(tokens[index])))
            self._count[number] = self._count.get(number, 0) + int(count)

    def report(self, report: Report) -> None:
        """Add what was found to a report."""
        report.figures["highest_token"] = self._highest
        for number, (index, token) in self._first.items():
            more = f", as are {self._count[number] - 1:,} more in this file" if self._count[number] > 1 else ""
            sentence = (
                f"is {token}{more}, but the vocabulary has {self._size} ids. The dtype or the tokenizer is another."
            )
            report.wrong("vocabulary", self._corpus.shards[number].path, sentence, f"token {index}")
