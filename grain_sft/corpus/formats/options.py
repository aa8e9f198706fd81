"""Options: what `open_corpus` was asked for, and the corpus that comes of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.metadata import Origin
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError
from grain_sft.storage import describe

Dtype = np.dtype[np.unsignedinteger]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `open_corpus` that formats take.

    Attributes:
      dtype, eos_token_id, tokenizer, use_loss_mask: as there.
      masks: label masks, one for each token file in order; None: those beside the token files.
    """

    dtype: Dtype | None = None
    eos_token_id: int | None = None
    tokenizer: str | None = None
    use_loss_mask: bool | None = None
    masks: tuple[str, ...] | None = None


def corpus_of(
    shards: tuple[Shard, ...],
    dtype: Dtype,
    options: Options,
    origin: Origin,
    sources: str,
    *,
    ignores_loss: bool = False,
) -> Corpus:
    """Return the corpus of these shards.

    Raises:
      CorpusError: an EOS id that its tokens can't be.
    """
    highest = np.iinfo(dtype).max
    if options.eos_token_id is None and (origin.eos_token_id or 0) > highest:
        raise CorpusError(
            f"{origin.path or shards[0].path}: eos_token_id is {origin.eos_token_id}, which {dtype.name} can't hold."
        )
    return Corpus(
        shards=shards,
        dtype=dtype,
        eos_token_id=origin.eos_token_id if options.eos_token_id is None else options.eos_token_id,
        tokenizer=origin.tokenizer,
        tokenizer_sha256=origin.tokenizer_sha256,
        pad_token_id=origin.pad_token_id,
        sources_file=describe(sources) if sources else None,
        source_names=origin.source_names,
        ignores_loss=ignores_loss,
    )
