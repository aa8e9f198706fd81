"""Loss files of a corpus that a saved index lists: those of the index, others, or none."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Options, Tree, find_loss
from grain_sft.corpus.formats.aligned import check_loss
from grain_sft.corpus.formats.splits import check_mask_count, check_mask_order
from grain_sft.corpus.loss import scan_loss
from grain_sft.corpus.scan import THREADS
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError


def indexed_loss(path: str, data: Mapping[str, Any], corpus: Corpus, options: Options) -> Corpus:
    """Return the corpus with the loss files that `options` ask for: named ones, those of the index, or none.

    Args:
      path: of the index.
      data: its content. Version 0.1.0 wrote no `use_loss_mask`, and no masks of listed files.
      corpus: as the index lists it.

    Raises:
      CorpusFileError: a loss file is missing or unreadable.
      CorpusError: masks that exist and are not listed, or that don't fit the tokens.
    """
    stated = data.get("use_loss_mask")
    if stated is not None and not isinstance(stated, bool):
        raise CorpusError(f"{path}: use_loss_mask is {stated!r}; expected true, false or null. Build the index again.")
    wanted = stated if options.use_loss_mask is None else options.use_loss_mask
    if options.masks is not None:
        check_mask_count([shard.path for shard in corpus.shards], options.masks)
        masked = _with_files(corpus, [(mask, "bool") for mask in options.masks])
        check_mask_order([shard.path for shard in corpus.shards], options.masks)
        return masked
    if wanted is False:
        shards = tuple(dataclasses.replace(shard, loss=None) for shard in corpus.shards)
        ignores = stated is False or corpus.has_loss
        return dataclasses.replace(corpus, shards=shards, ignores_loss=ignores)
    if corpus.has_loss:
        return corpus
    tree = Tree()
    found = [find_loss(shard.path, tree) for shard in corpus.shards]
    if not any(loss for loss, _ in found):
        return corpus
    if stated is False and all(loss for loss, _ in found):  # the index ignores them, the caller doesn't
        return _with_files(corpus, found)
    at = next(number for number, (loss, _) in enumerate(found) if loss)
    raise CorpusError(
        f"{path}: lists {corpus.shards[at].path} without its loss mask {found[at][0]}, so all of its tokens would take loss. "
        "Build the index again, or say use_loss_mask=False if the masks are to be ignored."
    )


def _with_files(corpus: Corpus, losses: Sequence[tuple[str, str]]) -> Corpus:
    """The corpus with these loss files, of these kinds."""

    def scan(shard: Shard, path: str, kind: str) -> Shard:
        loss = scan_loss(path, kind)
        check_loss(shard, loss, corpus.dtype)
        return dataclasses.replace(shard, loss=loss)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        shards = tuple(pool.map(scan, corpus.shards, *zip(*losses, strict=True)))
    return dataclasses.replace(corpus, shards=shards, ignores_loss=False)
