"""Format pairs, for preference pairs: each document is a prompt, a chosen response and a rejected response, in this order.

The files are those of format episodes, with `pairs.idx` in place of `episodes.idx`: uint64 [pairs, 4]. The columns are the
pair's first token, and the numbers of tokens of its prompt, chosen and rejected response. Both responses take loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.episodes import Episodes
from grain_sft.corpus.formats.metadata import DirectoryListing
from grain_sft.errors import CorpusError
from grain_sft.storage import files, read_whole

if TYPE_CHECKING:
    from jaxtyping import Int64


class Pairs(Episodes):
    """Format of a split of preference pairs."""

    expected = "a directory with train/shard_*/pairs.idx or train/pairs.idx, or its train/ or val/"
    rank = 0  # tried before "episodes", whose token and mask files have the same names
    index = "pairs.idx"
    kind = "preference"

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        """Return the token file of `path`; None if its folder has no pairs.idx."""
        token_file = super().owner(path, listing)
        if token_file is None or files.name_of(path) == self.index:
            return token_file
        return token_file if listing.sidecars(path, self.index) else None


def pair_lengths(corpus: Corpus) -> Int64[np.ndarray, "pairs 3"]:
    """Return the numbers of tokens of each pair's prompt, chosen response and rejected response, int64 [pairs, 3].

    Raises:
      CorpusError: The corpus has another format, or a file is damaged.
      CorpusFileError: A file is missing, or not the one that was indexed.
    """
    indexes = [shard.boundaries for shard in corpus.shards if shard.boundaries and shard.boundaries.kind == Pairs.kind]
    if len(indexes) < len(corpus.shards):
        other = next(shard for shard in corpus.shards if shard.boundaries not in indexes)
        problem = f"{other.path}: its documents are not preference pairs"
        raise CorpusError(f"{problem}. Write them with `grain-sft prepare --format pairs`.")
    _ = corpus.documents  # raises CorpusError for an entry that is not within its shard
    return np.frombuffer(b"".join(map(read_whole, indexes)), "<u8").reshape(-1, 4)[:, 1:].astype(np.int64)
