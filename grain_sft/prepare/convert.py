"""Conversion of a corpus to another format, with the same documents in the same order."""

from __future__ import annotations

import glob
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, check_tokenizer, open_corpus
from grain_sft.errors import CorpusError
from grain_sft.prepare.documents import Block, Ids, in_blocks
from grain_sft.prepare.job import finish
from grain_sft.prepare.request import GIB, Dataset, Request, hash_of
from grain_sft.prepare.run import Progress, write_tasks
from grain_sft.prepare.target import MANIFEST, Target
from grain_sft.prepare.tokenizers import load_tokenizer
from grain_sft.prepare.writers import FORMATS, Plan, SplitStatistics
from grain_sft.storage import files

VALIDATION = (
    ("val/token_ids_part_*.npy", "val"),
    ("val/**/episodes.idx", "val"),
    ("val_idx.npy", "val"),
    ("*.eval.parquet", ""),
)
"""Glob patterns of files of a validation split, and the folder to open where one matches; "" opens the file itself."""


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
    """Write the documents of an SFT corpus in another format: split train and, if the corpus has it, split val.

    Args:
      corpus: Directory in format olmo, episodes, primer or openchat.
      output: Folder that does not exist yet or is empty.
      format: Format of the output.
      tokenizer: Path of the corpus's tokenizer; None uses the one in the corpus folder, if any.
      part_bytes: Bytes of tokens in one part (olmo).
      shard_tokens: Tokens in one shard (episodes).
      overwrite: Whether to replace an output of other documents or options.
      progress: Function that is called as the work proceeds.

    Returns:
      The output's manifest, as `prepare` returns it.

    Raises:
      CorpusError, CorpusFileError: The corpus can't be read, or has no documents.
      PrepareError: The format can't hold the documents, or the output is of another corpus.
    """
    made = FORMATS[format]
    target = Target(output)
    target.check_writable()
    where = files.normalize(corpus)
    splits = _open(where)
    documents = _Documents(list(splits.values()))
    described, tokenizer_files = _tokenizer(where, tokenizer, documents)
    source = _manifest(where)
    request = Request(
        (Dataset((where,)),),
        "convert",
        tokenizer or splits["train"].tokenizer or "",
        format,
        part_bytes=part_bytes,
        shard_tokens=shard_tokens,
        val_frac=len(documents.ids[-1]) / max(1, len(documents.lengths)) if "val" in splits else 0.0,
        source=str(source.get("request", {}).get("source") or ""),
    )
    contents = {name: part.content_hash() for name, part in splits.items()}
    inputs = source.get("inputs")
    identity = {
        "key": hash_of([request.as_dict(), contents, described]),
        "request": request.as_dict(),
        "inputs": inputs if isinstance(inputs, list) else [{"path": where}],
        "tokenizer": described,
    }

    def make() -> dict[str, Any]:
        names = [str(entry.get("path")) for entry in identity["inputs"] if isinstance(entry, dict)]
        plan = _plan(target, request, described, documents, list(splits), names)
        made.check(plan)
        write_tasks(plan, made, progress or (lambda what, done, total: None))
        counts = {"dropped": {}, "rejected": 0}
        counts |= {name: source.get(name) for name in ("without_final_eos", "with_inner_eos")}
        return finish(plan, identity, tokenizer_files, counts)

    return target.produce(identity, make, overwrite=overwrite)


class _Documents:
    """`Source` of the documents of all splits, numbered consecutively; each call takes ids of one split."""

    def __init__(self, parts: Sequence[Corpus]) -> None:
        self.parts = parts
        self._starts = [part.documents.start for part in parts]
        self._firsts = np.cumsum([0, *map(len, self._starts)])
        self.ids = [np.arange(*bounds, dtype=np.int64) for bounds in itertools.pairwise(self._firsts.tolist())]
        self.lengths: npt.NDArray[Any] = np.concatenate([part.documents.length for part in parts])
        self.token_dtype: np.dtype[Any] = parts[0].dtype
        self.loss_dtype = np.dtype(np.float32 if any(part.has_weights for part in parts) else np.bool_)
        self.first_weights = False

    def blocks(self, ids: Ids) -> Iterator[Block]:
        for some in in_blocks(self.lengths, ids):
            part, numbers = self._of_part(some)
            lengths, starts = self.lengths[some].astype(np.int64), self._starts[part][numbers]
            breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
            tokens, loss = [], []
            for begin, end in itertools.pairwise([0, *breaks.tolist(), len(some)]):
                read = self.parts[part].read(int(starts[begin]), int(starts[end - 1] + lengths[end - 1]))
                tokens.append(read[0])
                loss.append(np.ones(len(read[0]), np.bool_) if read[1] is None else read[1])
            yield Block(lengths, np.concatenate(tokens), np.concatenate(loss).astype(self.loss_dtype))

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """See `Source`. If the corpus has no sources, input is 0 and line is the number of the document, from 1."""
        if len(ids):
            part, numbers = self._of_part(ids)
            sources = self.parts[part].sources
            yield np.stack([np.zeros_like(numbers), numbers + 1], axis=1) if sources is None else sources[numbers]

    def _of_part(self, ids: Ids) -> tuple[int, Ids]:
        """Return the index of the split of the documents `ids`, and their numbers in it."""
        part = int(np.searchsorted(self._firsts, ids[0], side="right")) - 1
        return part, ids - self._firsts[part]


def _plan(
    target: Target,
    request: Request,
    described: Mapping[str, Any],
    documents: _Documents,
    splits: Sequence[str],
    source_names: Sequence[str],
) -> Plan:
    statistics, binary = {}, True
    for name, ids in zip(splits, documents.ids, strict=True):
        tokens = trainable = 0
        for block in documents.blocks(ids):
            tokens += len(block.tokens)
            trainable += int(np.count_nonzero(block.loss))
            binary = binary and bool(((block.loss == 0) | (block.loss == 1)).all())
            starts = np.cumsum(block.lengths) - block.lengths
            documents.first_weights = documents.first_weights or bool(block.loss[starts[block.lengths > 0]].any())
        statistics[name] = SplitStatistics(len(ids), tokens, trainable)
    ids_of = dict(zip(splits, documents.ids, strict=True))
    return Plan(target.stage, request, described, documents, ids_of, statistics, binary, source_names)


def _open(where: str) -> dict[str, Corpus]:
    """Return the corpora of split train and, if it exists, split val, by name."""
    inner = files.exists(files.join(where, "train", "token_ids_part_0000.npy"))
    train = open_corpus(files.join(where, "train") if inner else where)
    if not (train.has_loss or train.has_weights):
        raise CorpusError(
            f"{where}: holds tokens without a mask. Expected a corpus in format olmo, episodes, primer or openchat."
        )
    for pattern, name in VALIDATION:
        if matches := files.glob(files.join(glob.escape(where), pattern)):
            return {"train": train, "val": open_corpus(files.join(where, name) if name else matches[0])}
    return {"train": train}


def _manifest(where: str) -> dict[str, Any]:
    path = files.join(where, MANIFEST)
    found = json.loads(files.read_text(path)) if files.exists(path) else None
    return found if isinstance(found, dict) else {}


def _tokenizer(where: str, given: str | None, documents: _Documents) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return description and files of a tokenizer: the one given, the corpus's own, or one inferred from its tokens."""
    folder = files.join(where, "tokenizer")
    if given is not None:
        for part in documents.parts:
            check_tokenizer(part, given)
    elif files.exists(folder):
        given = folder
    if given is not None:
        loaded = load_tokenizer(given)
        return json.loads(json.dumps(loaded.description())), loaded.files()
    corpus = documents.parts[0]
    highest = (int(block.tokens.max(initial=0)) for ids in documents.ids for block in documents.blocks(ids))
    described = {
        "kind": "unknown",
        "sha256": corpus.tokenizer_sha256,
        "vocab_size": max(highest, default=0) + 1,
        "eos_token_id": corpus.eos_token_id,
        "pad_token_id": corpus.pad_token_id,
    }
    return described, {}
