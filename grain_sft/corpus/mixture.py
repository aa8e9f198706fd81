"""`MixtureCorpus`, which represents all corpora of a mixture as one corpus."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from typing import Any, NoReturn, Self

import numpy as np

from grain_sft.corpus.content import PREFIX
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.documents import Documents
from grain_sft.errors import CorpusError


@dataclasses.dataclass(frozen=True, repr=False)
class MixtureCorpus(Corpus):
    """The corpora of a mixture as one corpus, with the shards of all corpora in order.

    `dtype` is the widest dtype of these corpora. Tokens are read from `parts`, not from the mixture.

    Attributes:
      parts: Corpora of the mixture, in order.
    """

    parts: tuple[Corpus, ...] = ()

    @classmethod
    def of(cls, parts: tuple[Corpus, ...]) -> Self:
        """Return the mixture of the corpora `parts`. Raise CorpusError if two were made with different tokenizers."""
        known = [part for part in parts if part.tokenizer_sha256 is not None]
        sha256 = known[0].tokenizer_sha256 if known else None
        for part in known:
            if part.tokenizer_sha256 != sha256:
                own, first = (f"{each.tokenizer!r} (sha256 {each.tokenizer_sha256})" for each in (part, known[0]))
                problem = f"{part.shards[0].path}: the corpus was made with the tokenizer {own}"
                other = f"that of {known[0].shards[0].path} with {first}"
                raise CorpusError(f"{problem}, but {other}. Expected one tokenizer. Prepare one of them again.")
        dtype: np.dtype[Any] = np.result_type(*(part.dtype for part in parts))
        return cls(tuple(shard for part in parts for shard in part.shards), dtype, tokenizer_sha256=sha256, parts=parts)

    @functools.cached_property
    def documents(self) -> Documents:
        """Start and length of each document, in order. A start is a token offset in the joined parts."""
        documents = [part.documents for part in self.parts]
        first_tokens = np.cumsum([0, *(part.num_tokens for part in self.parts[:-1])])
        starts = [part.start + first_token for part, first_token in zip(documents, first_tokens, strict=True)]
        return Documents(np.concatenate(starts), np.concatenate([part.length for part in documents]))

    @property
    def num_documents(self) -> int | None:
        """Number of documents of all corpora; None if it is unknown for one of them."""
        counts = [count for part in self.parts if (count := part.num_documents) is not None]
        return sum(counts) if len(counts) == len(self.parts) else None

    def read(self, *args: Any, **options: Any) -> NoReturn:
        """Raise CorpusError, as `save` does: the files of a mixture may have several dtypes."""
        raise CorpusError("a mixture has no tokens and no index of its own. Use each part, such as corpus.parts[0].")

    save = read

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the fingerprints of `parts`."""
        return f"sha256:{_joined(part.fingerprint for part in self.parts)}"

    def content_hash(self) -> str:
        """Return a hash of the content hashes of `parts`."""
        return f"{PREFIX}{_joined(part.content_hash() for part in self.parts)}"

    def __repr__(self) -> str:
        return f"MixtureCorpus({list(self.parts)!r})"


def _joined(hashes: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(["grain_sft mixture", *hashes]).encode()).hexdigest()
