"""`WindowLayout` cuts each shard into rows of consecutive tokens, and leaves out the tokens at its end that fill no row."""

import dataclasses
import os

import numpy as np
import pytest
from batches import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_sft
from grain_sft.corpus import Corpus, Shard
from grain_sft.errors import LayoutError
from grain_sft.layout import Span, WindowLayout


def corpus_of(counts: list[int]) -> Corpus:
    """Return a corpus whose shards have `counts` tokens. The files do not exist."""
    shards = [Shard(f"/nowhere/{number}", 4 * count, "", num_tokens=count) for number, count in enumerate(counts)]
    return Corpus(tuple(shards), np.dtype(np.uint32))


def naive_spans(counts: list[int], length: int) -> list[Span]:
    starts = ((shard, start) for shard, count in enumerate(counts) for start in range(0, count - length + 1, length))
    return [Span(shard, start, start + length, None) for shard, start in starts]


@settings(max_examples=examples(200), derandomize=True, database=None)
@given(counts=st.lists(st.integers(0, 40), max_size=12), length=st.integers(1, 20), data=st.data())
def test_spans_and_pieces_equal_naive_spans(counts, length, data):
    expected = naive_spans(counts, length)
    if not expected:
        with pytest.raises(LayoutError, match="leaves no row"):
            WindowLayout(corpus_of(counts), length)
        return
    layout = WindowLayout(corpus_of(counts), length)
    assert [layout.spans(row) for row in range(len(layout))] == [[span] for span in expected]
    rows = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20))
    pieces = layout.pieces(np.array(rows, np.int64))
    assert pieces.segment is pieces.position is None  # every row is one whole segment
    spans = [expected[row] for row in rows]
    found = list(zip(*(column.tolist() for column in pieces[:5]), strict=True))
    assert found == [(index, 0, span.shard, span.start, length) for index, span in enumerate(spans)]


@settings(max_examples=examples(100))
@given(data=st.data())
def test_rows_of_documents_returns_each_row_that_holds_a_token_of_a_document(data):
    counts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(sum))
    length = data.draw(st.integers(1, max(counts)))
    borders = sorted(data.draw(st.sets(st.integers(1, sum(counts)), max_size=8)) | {0, sum(counts)})
    corpus = corpus_of(counts)
    # The documents are set here, because the files do not exist. Document n has the tokens borders[n] to borders[n + 1] - 1.
    vars(corpus)["documents"] = grain_sft.corpus.Documents(np.array(borders[:-1]), np.diff(borders))
    numbers = data.draw(st.lists(st.integers(0, len(borders) - 2), max_size=4, unique=True))
    tokens = {token for number in numbers for token in range(borders[number], borders[number + 1])}
    begins = [corpus.shard_borders[span.shard] + span.start for span in naive_spans(counts, length)]
    expected = [row for row, begin in enumerate(begins) if tokens & set(range(begin, begin + length))]
    assert WindowLayout(corpus, length).rows_of_documents(np.array(numbers, np.int64)).tolist() == expected


def test_rows_and_tokens_beyond_32_bits_are_found():
    counts = [5_000_000_000, 7, 9_000_000_123, 1 << 43]
    layout = WindowLayout(corpus_of(counts), 1)
    assert len(layout) == layout.corpus.num_tokens == sum(counts)
    firsts = np.cumsum([0, *counts]).tolist()
    for shard, start in ((0, 4_999_999_999), (1, 0), (2, 0), (2, 9_000_000_122), (3, (1 << 43) - 1)):
        assert layout.spans(firsts[shard] + start) == [Span(shard, start, start + 1, None)]


@pytest.mark.parametrize(("dtype", "tokens"), [("uint8", 5 << 30), ("uint32", 5 * 10**9 + 3), ("uint64", 7 * 10**8)])
def test_tokens_far_into_a_huge_file_are_read(tmp_path, dtype, tokens):
    length, path, size = 8192, tmp_path / "huge.npy", np.dtype(dtype).itemsize
    last = tokens // length - 1
    rows = sorted({row for row in (0, 1, 65_535, (1 << 31) // length, (1 << 32) // length, last) if row <= last})
    try:
        written = np.memmap(path, dtype, "w+", shape=tokens)
    except OSError as error:
        pytest.skip(f"this disk can't hold a file of {tokens * size} bytes: {error}")
    if os.stat(path).st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no sparse files")
    for row in rows:
        written[row * length : row * length + 3] = row % 251, 7, 8
        written[(row + 1) * length - 1] = row % 241
    layout = WindowLayout(grain_sft.open_corpus(path, dtype=dtype), length)
    assert len(layout) == tokens // length
    found = grain_sft.NpyDataSource(layout).read(rows)["tokens"]
    for row, array in zip(rows, found, strict=True):
        assert array[[0, 1, 2, -1]].tolist() == [row % 251, 7, 8, row % 241]
        assert not array[3:-1].any()
    assert layout.spans(last) == [Span(0, last * length, (last + 1) * length, None)]


def test_arguments_may_be_numpy_integers_and_spans_have_python_integers():
    layout = WindowLayout(corpus_of([12]), np.int32(4))
    assert layout.sequence_length == 4 and type(layout.sequence_length) is int
    (span,) = layout.spans(np.int64(2))
    assert dataclasses.astuple(span) == (0, 8, 12, None) and hash(span) == hash(Span(0, 8, 12, None))
    assert all(type(value) is int for value in dataclasses.astuple(span)[:3])


def test_windows_fill_whole_rows_of_max_target_sequence_length():
    """3 * 1024 tokens fill only one row of 2048 tokens, which holds two windows of 1024 tokens."""
    corpus = corpus_of([3 * 1024])
    layout = WindowLayout(corpus, 1024, max_target_sequence_length=2048)
    assert len(layout) == 2 and layout.left_out() == [("ends of 1 files, shorter than a window", None, 1024)]
    for longest, problem in ((4096, "leaves no row"), (2**31, "positions are int32"), (0, "expected an integer")):
        with pytest.raises(LayoutError, match=f"^max_target_sequence_length={longest}:? {problem}"):
            WindowLayout(corpus, 1024, max_target_sequence_length=longest)
