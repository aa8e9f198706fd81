"""The vocabulary of a corpus: its size, by prepare.json or the tokenizer beside the corpus, and ids that are too high."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import PREPARE, Corpus, Json
from grain_sft.errors import MissingExtraError
from grain_sft.provenance import tokenizer_of
from grain_sft.storage import files
from grain_sft.verify.finding import Report


def load_manifest(corpus: Corpus, where: str) -> Json | None:
    """Return the prepare.json of a corpus; None without one."""
    path = _beside(corpus, where, PREPARE)
    return None if path is None else Json.load(path)


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


def _beside(corpus: Corpus, where: str, name: str) -> str | None:
    """Return the file or folder `name` of a corpus: in what was opened, beside it, or around the corpus's first file."""
    opened = [files.join(folder, name) for folder in (where, files.parent(where))] if where else []
    return next(filter(files.exists, opened), None) or files.sidecar(corpus.shards[0].path, name)


def _check_tokenizer(report: Report, corpus: Corpus, where: str) -> int | None:
    """Check the tokenizer beside a corpus against the corpus's hash of it, and return its size where it can be loaded."""
    path = _beside(corpus, where, "tokenizer")
    if path is None:
        return None
    with report.errors("vocabulary", path):
        try:
            return tokenizer_of(corpus, path).vocab_size
        except MissingExtraError as error:
            report.note("vocabulary", path, f"the tokenizer was not checked: {error}")
    return None


class VocabularyCheck:
    """Finds ids that are too high, a block at a time: of each shard the first, and how many there are."""

    def __init__(self, corpus: Corpus, size: int | None) -> None:
        self._begins = np.cumsum([0, *(shard.num_tokens for shard in corpus.shards)])
        self._corpus, self._size = corpus, size
        self._found: dict[int, tuple[int, int, int]] = {}
        """By shard: the first token that is too high, its id, and their number."""
        self._highest = -1

    def check(self, begin: int, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Check `tokens`, from the corpus's token `begin` on."""
        highest = int(tokens.max(initial=0))
        self._highest = max(self._highest, highest)
        if self._size is None or highest < self._size:
            return
        at = np.flatnonzero(tokens >= self._size)
        shards = self._begins.searchsorted(at + begin, side="right") - 1
        for shard, first, more in zip(*np.unique(shards, return_index=True, return_counts=True), strict=True):
            new = int(begin + at[first] - self._begins[shard]), int(tokens[at[first]]), 0
            place, token, count = self._found.get(int(shard), new)
            self._found[int(shard)] = place, token, count + int(more)

    def report(self, report: Report) -> None:
        """Add what was found to a report."""
        report.figures["highest_token"] = self._highest
        for shard, (place, token, count) in self._found.items():
            more = f", as are {count - 1:,} more in this file" if count > 1 else ""
            sentence = (
                f"is {token}{more}, but the vocabulary has {self._size} ids. The dtype or the tokenizer is another."
            )
            report.wrong("vocabulary", self._corpus.shards[shard].path, sentence, f"token {place}")
