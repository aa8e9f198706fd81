"""MixtureCorpus: the shards of several corpora, one corpus after the other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.content import PREFIX
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.documents import Documents
from grain_sft.errors import CorpusError

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt


@dataclasses.dataclass(frozen=True, repr=False)
class MixtureCorpus(Corpus):
    """The corpora of a mixture as one: their shards, one corpus after the other, in the widest of their dtypes.

    Files keep their own dtypes, so tokens are read through `parts`.

    Attributes:
      parts: Corpora of the sources.
    """

    parts: tuple[Corpus, ...] = ()

    @classmethod
    def of(cls, parts: tuple[Corpus, ...]) -> MixtureCorpus:
        """Return the mixture of some corpora.

        Raises:
          CorpusError: two of them were made with different tokenizers.
        """
        made_with = {part.tokenizer_sha256: part for part in reversed(parts) if part.tokenizer_sha256 is not None}
        if len(made_with) > 1:
            second, first = list(made_with.values())[-2:]
            raise CorpusError(
                f"{second.shards[0].path}: the corpus was made with the tokenizer {second.tokenizer!r} (sha256 "
                f"{second.tokenizer_sha256}), but {first.shards[0].path} was made with {first.tokenizer!r} (sha256 "
                f"{first.tokenizer_sha256}). The sources of a mixture have one tokenizer. Prepare one of them again."
            )
        dtype: np.dtype[Any] = np.result_type(*(part.dtype for part in parts))
        return cls(tuple(shard for part in parts for shard in part.shards), dtype, parts=parts)

    @functools.cached_property
    def documents(self) -> Documents:
        """Start, counted through all shards, and length of the documents of all corpora; see `Corpus.documents`."""
        starts: list[npt.NDArray[np.int64]] = []
        before = 0
        for part in self.parts:
            starts.append(part.documents.start + before)
            before += part.num_tokens
        return Documents(np.concatenate(starts), np.concatenate([part.documents.length for part in self.parts]))

    @property
    def num_documents(self) -> int | None:
        """Number of documents of all corpora; None where that of one is unknown."""
        counts = [part.num_documents for part in self.parts]
        return None if None in counts else sum(count for count in counts if count is not None)

    def read(self, start: int, stop: int) -> tuple[UInt[np.ndarray, " tokens"], Shaped[np.ndarray, " tokens"] | None]:
        """Raise CorpusError: the files of a mixture may have several dtypes."""
        raise CorpusError(
            "tokens of a mixture are read from one of its corpora: corpus.parts[number].read(start, stop)."
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the fingerprints of all corpora."""
        joined = "\0".join(["grain_sft mixture", *(part.fingerprint for part in self.parts)])
        return f"sha256:{hashlib.sha256(joined.encode()).hexdigest()}"

    def content_hash(self) -> str:
        """Return the hash of the content of all corpora."""
        joined = "\0".join(["grain_sft mixture", *(part.content_hash() for part in self.parts)])
        return f"{PREFIX}{hashlib.sha256(joined.encode()).hexdigest()}"

    def __repr__(self) -> str:
        return f"MixtureCorpus({list(self.parts)!r})"
