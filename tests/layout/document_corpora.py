"""Corpora of documents that tests know, written without grain_sft."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grain_sft import open_corpus
from grain_sft.corpus import Corpus

EOS, PAD = 1, 0


@dataclasses.dataclass(frozen=True)
class Known:
    """A corpus, and its documents' tokens, loss (None: all tokens take it) and first tokens in all shards together."""

    corpus: Corpus
    tokens: list[np.ndarray]
    loss: list[np.ndarray] | None
    starts: list[int]


def make(kind: str, folder: Path, lengths: Sequence[int], seed: int = 0, *, part: int = 40, outside: int = 0) -> Known:
    """Return a corpus of documents of `lengths`, each ending with its only EOS.

    Args:
      kind: "plain" (raw files of `part` documents), "parts" (format olmo: parts of `part` tokens that cut through
        documents, with masks) or "episodes" (shards of `part` documents, with weights).
      outside: tokens of no document: after the last EOS of each file, or before each episode.
    """
    random = np.random.default_rng(seed)
    tokens = [random.integers(2, 500, length) for length in lengths]
    for each in tokens:
        each[-1] = EOS
    folder.mkdir(parents=True, exist_ok=True)
    sizes = np.array([len(each) for each in tokens])
    before = {"parts": 0, "plain": np.arange(len(tokens)) // part, "episodes": np.arange(len(tokens)) + 1}[kind]
    starts = (np.cumsum(sizes) - sizes + before * outside).tolist()
    if kind == "parts":
        loss = [random.random(length) < 0.6 for length in lengths]
        return Known(_parts(folder, tokens, loss, part), tokens, loss, starts)
    groups = np.split(np.arange(len(tokens)), range(part, len(tokens), part))
    if kind == "plain":
        for number, group in enumerate(groups):
            whole = np.concatenate([*(tokens[at] for at in group), np.full(outside, 7)])
            whole.astype("<u2").tofile(folder / f"{number:03d}.npy")
        corpus = open_corpus(folder, dtype="uint16", eos_token_id=EOS)
        return Known(dataclasses.replace(corpus, pad_token_id=PAD), tokens, None, starts)
    loss = [((random.random(length) < 0.6) * random.random(length)).astype(np.float32) for length in lengths]
    for number, group in enumerate(groups):
        place = folder / "train" / f"shard_{number:05d}"
        place.mkdir(parents=True)
        ends = np.cumsum(sizes[group] + outside)
        for name, dtype, fill, arrays in (("tokens", "<u4", 7, tokens), ("mask_weighted", "<f4", 1, loss)):
            parts = [part for at in group for part in (np.full(outside, fill), arrays[at])]
            np.concatenate(parts).astype(dtype).tofile(place / f"{name}.bin")
        np.stack([ends - sizes[group], sizes[group]], 1).astype("<u8").tofile(place / "episodes.idx")
    stated = {"token_dtype": "uint32", "eot_token_id": EOS, "pad_token_id": PAD}
    (folder / "dataset_metadata.json").write_text(json.dumps(stated))
    return Known(open_corpus(folder), tokens, loss, starts)


def _parts(folder: Path, tokens: list[np.ndarray], loss: list[np.ndarray], part: int) -> Corpus:
    everything, mask = np.concatenate(tokens), np.concatenate(loss)
    ends = np.cumsum([len(each) for each in tokens])
    starts = ends - [len(each) for each in tokens]
    for number, begin in enumerate(range(0, len(everything), part)):
        stop = min(begin + part, len(everything))
        everything[begin:stop].astype("<u2").tofile(folder / f"token_ids_part_{number:04d}.npy")
        mask[begin:stop].tofile(folder / f"labels_mask_part_{number:04d}.npy")
        inside = (ends > begin) & (starts < stop)
        pairs = np.stack([starts, ends], 1)[inside].clip(begin, stop) - begin
        with gzip.open(folder / f"token_ids_part_{number:04d}.csv.gz", "wt", compresslevel=1) as file:
            file.writelines(f"{start},{end}\n" for start, end in pairs.tolist())
    return dataclasses.replace(open_corpus(folder, dtype="uint16", eos_token_id=EOS), pad_token_id=PAD)


def token_files(known: Known) -> list[np.ndarray]:
    """Return the tokens of every shard, read without grain_sft."""
    return [np.fromfile(shard.path, known.corpus.dtype) for shard in known.corpus.shards]
