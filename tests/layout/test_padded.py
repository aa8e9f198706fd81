"""PaddedLayout makes one row of each document, cut or padded to the length of a row."""

import tempfile
from pathlib import Path

import pytest
from batches import assert_same, examples
from document_corpora import make, row_of_spans
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import NpyDataSource, PaddedLayout
from grain_sft.errors import LayoutError


@settings(max_examples=examples(80), deadline=None)
@given(
    kind=st.sampled_from(["plain", "parts", "episodes"]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    part=st.integers(1, 30),
    outside=st.sampled_from([0, 3]),
    length=st.integers(1, 30),
    keep=st.sampled_from(["last", "first"]),
    least=st.integers(1, 5),
)
def test_rows_are_the_documents_that_are_long_enough_in_order(kind, lengths, part, outside, length, keep, least):
    with tempfile.TemporaryDirectory() as temp:
        made = make(kind, Path(temp), lengths, part=part, outside=outside)
        kept = [number for number, size in enumerate(lengths) if size >= least]
        if not kept:
            with pytest.raises(LayoutError, match=f"no document of {len(lengths)} has {least} tokens or more"):
                PaddedLayout(made.corpus, length, keep=keep, min_tokens=least)
            return
        layout = PaddedLayout(made.corpus, length, keep=keep, min_tokens=least)
        assert (len(layout), layout.dropped) == (len(kept), len(lengths) - len(kept))
        assert layout.cut_tokens == sum(max(0, lengths[number] - length) for number in kept)
        assert layout.left_out()[0][1] == sum(lengths[number] > length for number in kept)
        rows = NpyDataSource(layout).read(range(len(layout)))
        for row, number in enumerate(kept):
            size = min(lengths[number], length)
            pieces, expected = row_of_spans(made, layout, row)
            assert pieces == [(number, lengths[number] - size if keep == "last" else 0, size)]
            assert_same({key: array[row] for key, array in rows.items()}, expected)
            assert_same(NpyDataSource(layout)[row], expected)
