"""Headers and sizes of many files at once."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.shard import scan_shard
from grain_sft.errors import CorpusError

THREADS = 32  # a scan waits for the disk or for a bucket, not for the processor
_PROGRESS_FROM = 64  # files; fewer are done before a bar could be read

T = TypeVar("T")


def scan_shards(
    sources: Sequence[tuple[str, str]],
    dtype: np.dtype[np.unsignedinteger] | None,
    *,
    eos_token_id: int | None = None,
    tokenizer: str | None = None,
) -> Corpus:
    """Corpus of the (path, label) pairs in `sources`, in that order, scanned in parallel.

    The progress bar is shown on a terminal, where the extra `progress` (rich) is installed.

    Raises:
      CorpusFileError, CorpusError: for the first file, in the order given, that is not right.
    """
    paths = list(dict.fromkeys(path for path, _ in sources))  # a mix may list a file more than once
    if len(paths) == 1:
        scans = {paths[0]: scan_shard(paths[0], "", dtype)}
    else:
        with concurrent.futures.ThreadPoolExecutor(min(THREADS, max(1, len(paths)))) as pool:
            try:
                results = pool.map(lambda path: scan_shard(path, "", dtype), paths)
                scans = dict(zip(paths, _with_progress(results, len(paths)), strict=True))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    shards = []
    first_path, first_dtype = paths[0], scans[paths[0]][1]
    for path, label in sources:
        shard, shard_dtype = scans[path]
        if shard_dtype != first_dtype:
            raise CorpusError(
                f"{path}: its tokens are {shard_dtype.name}, but those of {first_path} are {first_dtype.name}. "
                "All files of a corpus have one dtype: convert one of them, or open them as two corpora."
            )
        shards.append(dataclasses.replace(shard, label=label))
    return Corpus(tuple(shards), first_dtype, eos_token_id, tokenizer)


def _with_progress(results: Iterable[T], total: int) -> Iterator[T]:
    if total < _PROGRESS_FROM or not sys.stderr.isatty():
        yield from results
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from results
        return
    yield from track(results, "Scanning files", total=total, console=Console(stderr=True), transient=True)
