"""OpenChat's automatic learning rate (imoneoi/openchat, `calculate_auto_lr` in ochat/training_deepspeed/train.py)."""

import math

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.corpus import Corpus, content
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import artifact

BASE, BASE_TOKENS = 3e-4, 4_000_000
"""Llama's learning rate, and the batch size in tokens that it was chosen for."""

DIVISORS = {"mistral": 6.0, "gemma": 5.5, "openchat_3.6": 5.3}
"""Divisors of the learning rate. The first key that the model's name contains applies."""


def automatic_learning_rate(corpus: Corpus, batch_tokens: int, ranks: int = 1, model_type: str = "") -> float:
    """Return 3e-4 * sqrt(batch_tokens * ranks * supervised ratio / 4,000,000), divided as in `DIVISORS`.

    Args:
      corpus: Training corpus.
      batch_tokens: Tokens in one rank's batch, padding included.
      ranks: Number of data-parallel processes. Each has a batch of `batch_tokens`.
      model_type: Name of the model, in upper or lower case. The rate is divided by 6 if it contains "mistral", by 5.5 for
        "gemma" and by 5.3 for "openchat_3.6".

    Raises:
      CorpusError: `batch_tokens` or `ranks` is not a positive integer, or as in `supervised_ratio`.
      CorpusFileError: As in `supervised_ratio`.
    """
    tokens = as_integer("batch_tokens", batch_tokens, 1, CorpusError) * as_integer("ranks", ranks, 1, CorpusError)
    divisor = next((value for name, value in DIVISORS.items() if name in model_type.lower()), 1.0)
    return BASE / divisor * math.sqrt(tokens * supervised_ratio(corpus) / BASE_TOKENS)


def supervised_ratio(corpus: Corpus) -> float:
    """Return the share of the documents' tokens that take loss. A document's first token is never a target, so it takes none.

    The first call reads every loss file and caches the counts on disk.

    Raises:
      CorpusError: The ends of the documents are unknown, or the documents have no tokens.
      CorpusFileError: A loss file is missing, is not the one that was indexed, or changes while it is read.
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
        length = documents.documents.length
        supervised = int(np.maximum(length - 1, 0).sum())
        if corpus.has_loss:
            supervised = sum(int(np.count_nonzero(document.loss[1:])) for document in corpus.iter_documents())
        if content.hashes_of(files) != depends["losses"]:
            raise CorpusFileError(
                f"a loss file ({files[0].path} or another of the corpus) changed while it was read. Wait until the files "
                "are complete, then open the corpus again."
            )
        return {"counts": np.array([supervised, length.sum()], np.int64)}

    supervised, tokens = artifact.load_or_make("supervised", depends, count, check=_check)["counts"].tolist()
    if not tokens:
        raise CorpusError(
            f"{corpus.shards[0].path}: its documents have no tokens, so the share that takes loss is undefined."
        )
    return float(supervised / tokens)


def _check(arrays: artifact.Arrays) -> None:
    counts = arrays.get("counts")
    if counts is None or counts.dtype != np.int64 or counts.shape != (2,) or not 0 <= counts[0] <= counts[1]:
        raise ValueError("it does not contain the two counts")
