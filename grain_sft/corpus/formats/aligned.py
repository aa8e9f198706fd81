"""Tokens with a loss file beside them: their width, told from the two files' sizes, and their shards."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.corpus.boundaries import describe_boundaries
from grain_sft.corpus.loss import LossFile, check_labels, scan_loss
from grain_sft.corpus.scan import THREADS
from grain_sft.corpus.shard import TOKEN_DTYPES, Shard, check_plausible, scan_shard
from grain_sft.corpus.stored import MAGIC, size_and_head
from grain_sft.errors import CorpusError

Dtype = np.dtype[np.unsignedinteger]


class Part(NamedTuple):
    """The files of one shard: tokens, their loss and its kind, document boundaries ("": none) and their kind."""

    tokens: str
    loss: str
    kind: str
    boundaries: str
    boundaries_kind: str
    continues: bool | None = None


def scan_parts(
    parts: Sequence[Part], dtype: Dtype | None, allowed: Sequence[str] = TOKEN_DTYPES
) -> tuple[tuple[Shard, ...], Dtype]:
    """Shards of `parts`, scanned in parallel, and the dtype of their tokens.

    Args:
      parts: in order.
      dtype: of the tokens; None: told by the sizes of tokens and loss files.
      allowed: names of dtypes that the format has.

    Raises:
      CorpusFileError: a file is missing or unreadable.
      CorpusError: files of lengths that don't fit, or values that such files don't hold.
    """
    with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(parts))) as pool:
        losses = list(pool.map(lambda part: scan_loss(part.loss, part.kind), parts))
        for part, loss in zip(parts, losses, strict=True):
            dtype = dtype or _width(part.tokens, loss, allowed)
        chosen = dtype or np.dtype(allowed[-1])  # only empty files
        if chosen.name not in allowed:
            raise CorpusError(
                f"{parts[0].tokens}: dtype={chosen.name}; the tokens of this format are {' or '.join(allowed)}."
            )
        shards = tuple(pool.map(lambda part, loss: _scan(part, loss, chosen), parts, losses))
    return shards, chosen


def _scan(part: Part, loss: LossFile, dtype: Dtype) -> Shard:
    shard, _ = scan_shard(part.tokens, "", dtype)
    if shard.num_tokens != loss.count:
        raise CorpusError(
            f"{part.loss}: {loss.count} values for {shard.num_tokens} {dtype.name} tokens in {part.tokens}; expected one "
            "for each. A file was cut short or is of another corpus, or dtype is another."
        )
    if part.kind == "labels":
        check_labels(loss, part.tokens, shard.data_offset, shard.num_tokens, dtype)
    boundaries = None
    if part.boundaries:
        boundaries = describe_boundaries(part.boundaries, part.boundaries_kind, part.continues)
    return dataclasses.replace(shard, loss=loss, boundaries=boundaries)


def _width(tokens: str, loss: LossFile, allowed: Sequence[str]) -> Dtype | None:
    """The dtype whose size fits a value of loss for each token; None where both files are empty."""
    size, head = size_and_head(tokens)
    if head.startswith(MAGIC):
        return scan_shard(tokens, "", None)[1]
    if not size and not loss.count:
        return None
    for name in allowed:
        dtype: Dtype = np.dtype(name)
        if loss.count * dtype.itemsize == size:
            check_plausible(tokens, head, dtype)
            return dtype
    raise CorpusError(
        f"{tokens}: {size} bytes for {loss.count} values in {loss.path}; tokens are {' or '.join(allowed)}, and none of "
        "these gives a value for each token. A file was cut short, or is of another corpus."
    )
