"""Checks of the whole content of a corpus: documents, loss files, and stored rows. They read in blocks."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.layout import MaterializedLayout
from grain_sft.source import NpyDataSource
from grain_sft.storage import ShardReader
from grain_sft.transforms import ShiftTargets
from grain_sft.types import Ints
from grain_sft.verify.finding import Report

Hashes = npt.NDArray[np.uint64]

BLOCK_TOKENS = 1 << 20  # tokens read at a time


class ScannedDocuments(NamedTuple):
    """Facts about each document, as arrays [documents]; 0 for an empty document."""

    first: Ints  # id of the first token
    last: Ints  # id of the last token
    trainable: Ints  # number of tokens that take loss
    hash: Hashes  # 64-bit hash of the tokens


def scan_documents(corpus: Corpus, check: Callable[[int, npt.NDArray[np.unsignedinteger]], None]) -> ScannedDocuments:
    """Read all tokens and their loss once, and return facts about each document.

    Documents may overlap, come in any order and be longer than a block.

    Args:
      check: Function that is called for each block. Its arguments are the first token's offset in the corpus, and the tokens.
    """
    start, length = corpus.documents
    order = corpus.documents.by_start()  # numbers of all documents that are not empty, in order of their first tokens
    starts, stop = start[order], start + length
    first, last, trainable = (np.zeros(len(start), np.int64) for _ in range(3))
    hashes = np.zeros(len(start), np.uint64)
    unfinished: dict[int, Any] = {}  # hash so far of each document that continues in the next block, by document number
    for begin in range(0, corpus.num_tokens, BLOCK_TOKENS):
        end = min(begin + BLOCK_TOKENS, corpus.num_tokens)
        tokens, loss = corpus.read(begin, end)
        check(begin, tokens)
        # the documents with tokens in this block: those that began in an earlier block, then those that begin here
        first_starting, stop_starting = starts.searchsorted((begin, end)).tolist()
        in_block = np.append(np.array(list(unfinished), np.int64), order[first_starting:stop_starting])
        # document in_block[i] has the tokens block_start[i] to block_stop[i] - 1 of the block
        block_start = np.maximum(start[in_block] - begin, 0)
        block_stop = np.minimum(stop[in_block] - begin, end - begin)
        starts_here, stops_here = start[in_block] >= begin, stop[in_block] <= end
        first[in_block[starts_here]] = tokens[block_start[starts_here]]
        last[in_block[stops_here]] = tokens[block_stop[stops_here] - 1]
        # number of trainable tokens before each token of the block; without loss files, all are trainable
        totals = np.arange(len(tokens) + 1) if loss is None else np.append(0, np.cumsum(loss != 0, dtype=np.int64))
        trainable[in_block] += totals[block_stop] - totals[block_start]
        data = tokens.data.cast("B")
        columns = (in_block, block_start * tokens.itemsize, block_stop * tokens.itemsize, stops_here)
        for number, first_byte, end_byte, is_finished in zip(*(column.tolist() for column in columns), strict=True):
            digest = unfinished.pop(number, None) or hashlib.blake2b(digest_size=8)
            digest.update(data[first_byte:end_byte])
            if is_finished:
                hashes[number] = int.from_bytes(digest.digest(), "little")
            else:
                unfinished[number] = digest
    return ScannedDocuments(first, last, trainable, hashes)


class Duplicates(NamedTuple):
    """Counts of duplicate documents. Two or more documents with the same tokens are a group."""

    documents: int  # all but one of each group
    groups: int
    tokens: int  # tokens in the `documents`
    first: tuple[int, int] | None  # first two documents of the group with the lowest document number


def find_duplicates(hashes: Hashes, length: Ints) -> Duplicates:
    """Return counts of the documents whose hashes and lengths are equal. Empty documents are ignored."""
    nonempty = np.flatnonzero(length > 0)
    order = nonempty[np.lexsort((nonempty, length[nonempty], hashes[nonempty]))]
    is_repeat = np.zeros(len(order), np.bool_)  # whether document `order[i]` has the tokens of document `order[i - 1]`
    is_repeat[1:] = (hashes[order[1:]] == hashes[order[:-1]]) & (length[order[1:]] == length[order[:-1]])
    repeats = np.flatnonzero(is_repeat)  # indices in `order`
    seconds = repeats[~is_repeat[repeats - 1]]  # indices in `order` of each group's second document
    first = None
    if len(seconds):
        second = seconds[order[seconds - 1].argmin()]  # `order[seconds - 1]` are the first documents of the groups
        first = int(order[second - 1]), int(order[second])
    return Duplicates(len(repeats), len(seconds), int(length[order[repeats]].sum()), first)


def check_loss_values(report: Report, corpus: Corpus) -> None:
    """Report the first invalid value of each loss file, such as a 2 in a mask."""
    for shard, first in zip(corpus.shards, corpus.shard_borders.tolist(), strict=False):  # the last border is an end
        if shard.loss is None:  # the shard has no loss file
            continue
        path, encoding = shard.loss.path, shard.loss.encoding
        with report.errors("loss", path):
            reader = ShardReader((shard.loss,), encoding.dtype.itemsize, max_open_files=2, remote=corpus.remote)
            for begin in range(0, shard.num_tokens, BLOCK_TOKENS):
                values = np.empty(min(BLOCK_TOKENS, shard.num_tokens - begin), encoding.dtype)
                reader.gather([0], [begin], [0], [values.nbytes], values.data.cast("B"))
                tokens = corpus.read(first + begin, first + begin + len(values))[0] if encoding.needs_tokens else values
                wrong = np.flatnonzero(encoding.find_invalid(values, tokens))
                if len(wrong):
                    sentence = f"holds {values[wrong[0]]}; expected {encoding.expected}. Write the file again."
                    report.wrong("loss", path, sentence, f"token {begin + wrong[0]}")
                    break


def check_written_rows(report: Report, corpus: Corpus) -> None:
    """Check that the stored positions, segments and targets of each row follow from its documents and its loss."""
    with report.errors("rows", corpus.shards[0].path):
        layout, by_documents = MaterializedLayout(corpus), MaterializedLayout(corpus)
        by_documents.row_format = None  # so the arrays are computed from boundary files and loss files
        stored, computed = NpyDataSource(layout), NpyDataSource(by_documents)
        length = layout.sequence_length
        step = max(1, BLOCK_TOKENS // length)
        for begin in range(0, len(layout), step):
            rows = np.arange(begin, min(begin + step, len(layout)))
            found, expected, read = stored.read(rows), computed.read(rows), stored.read_rows(rows)
            compared = {name: (found[name], expected[name]) for name in ("segment_ids", "positions")}
            if read is not None:  # None if tokens may exceed int32
                targets = ShiftTargets().map(expected)["targets_segmentation"]
                compared["target_segment_ids"] = read.target_segment_ids, targets
            for name, (array, expected_array) in compared.items():
                wrong = np.flatnonzero((array != expected_array).any(axis=1))
                if len(wrong):
                    row = begin + int(wrong[0])
                    path = corpus.shards[int(corpus.shard_borders.searchsorted(row * length, side="right")) - 1].path
                    sentence = "differs from what documents and loss give. Write the rows again. Later rows are not checked."
                    report.wrong("rows", path, f"{name} {sentence}", f"row {row}")
                    return
        report.figures["rows"] = len(layout)
