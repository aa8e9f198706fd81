"""convert: a corpus rewritten in another format, with the same documents in the same order."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, check_tokenizer, open_corpus
from grain_sft.errors import CorpusError
from grain_sft.prepare.documents import Block, Ids, in_blocks
from grain_sft.prepare.request import GIB, Dataset, Request, hash_of
from grain_sft.prepare.run import Progress, write_tasks
from grain_sft.prepare.target import MANIFEST, Target
from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer
from grain_sft.prepare.writers import FORMATS, Plan, SplitStatistics
from grain_sft.storage import files

VALIDATION = (
    ("val/token_ids_part_*.npy", "val"),
    ("val/**/episodes.idx", "val"),
    ("val_idx.npy", "val"),
    ("*.eval.parquet", ""),
)
"""Files of validation splits, and the folder of each such split; "" for the file itself."""


def convert(
    corpus: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str,
    *,
    tokenizer: str | None = None,
    part_bytes: int = GIB,
    shard_tokens: int = 50_000_000,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the documents of an SFT corpus in another format: train, and val where there is one.

    Args:
      corpus: Directory in format olmo, episodes, primer or openchat.
      output: Folder that does not exist yet or is empty.
      format: Format of the output.
      tokenizer: Path of a tokenizer, where the corpus holds none.
      part_bytes: Bytes of tokens in one part (olmo).
      shard_tokens: Tokens in one shard (episodes).
      overwrite: Whether to begin again where the output is of another corpus.
      progress: Function that is called as the work proceeds.

    Returns:
      The output's manifest, as `prepare` returns it.

    Raises:
      CorpusError, CorpusFileError: The corpus can't be read, or has no documents.
      PrepareError: The format can't hold the documents, or the output is of another corpus.
    """
    _ = FORMATS[format]
    target = Target(output)
    target.check_writable()
    where = files.normalize(corpus)
    splits = {name: _Documents(found) for name, found in _open(where).items()}
    described, tokenizer_files = _tokenizer(where, tokenizer, splits)
    source = _manifest(where)
    request = Request(
        (Dataset((where,)),),
        "convert",
        tokenizer or splits["train"].corpus.tokenizer or "",
        format,
        part_bytes=part_bytes,
        shard_tokens=shard_tokens,
        val_frac=_share(splits),
        source=str(source.get("request", {}).get("source") or ""),
    )
    contents = {name: part.corpus.content_hash() for name, part in splits.items()}
    identity = {
        "key": hash_of([request.as_dict(), contents, described]),
        "request": request.as_dict(),
        "inputs": known if isinstance(known := source.get("inputs"), list) else [{"path": where}],
        "tokenizer": described,
    }
    found = target.finished(identity, overwrite=overwrite)
    if found is not None:
        target.discard()
        return {**found, "already": True}
    with target.claim(identity, overwrite=overwrite):
        names = [str(entry.get("path")) for entry in identity["inputs"] if isinstance(entry, dict)]
        plan = _plan(target, request, described, splits, names)
        FORMATS[format].check(plan)
        write_tasks(plan, FORMATS[format], progress)
        FORMATS[format].finish(plan)
        for name, data in tokenizer_files.items():
            files.write_bytes(plan.path("tokenizer", name), data)
        manifest = {
            "format": format,
            "version": request.as_dict()["version"],
            **identity,
            "splits": {name: dataclasses.asdict(counts) for name, counts in plan.statistics.items()},
            "dropped": {},
            "rejected": 0,
            "without_final_eos": source.get("without_final_eos"),
            "with_inner_eos": source.get("with_inner_eos"),
        }
        plan.write_json(MANIFEST, manifest)
        target.publish()
    return manifest


class _Documents:
    """The documents of a corpus as a `Source`."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._starts, self.lengths = corpus.documents
        self.token_dtype: np.dtype[Any] = corpus.dtype
        self.loss_dtype = np.dtype(np.float32 if corpus.has_weights else np.bool_)
        self._sources = corpus.sources

    def blocks(self, ids: Ids) -> Iterator[Block]:
        for some in in_blocks(self.lengths, ids):
            yield self.read(some)

    def read(self, ids: Ids) -> Block:
        lengths, starts = self.lengths[ids].astype(np.int64), self._starts[ids]
        breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
        tokens, loss = [], []
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(ids)], strict=True):
            some = self.corpus.read(int(starts[begin]), int(starts[end - 1] + lengths[end - 1]))
            tokens.append(some[0])
            loss.append(np.ones(len(some[0]), np.bool_) if some[1] is None else some[1])
        return Block(
            lengths,
            np.concatenate(tokens),
            np.concatenate(loss).astype(self.loss_dtype),
        )

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """See `Source`. Without sources, the lines are the numbers of documents from 1."""
        yield self._sources[ids] if self._sources is not None else np.stack([np.zeros_like(ids), ids + 1], axis=1)


class _Both:
    """The documents of all splits, numbered consecutively; a `Source`."""

    def __init__(self, parts: Sequence[_Documents]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part.lengths) for part in parts])
        self.lengths: npt.NDArray[Any] = np.concatenate([part.lengths for part in parts])
        self.token_dtype = parts[0].token_dtype
        self.loss_dtype = np.result_type(*(part.loss_dtype for part in parts))
        self.first_weights = False

    def blocks(self, ids: Ids) -> Iterator[Block]:
        if not len(ids):
            return
        part = int(np.searchsorted(self._ends, ids[0], side="right"))
        before = int(self._ends[part]) - len(self._parts[part].lengths)
        for block in self._parts[part].blocks(ids - before):
            yield block._replace(loss=block.loss.astype(self.loss_dtype))

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        if len(ids):
            part = int(np.searchsorted(self._ends, ids[0], side="right"))
            yield from self._parts[part].sources(ids - (int(self._ends[part]) - len(self._parts[part].lengths)))


def _plan(
    target: Target,
    request: Request,
    described: Mapping[str, Any],
    splits: Mapping[str, _Documents],
    source_names: Sequence[str],
) -> Plan:
    both = _Both(list(splits.values()))
    ids, before = {}, 0
    for name, part in splits.items():
        ids[name] = np.arange(before, before + len(part.lengths), dtype=np.int64)
        before += len(part.lengths)
    statistics, binary = {}, True
    for name, chosen in ids.items():
        tokens = trainable = 0
        for block in both.blocks(chosen):
            tokens += len(block.tokens)
            trainable += int(np.count_nonzero(block.loss))
            binary = binary and bool(((block.loss == 0) | (block.loss == 1)).all())
            starts = np.cumsum(block.lengths) - block.lengths
            both.first_weights = both.first_weights or bool(block.loss[starts[block.lengths > 0]].any())
        statistics[name] = SplitStatistics(len(chosen), tokens, trainable)
    return Plan(target.stage, request, described, both, ids, statistics, binary, source_names)


def _open(where: str) -> dict[str, Corpus]:
    """Return the corpora of train and perhaps val."""
    train_folder = files.join(where, "train")
    inner = files.exists(train_folder) and _has_parts(train_folder)
    train = open_corpus(train_folder if inner else where)
    if not (train.has_loss or train.has_weights):
        raise CorpusError(
            f"{where}: holds tokens without a mask. Expected a corpus in format olmo, episodes, primer or openchat."
        )
    found = {"train": train}
    for pattern, name in VALIDATION:
        if matches := files.glob(files.join(glob.escape(where), pattern)):
            found["val"] = open_corpus(files.join(where, name) if name else matches[0])
            break
    return found


def _has_parts(folder: str) -> bool:
    return files.exists(files.join(folder, "token_ids_part_0000.npy"))


def _manifest(where: str) -> dict[str, Any]:
    path = files.join(where, MANIFEST)
    if not files.exists(path):
        return {}
    found = json.loads(files.read_text(path))
    return found if isinstance(found, dict) else {}


def _share(splits: Mapping[str, _Documents]) -> float:
    total = sum(len(part.lengths) for part in splits.values())
    return len(splits["val"].lengths) / total if "val" in splits and total else 0.0


def _tokenizer(
    where: str, given: str | None, splits: Mapping[str, _Documents]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return description and files of the given tokenizer or the corpus's own, or what its tokens tell."""
    folder = files.join(where, "tokenizer")
    if given is not None:
        for part in splits.values():
            check_tokenizer(part.corpus, given)
    if given is None and files.exists(folder):
        given = folder
    if given is not None:
        loaded: Tokenizer = load_tokenizer(given)
        return json.loads(json.dumps(loaded.description())), loaded.files()
    corpus = splits["train"].corpus
    highest = 0
    for part in splits.values():
        for block in part.blocks(np.arange(len(part.lengths))):
            highest = max(highest, int(block.tokens.max(initial=0)))
    described = {
        "kind": "unknown",
        "sha256": corpus.tokenizer_sha256,
        "vocab_size": highest + 1,
        "eos_token_id": corpus.eos_token_id,
        "pad_token_id": corpus.pad_token_id,
    }
    return described, {}
