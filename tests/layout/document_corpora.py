"""Corpora of random documents of given lengths, written without grain_sft's writers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sft_files import EOS, write_episodes, write_olmo

from grain_sft import open_corpus
from grain_sft.corpus import Corpus
from grain_sft.layout import Layout

PAD = 0


@dataclasses.dataclass(frozen=True)
class Made:
    """A corpus and its documents."""

    corpus: Corpus
    tokens: list[np.ndarray]  # one array for each document
    loss: list[np.ndarray] | None  # one array for each document; None if all tokens take loss
    starts: list[int]  # number of tokens before each document, counted through all shards


def make(kind: str, folder: Path, lengths: Sequence[int], seed: int = 0, *, part: int = 40, outside: int = 0) -> Made:
    """Return a corpus of documents of `lengths`, each ending with its only EOS.

    Args:
      kind: "plain" is raw files of `part` documents. "parts" is format olmo, with masks, in files of `part` tokens that cut
        documents. "episodes" is shards of `part` documents, with weights.
      outside: Number of tokens that belong to no document, after the last EOS of each raw file or before each episode.
    """
    random, count = np.random.default_rng(seed), len(lengths)
    tokens = [np.append(random.integers(3, 500, length - 1), EOS) for length in lengths]
    loss = [random.random(length) < 0.6 for length in lengths]
    if kind == "plain":
        folder.mkdir(parents=True, exist_ok=True)
        for first in range(0, count, part):
            whole = np.concatenate([*tokens[first : first + part], np.full(outside, 7)])
            whole.astype("<u2").tofile(folder / f"{first:05d}.npy")
    elif kind == "parts":
        write_olmo(folder, list(zip(tokens, loss, strict=True)), part_tokens=part)
    else:
        loss = [(mask * random.random(len(mask))).astype(np.float32) for mask in loss]
        write_episodes(folder, list(zip(tokens, loss, strict=True)), shards=-(-count // part), gap=outside)
    options = {} if kind == "episodes" else {"dtype": "uint16", "eos_token_id": EOS}
    corpus = dataclasses.replace(open_corpus(folder, **options), pad_token_id=PAD)
    before = {"parts": 0, "plain": np.arange(count) // part, "episodes": np.arange(count) + 1}[kind]
    starts = (np.cumsum(lengths) - lengths + before * outside).tolist()
    return Made(corpus, tokens, None if kind == "plain" else loss, starts)


def row_of_spans(made: Made, layout: Layout, row: int) -> tuple[list[tuple[int, int, int]], dict[str, np.ndarray]]:
    """Return the segments and the arrays of a row, computed from its spans.

    A segment is (document, number of the document's tokens before the segment, number of its tokens).
    """
    firsts = np.cumsum([0, *(shard.num_tokens for shard in made.corpus.shards)]).tolist()
    pieces = []
    for span in layout.spans(row):
        before, size = firsts[span.shard] + span.start - made.starts[span.document], span.stop - span.start
        if pieces and (span.document, before) == (pieces[-1][0], sum(pieces[-1][1:])):  # continues in another shard
            pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + size)
        else:
            pieces.append((span.document, before, size))
    documents = [made.tokens[document][at : at + size] for document, at, size in pieces]
    losses = made.loss or [np.ones(len(each)) for each in made.tokens]
    loss = [losses[document][at : at + size] for document, at, size in pieces]
    segments = [np.full(size, number) for number, (_, _, size) in enumerate(pieces, 1)]
    positions = [np.arange(size) for _, _, size in pieces]

    def filled(parts: list[np.ndarray], dtype: npt.DTypeLike) -> np.ndarray:
        found = np.concatenate(parts)
        return np.pad(found, (0, layout.sequence_length - len(found)), constant_values=PAD).astype(dtype)

    arrays = {"tokens": filled(documents, made.corpus.dtype), "loss_mask": filled(loss, np.float32) != 0}
    arrays |= {"segment_ids": filled(segments, np.int32), "positions": filled(positions, np.int32)}
    return pieces, arrays | ({"loss_weights": filled(loss, np.float32)} if made.corpus.has_weights else {})
