"""OpenChat's automatic learning rate (imoneoi/openchat, `calculate_auto_lr` in ochat/training_deepspeed/train.py)."""

import math

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.corpus import Corpus, content
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import artifact

BASE = 3e-4
"""Llama's learning rate."""
BASE_TOKENS = 4_000_000
"""Batch size, in tokens, that `BASE` is for."""

DIVISORS = {"mistral": 6.0, "gemma": 5.5, "openchat_3.6": 5.3}
"""Divisors of the learning rate by a part of the model's name. The first key that the name contains applies."""


def automatic_learning_rate(corpus: Corpus, batch_tokens: int, ranks: int = 1, model_type: str = "") -> float:
    """Return OpenChat's learning rate: 3e-4 * sqrt(batch_tokens * ranks * supervised_ratio / 4,000,000) / divisor.

    Args:
      corpus: Training corpus.
      batch_tokens: Tokens in one rank's batch, padding included.
      ranks: Number of data-parallel processes. Each has a batch of `batch_tokens`.
      model_type: Name of the model, in upper or lower case. The divisor is 6 if it contains "mistral", 5.5 if it contains
        "gemma", 5.3 if it contains "openchat_3.6", else 1.

    Raises:
      CorpusError: `batch_tokens` or `ranks` is not a positive integer, or `supervised_ratio` raises it.
      CorpusFileError: `supervised_ratio` raises it.
    """
    tokens = as_integer("batch_tokens", batch_tokens, 1, CorpusError) * as_integer("ranks", ranks, 1, CorpusError)
    divisor = next((value for name, value in DIVISORS.items() if name in model_type.lower()), 1.0)
    return BASE / divisor * math.sqrt(tokens * supervised_ratio(corpus) / BASE_TOKENS)


def supervised_ratio(corpus: Corpus) -> float:
    """Return the number of tokens that take loss, divided by the number of tokens of all documents.

    The first token of a document is never a target, so it takes no loss. The first call reads every loss file, and caches the
    counts on disk.

    Raises:
      CorpusError: The ends of the documents are unknown, or the documents have no tokens.
      CorpusFileError: A loss file is missing, is not the one that was indexed, or changes while it is read.
    """
    finder = corpus.find_documents()
    loss_files = [shard.loss for shard in corpus.shards if shard.loss is not None]
    depends = {
        "version": 2,
        "documents": finder.content,
        "shards": [[n, shard.num_tokens] for n, shard in enumerate(corpus.shards) if shard.loss is not None],
        "kinds": [file.kind for file in loss_files],
        "losses": content.hashes_of(loss_files),
    }

    def count() -> dict[str, npt.NDArray[np.int64]]:
        length = finder.documents.length
        if corpus.has_loss:
            supervised = sum(int(np.count_nonzero(document.loss[1:])) for document in corpus.iter_documents())
        else:
            supervised = int(np.maximum(length - 1, 0).sum())
        if content.hashes_of(loss_files) != depends["losses"]:
            raise CorpusFileError(
                f"a loss file ({loss_files[0].path} or another of the corpus) changed while it was read. Wait until the files "
                "are complete, then open the corpus again."
            )
        return {"counts": np.array([supervised, length.sum()], np.int64)}

    arrays = artifact.load_or_make("supervised", depends, count, check=_check_counts)
    supervised, tokens = arrays["counts"].tolist()
    if not tokens:
        raise CorpusError(
            f"{corpus.shards[0].path}: its documents have no tokens, so the share that takes loss is undefined."
        )
    return float(supervised / tokens)


def _check_counts(arrays: artifact.Arrays) -> None:
    """Raise ValueError if cached arrays are not the two counts: supervised tokens, and all tokens."""
    counts = arrays.get("counts")
    if counts is None or counts.dtype != np.int64 or counts.shape != (2,) or not 0 <= counts[0] <= counts[1]:
        raise ValueError("it does not contain the two counts")
