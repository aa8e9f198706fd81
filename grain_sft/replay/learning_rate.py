"""OpenChat's automatic learning rate (imoneoi/openchat, `calculate_auto_lr` in ochat/training_deepspeed/train.py)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.corpus import Corpus, Documents, LossReader, content
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import artifact

BASE, BASE_TOKENS = 3e-4, 4_000_000
"""Llama's learning rate, and the tokens of a batch that it is for."""

DIVISORS = {"mistral": 6.0, "gemma": 5.5, "openchat_3.6": 5.3}
"""Divisor of the rate by a part of the model's name; the first that the name contains counts."""

_CHUNK = 1 << 22  # tokens


def automatic_learning_rate(corpus: Corpus, batch_tokens: int, ranks: int = 1, model_type: str = "") -> float:
    """Return 3e-4 * sqrt(batch_tokens * ranks * supervised ratio / 4,000,000), divided for some models.

    Args:
      corpus: Corpus that is trained on.
      batch_tokens: Tokens of a batch of one rank, padding included.
      ranks: Number of data-parallel processes that share a batch.
      model_type: Name of the model, in any case; one that contains "mistral" divides by 6, "gemma" by 5.5, "openchat_3.6" by
        5.3.

    Raises:
      CorpusError, CorpusFileError: numbers that are not counts, or as in `supervised_ratio`.
    """
    tokens = as_integer("batch_tokens", batch_tokens, 1, CorpusError) * as_integer("ranks", ranks, 1, CorpusError)
    divisor = next((value for name, value in DIVISORS.items() if name in model_type.lower()), 1.0)
    return BASE / divisor * math.sqrt(tokens * supervised_ratio(corpus) / BASE_TOKENS)


def supervised_ratio(corpus: Corpus) -> float:
    """Return the share of the documents' tokens that take loss as targets. A document's first token is never a target.

    Reads every loss file the first time, and keeps the counts in the cache.

    Raises:
      CorpusError: documents that cannot be found, or no token in them.
      CorpusFileError: a loss file is missing, or not the one that was indexed.
    """
    losses = {number: shard.loss for number, shard in enumerate(corpus.shards) if shard.loss is not None}
    files, documents = list(losses.values()), corpus.find_documents()
    depends = {
        "version": 2,
        "documents": documents.content,
        "shards": [[number, corpus.shards[number].num_tokens] for number in losses],
        "kinds": [file.kind for file in files],
        "losses": content.hashes_of(files),
    }

    def count() -> dict[str, npt.NDArray[np.int64]]:
        found = _count(corpus, documents.documents)
        if content.hashes_of(files) != depends["losses"]:
            raise CorpusFileError(
                f"{files[0].path}, or another file beside it, was written to while it was read. Wait until the files are "
                "complete, then open the corpus again."
            )
        return {"counts": found}

    supervised, tokens = artifact.load_or_make("supervised", depends, count, check=_check)["counts"].tolist()
    if not tokens:
        raise CorpusError(f"{corpus.shards[0].path}: its documents hold no token, so no share of them takes loss.")
    return float(supervised / tokens)


def _check(arrays: artifact.Arrays) -> None:
    counts = arrays.get("counts")
    if counts is None or counts.dtype != np.int64 or counts.shape != (2,) or not 0 <= counts[0] <= counts[1]:
        raise ValueError("it does not hold the two counts")


def _count(corpus: Corpus, documents: Documents) -> npt.NDArray[np.int64]:
    """Return (tokens that take loss, tokens) of all documents, which may overlap or leave gaps."""
    start, length = (column[documents.length > 0] for column in documents)
    if not corpus.has_loss:
        return np.array([(length - 1).sum(), length.sum()], np.int64)
    begins, ends = np.sort(start + 1), np.sort(start + length)
    reader = LossReader(corpus.loss_files, remote=corpus.remote)
    supervised, before, first = 0, 0, 0  # `before`: supervised tokens before token `first`
    for number, shard in enumerate(corpus.shards):
        for at in range(0, shard.num_tokens, _CHUNK):
            count = min(_CHUNK, shard.num_tokens - at)
            one = np.array([[number], [at], [0], [count]])
            loss = reader.gather(one[0], one[1], one[2], one[3], count)
            totals = before + np.append(0, (loss != 0).cumsum(dtype=np.int64))
            for places, sign in ((ends, 1), (begins, -1)):
                low, high = np.searchsorted(places, (first, first + count), side="right")
                supervised += sign * int(totals[places[low:high] - first].sum())
            before, first = int(totals[-1]), first + count
    return np.array([supervised, length.sum()], np.int64)
