"""Parts of a full check, in bounded memory: the tokens of each document, loss files, and rows that were written out."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, Shard
from grain_sft.layout import MaterializedLayout
from grain_sft.source import NpyDataSource
from grain_sft.storage import ShardReader
from grain_sft.transforms import ShiftTargets
from grain_sft.verify.finding import Report

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]

BLOCK_TOKENS = 1 << 20  # read at once


class ScannedDocuments(NamedTuple):
    """First and last token, number of trainable tokens, and hash of each document, [documents]; zeros for an empty one.

    Two documents with different tokens have equal hashes once in 2**64 times.
    """

    first: Ints
    last: Ints
    trainable: Ints
    hash: Hashes


def scan_documents(corpus: Corpus, check: Callable[[int, npt.NDArray[np.unsignedinteger]], None]) -> ScannedDocuments:
    """Read all tokens and their loss once, and call `check` with the number of the first token and the tokens of each block.

    Documents may overlap, come in any order and be longer than a block.
    """
    start, length = corpus.documents
    order = corpus.documents.by_start()
    starts, stop = start[order], start + length
    first, last, trainable = (np.zeros(len(start), np.int64) for _ in range(3))
    hashes = np.zeros(len(start), np.uint64)
    begun: dict[int, Any] = {}  # hash of each document that continues in the next block
    for begin in range(0, corpus.num_tokens, BLOCK_TOKENS):
        end = min(begin + BLOCK_TOKENS, corpus.num_tokens)
        tokens, loss = corpus.read(begin, end)
        check(begin, tokens)
        here = np.append(np.array(list(begun), np.int64), order[slice(*starts.searchsorted((begin, end)).tolist())])
        from_, to = np.maximum(start[here] - begin, 0), np.minimum(stop[here] - begin, end - begin)
        new, done = start[here] >= begin, stop[here] <= end
        first[here[new]], last[here[done]] = tokens[from_[new]], tokens[to[done] - 1]
        taken = np.arange(len(tokens) + 1) if loss is None else np.append(0, np.cumsum(loss != 0, dtype=np.int64))
        trainable[here] += taken[to] - taken[from_]
        data = tokens.data.cast("B")
        columns = (here, from_ * tokens.itemsize, to * tokens.itemsize, done)
        for number, first_byte, end_byte, complete in zip(*(column.tolist() for column in columns), strict=True):
            digest = begun.pop(number, None) or hashlib.blake2b(digest_size=8)
            digest.update(data[first_byte:end_byte])
            if complete:
                hashes[number] = int.from_bytes(digest.digest(), "little")
            else:
                begun[number] = digest
    return ScannedDocuments(first, last, trainable, hashes)


class Duplicates(NamedTuple):
    """Groups of documents with the same tokens.

    `documents` is the number of documents that could be left out, all but one of each group, and `tokens` that of their tokens.
    `first` has the two lowest numbers of the group that begins first.
    """

    documents: int
    groups: int
    tokens: int
    first: tuple[int, int] | None


def find_duplicates(hashes: Hashes, length: Ints) -> Duplicates:
    """Return the documents with equal hashes and lengths; empty documents do not count."""
    some = np.flatnonzero(length > 0)
    order = some[np.lexsort((some, length[some], hashes[some]))]
    equal = (hashes[order[1:]] == hashes[order[:-1]]) & (length[order[1:]] == length[order[:-1]])
    more = np.flatnonzero(equal) + 1
    seconds = more[~np.insert(equal, 0, False)[more - 1]]  # of each group
    first = None
    if len(seconds):
        at = seconds[order[seconds - 1].argmin()]
        first = int(order[at - 1]), int(order[at])
    return Duplicates(len(more), len(seconds), int(length[order[more]].sum()), first)


def check_loss_values(report: Report, corpus: Corpus) -> None:
    """Check each value of the loss files by its kind, such as 0 or 1, and report the first wrong one of each file."""
    for shard in corpus.shards:
        if shard.loss is None:
            continue
        with report.errors("loss", shard.loss.path):
            for begin, values, tokens in _loss_blocks(corpus, shard):
                wrong = np.flatnonzero(shard.loss.values.wrong(values, tokens))
                if len(wrong):
                    at = int(wrong[0])
                    sentence = f"holds {values[at]}; expected {shard.loss.values.expected}."
                    report.wrong("loss", shard.loss.path, sentence, f"token {begin + at}")
                    break


def _loss_blocks(corpus: Corpus, shard: Shard) -> Iterator[tuple[int, Array, Array]]:
    """Yield blocks of a shard's loss: number of the first token, values, and tokens (empty unless the values are labels)."""
    assert shard.loss is not None
    kind = shard.loss.values
    of_loss = ShardReader((shard.loss,), kind.dtype.itemsize, 2, remote=corpus.remote)
    of_tokens = ShardReader((shard,), corpus.dtype.itemsize, 2, remote=corpus.remote)
    for begin in range(0, shard.num_tokens, BLOCK_TOKENS):
        count = min(BLOCK_TOKENS, shard.num_tokens - begin)
        values, tokens = np.empty(count, kind.dtype), np.empty(count if kind.follow_tokens else 0, corpus.dtype)
        of_loss.gather([0], [begin], [0], [values.nbytes], values.data.cast("B"))
        if len(tokens):
            of_tokens.gather([0], [begin], [0], [tokens.nbytes], tokens.data.cast("B"))
        yield begin, values, tokens


def check_written_rows(report: Report, corpus: Corpus) -> None:
    """Check that the stored positions, segments and targets of every row are those of its documents and its loss."""
    with report.errors("rows", corpus.shards[0].path):
        layout = MaterializedLayout(corpus)
        source, length = NpyDataSource(layout), layout.sequence_length
        per_shard = np.cumsum([shard.num_tokens // length for shard in corpus.shards])
        step = max(1, BLOCK_TOKENS // length)
        for begin in range(0, len(layout), step):
            rows = np.arange(begin, min(begin + step, len(layout)))
            for name, (stored, expected) in _stored_and_expected(layout, source, rows).items():
                wrong = np.flatnonzero((stored != expected).any(axis=1))
                if len(wrong):
                    row = begin + int(wrong[0])
                    path = corpus.shards[int(np.searchsorted(per_shard, row, side="right"))].path
                    sentence = "rows from here on are not those of their documents and their loss."
                    report.wrong("rows", path, f"{name} of {len(wrong):,} {sentence}", f"row {row}")
                    return
        report.figures["rows"] = len(layout)


def _stored_and_expected(
    layout: MaterializedLayout, source: NpyDataSource, rows: Ints
) -> dict[str, tuple[Array, Array]]:
    """Return arrays [rows, L], by name: as stored, and as derived from the boundary files and the loss."""
    element, read = source.read(rows), source.read_rows(rows)
    pieces, length = layout.pieces(rows), layout.sequence_length
    segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    assert pieces.segment is not None and pieces.position is not None
    columns = np.repeat(pieces.row * length + pieces.column, pieces.length)
    within = np.arange(len(columns)) - np.repeat(np.cumsum(pieces.length) - pieces.length, pieces.length)
    segments.reshape(-1)[columns + within] = np.repeat(pieces.segment, pieces.length)
    positions.reshape(-1)[columns + within] = np.repeat(pieces.position, pieces.length) + within
    compared = {"segment_ids": (element["segment_ids"], segments), "positions": (element["positions"], positions)}
    if read is not None and read.target_segment_ids is not None:
        compared["target_segment_ids"] = read.target_segment_ids, ShiftTargets().map(element)["targets_segmentation"]
    return compared
