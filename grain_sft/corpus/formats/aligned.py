"""Token files and the sidecars of each: loss and document boundaries, scanned in parallel."""

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
from grain_sft.errors import CorpusError
from grain_sft.progress import with_progress
from grain_sft.storage import MAGIC, read_head

Dtype = np.dtype[np.unsignedinteger]


class Part(NamedTuple):
    """The files of one shard: tokens, their loss and its kind, document boundaries and their kind ("": none).

    `continues` and `label` are those of `BoundaryFile` and `Shard`.
    """

    tokens: str
    loss: str = ""
    kind: str = "bool"
    boundaries: str = ""
    boundaries_kind: str = "csv"
    continues: bool | None = None
    label: str = ""


def scan_parts(
    parts: Sequence[Part], dtype: Dtype | None, allowed: Sequence[str] = TOKEN_DTYPES, *, use_loss: bool = True
) -> tuple[tuple[Shard, ...], Dtype]:
    """Return the shards of `parts`, scanned in parallel, and the dtype of their tokens.

    Args:
      parts: at least one, in order; a part may occur more than once.
      dtype: of the tokens. None: the width that fits the loss files; without loss files, that of each file's header, or
        uint32 if the file looks like it.
      allowed: names of the dtypes that the format has.
      use_loss: whether shards keep their loss files. If not, and `dtype` is given, loss files are not opened.

    Raises:
      CorpusFileError: a file is missing or unreadable.
      CorpusError: files of lengths or dtypes that don't fit, or values that such files don't hold.
    """
    plain = [part._replace(label="", continues=None) for part in parts]
    if not use_loss and dtype is not None:
        plain = [part._replace(loss="") for part in plain]
    unique = list(dict.fromkeys(plain))  # a mix may list a file more than once
    with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(unique))) as pool:
        try:
            losses = list(pool.map(lambda part: scan_loss(part.loss, part.kind) if part.loss else None, unique))
            for part, loss in zip(unique, losses, strict=True):
                if dtype is None and loss is not None:
                    dtype = _width(part.tokens, loss, allowed)
            if dtype is None and len(allowed) < len(TOKEN_DTYPES):
                dtype = np.dtype(allowed[-1])  # only empty files
            if dtype is not None and dtype.name not in allowed:
                raise CorpusError(
                    f"{parts[0].tokens}: dtype={dtype.name}; the tokens of this format are {' or '.join(allowed)}."
                )
            results = pool.map(lambda part, loss: _scan(part, loss, dtype), unique, losses)
            scans = dict(zip(unique, with_progress(results, len(unique), "Scanning files"), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    first_path, first_dtype = unique[0].tokens, scans[unique[0]][1]
    shards = []
    for part, key in zip(parts, plain, strict=True):
        shard, found = scans[key]
        if found != first_dtype:
            raise CorpusError(
                f"{part.tokens}: its tokens are {found.name}, but those of {first_path} are {first_dtype.name}. "
                "All files of a corpus have one dtype: convert one of them, or open them as two corpora."
            )
        boundaries = shard.boundaries
        if boundaries is not None:
            boundaries = dataclasses.replace(boundaries, continues=part.continues)
        loss = shard.loss if use_loss else None
        shards.append(dataclasses.replace(shard, loss=loss, boundaries=boundaries, label=part.label))
    return tuple(shards), first_dtype


def _scan(part: Part, loss: LossFile | None, dtype: Dtype | None) -> tuple[Shard, Dtype]:
    shard, dtype = scan_shard(part.tokens, "", dtype)
    if loss is not None:
        check_loss(shard, loss, dtype)
    boundaries = describe_boundaries(part.boundaries, part.boundaries_kind) if part.boundaries else None
    return dataclasses.replace(shard, loss=loss, boundaries=boundaries), dtype


def check_loss(shard: Shard, loss: LossFile, dtype: Dtype) -> None:
    """Check that a loss file has a value for each token, and that labels at its ends are the tokens.

    Raises:
      CorpusError: it has more or fewer, or other labels.
    """
    if shard.num_tokens != loss.count:
        raise CorpusError(
            f"{loss.path}: {loss.count} values for {shard.num_tokens} {dtype.name} tokens in {shard.path}; expected one "
            "for each. A file was cut short or is of another corpus, or dtype is another."
        )
    if loss.kind == "labels":
        check_labels(loss, shard.path, shard.data_offset, shard.num_tokens, dtype)


def _width(tokens: str, loss: LossFile, allowed: Sequence[str]) -> Dtype | None:
    """The dtype whose size fits a value of loss for each token; None where both files are empty."""
    size, head, _ = read_head(tokens)
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
