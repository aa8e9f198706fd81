"""Corpus: the tokens that are on disk, in order."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os

import numpy as np

from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError

FINGERPRINT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of one dtype in a fixed order. Made by `grain_sft.open_corpus`; holds no open file.

    Attributes:
      shards: the files, in the order that rows follow.
      dtype: of the tokens on disk: uint8, uint16, uint32 or uint64.
      eos_token_id: the token that ends a document, where it is known.
      tokenizer: name of the tokenizer, where it is known. Decides nothing.

    Raises:
      CorpusError: an `eos_token_id` that `dtype` can't hold.
    """

    shards: tuple[Shard, ...]
    dtype: np.dtype[np.unsignedinteger]
    eos_token_id: int | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        eos, highest = self.eos_token_id, np.iinfo(self.dtype).max
        if eos is None:
            return
        if isinstance(eos, bool) or not isinstance(eos, int | np.integer) or not 0 <= eos <= highest:
            raise CorpusError(f"eos_token_id={eos!r}: expected an id that {self.dtype.name} holds, 0 to {highest}.")

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @functools.cached_property
    def num_documents(self) -> int | None:
        """Documents, that is `eos_token_id`s, in all shards; None where no `eos_token_id` was given.

        Reads every token the first time, at the speed of memory or of the disk.

        Raises:
          CorpusFileError: a shard is missing or is not the one that was indexed.
        """
        if self.eos_token_id is None:
            return None
        from grain_sft.corpus.reader import count_token

        return count_token(self, self.eos_token_id)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that decides the rows: dtype, EOS id, and of each shard in order its length and its ends.

        Paths are left out: the same files under another folder, or in a bucket, have the same fingerprint. A shard
        whose first 4 KiB, last 4 KiB and length stay as they were is taken to be unchanged.
        """
        digest = hashlib.sha256(
            f"grain_sft corpus {FINGERPRINT_VERSION}\0{self.dtype.name}\0{self.eos_token_id}".encode()
        )
        for shard in self.shards:
            digest.update(f"\0{shard.num_tokens}\0{shard.digest}".encode())
        return f"sha256:{digest.hexdigest()}"

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "grain_sft",
        sequence_length: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        """Write an index that `open_corpus` opens without scanning the files again.

        Args:
          path: of the JSON file, which appears whole or not at all. Shards below its folder are stored relative to
            it, so that the folder can be moved.
          format: "grain_sft", or "maxtext" for an index that MaxText's `olmo_grain` reads.
          sequence_length: with "maxtext", whose index is made for one length.
          tokenizer: with "maxtext", a name for its index; the corpus's own where none is given.

        Raises:
          StorageError: `path` can't be written.
          CorpusError: an unknown format, or "maxtext" without a sequence length.
        """
        from grain_sft.corpus import index

        index.save(self, path, format=format, sequence_length=sequence_length, tokenizer=tokenizer)

    def __repr__(self) -> str:
        return (
            f"Corpus(shards={len(self.shards)}, num_tokens={self.num_tokens}, dtype={self.dtype.name}, "
            f"eos_token_id={self.eos_token_id}, fingerprint={self.fingerprint!r})"
        )
