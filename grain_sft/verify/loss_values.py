"""Values of loss files as they stand on disk, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import IGNORED, KINDS, Corpus, Shard
from grain_sft.errors import GrainSftError
from grain_sft.storage import ShardReader
from grain_sft.verify.finding import Report

_BLOCK_TOKENS = 1 << 20


def check_loss_values(report: Report, corpus: Corpus) -> None:
    """Check each value: 0 or 1; a finite weight, 0 or more; or the token itself or -100. Report a file's first wrong one."""
    for shard in corpus.shards:
        if shard.loss is None:
            continue
        try:
            for begin, values, tokens in _blocks(corpus, shard):
                wrong, expected = _wrong(shard.loss.kind, values, tokens)
                if wrong.any():
                    at = int(np.flatnonzero(wrong)[0])
                    report.wrong(
                        "loss", shard.loss.path, f"holds {values[at]}; expected {expected}.", f"token {begin + at}"
                    )
                    break
        except GrainSftError as error:
            report.wrong("loss", shard.loss.path, str(error))


def _wrong(
    kind: str, values: npt.NDArray[np.generic], tokens: npt.NDArray[np.unsignedinteger]
) -> tuple[npt.NDArray[np.bool_], str]:
    """Which values can't stand in a loss file of this kind, and what can."""
    wrong: npt.NDArray[np.bool_]
    if kind == "bool":
        wrong = values > 1  # type: ignore[operator]
        return wrong, "0 or 1"
    if kind == "float32":
        return ~np.isfinite(values) | (values < 0), "a finite weight, 0 or more"  # type: ignore[operator]
    return (values != IGNORED) & (values != tokens.astype(np.int64)), f"the token itself or {IGNORED}, not shifted"


def _blocks(
    corpus: Corpus, shard: Shard
) -> Iterator[tuple[int, npt.NDArray[np.generic], npt.NDArray[np.unsignedinteger]]]:
    """(first token, its loss and those after it, and these tokens) of a shard; tokens only where loss is labels."""
    assert shard.loss is not None
    kind = KINDS[shard.loss.kind]
    of_loss = ShardReader((shard.loss,), kind.itemsize, 2, remote=corpus.remote)
    of_tokens = ShardReader((shard,), corpus.dtype.itemsize, 2, remote=corpus.remote)
    for begin in range(0, shard.num_tokens, _BLOCK_TOKENS):
        count = min(_BLOCK_TOKENS, shard.num_tokens - begin)
        values: npt.NDArray[np.generic] = np.empty(count, kind)
        tokens: npt.NDArray[np.unsignedinteger] = np.empty(count if shard.loss.kind == "labels" else 0, corpus.dtype)
        of_loss.gather([0], [begin], [0], [values.nbytes], values.data.cast("B"))
        if len(tokens):
            of_tokens.gather([0], [begin], [0], [tokens.nbytes], tokens.data.cast("B"))
        yield begin, values, tokens
