"""OpenChat's automatic learning rate for a corpus and a batch size.

The formula is that of imoneoi/openchat: `calculate_auto_lr` in ochat/training_deepspeed/train.py.
"""

import math

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError

BASE = 3e-4
"""Learning rate of a Llama model with batches of `BASE_TOKENS` tokens that take loss."""
BASE_TOKENS = 4_000_000
"""Number of tokens that take loss in a batch. For this number, the learning rate is `BASE`."""

DIVISORS = {"mistral": 6.0, "gemma": 5.5, "openchat_3.6": 5.3}
"""Divisors of the learning rate, by a part of the model's name. If the name contains several keys, the first one applies."""


def automatic_learning_rate(corpus: Corpus, batch_tokens: int, ranks: int = 1, model_type: str = "") -> float:
    """Return OpenChat's learning rate: 3e-4 * sqrt(batch_tokens * ranks * supervised_ratio / 4,000,000) / divisor.

    `supervised_ratio` is the share of the documents' tokens that take loss.

    Args:
      corpus: Training corpus.
      batch_tokens: Number of tokens in one rank's batch, padding included.
      ranks: Number of data-parallel processes. Each has a batch of `batch_tokens`.
      model_type: Name of the model, in upper or lower case. The divisor is the value of the first key of `DIVISORS` that the
        name contains; 1 if the name contains none of the keys.

    Raises:
      CorpusError: `batch_tokens` or `ranks` is not a positive integer, the ends of the documents are unknown, or the documents
        have no tokens.
      CorpusFileError: A file is missing, or is not the one that was indexed.
    """
    return learning_rate_of(supervised_ratio(corpus), batch_tokens, ranks, model_type)


def learning_rate_of(ratio: float, batch_tokens: int, ranks: int = 1, model_type: str = "") -> float:
    """Return `automatic_learning_rate` of a corpus whose `supervised_ratio` is `ratio`."""
    tokens = as_integer("batch_tokens", batch_tokens, 1, CorpusError) * as_integer("ranks", ranks, 1, CorpusError)
    divisor = next((value for name, value in DIVISORS.items() if name in model_type.lower()), 1.0)
    return BASE / divisor * math.sqrt(tokens * ratio / BASE_TOKENS)


def supervised_ratio(corpus: Corpus) -> float:
    """Return the share of the documents' tokens that take loss. If the corpus has loss files, this reads all tokens.

    The first token of a document is never a target, so it takes no loss.

    Raises:
      CorpusError: The ends of the documents are unknown, or the documents have no tokens.
      CorpusFileError: As in `automatic_learning_rate`.
    """
    length = corpus.documents.length
    num_tokens = int(length.sum())
    if not num_tokens:
        fault = "no document has a token, so the share that takes loss is undefined"
        raise CorpusError(f"{corpus.shards[0].path}: {fault}. Check its eos_token_id.")
    if corpus.has_loss:
        supervised = sum(int(np.count_nonzero(document.loss[1:])) for document in corpus.iter_documents())
    else:
        supervised = int(np.maximum(length - 1, 0).sum())
    return supervised / num_tokens
