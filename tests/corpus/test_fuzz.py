"""Damaged headers of arrays and of Megatron's indexes, and mixes of any text: a GrainSftError, or the right values.

The other files of a corpus are damaged in tests/hardening/test_mutants.py.
"""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from batches import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_files import write_megatron
from mutators import changed_bytes
from sft_files import npy_bytes

from grain_sft import GrainSftError, NpyDataSource, WindowLayout, open_corpus

SETTINGS = settings(max_examples=examples(400), deadline=None, derandomize=True, database=None)

Randoms = st.integers(0, 1 << 64).map(random.Random)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def opened(path, data):
    """The corpus of a file with this data; None where it is refused with an error that names it."""
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's parser, on odd literals
        try:
            return open_corpus([path])
        except GrainSftError as error:
            assert str(path) in str(error)
            return None


descriptions = st.one_of(
    st.sampled_from(["<u4", "<u2", "|u1", "<u8", ">u4", "|O", "<f4", "|b1", "u4,u4", "(2,)u4", "O", "M8", "V", ""]),
    st.text("<>|=uifbOSUVMm0123456789(),[]:' ", max_size=8),
    st.none() | st.integers() | st.lists(st.tuples(st.text(max_size=2), st.sampled_from(["<u4", "<u2"])), max_size=2),
    st.dictionaries(st.sampled_from(["names", "formats", "offsets", "itemsize"]), st.lists(st.integers()), max_size=3),
    st.tuples(st.sampled_from(["<u4", "<u2"]), st.integers(-3, 3) | st.tuples(st.integers(-3, 3))),
)
shapes = st.one_of(
    st.tuples(st.integers(-5, 60)),
    st.lists(st.integers(-5, 60), max_size=3).map(tuple),
    st.integers() | st.none() | st.text(max_size=3) | st.lists(st.floats(), max_size=1),
    st.tuples(st.integers(1 << 60, 1 << 70)),
)


@SETTINGS
@given(descr=descriptions, shape=shapes, size=st.integers(0, 40))
def test_any_dtype_and_shape_in_a_header_is_right_or_an_error(folder, descr, shape, size):
    header, data = {"descr": descr, "fortran_order": False, "shape": shape}, bytes(range(size))
    corpus = opened(folder / "header.npy", npy_bytes(repr(header).encode(), data))
    if corpus is not None:
        expected = np.frombuffer(data, np.dtype(descr))
        assert shape in ((corpus.num_tokens,), [corpus.num_tokens])
        assert (corpus.dtype, corpus.num_tokens) == (expected.dtype, len(expected))


@SETTINGS
@given(draw=Randoms, dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]))
def test_a_mutated_megatron_index_gives_the_same_rows_or_an_error(folder, draw, dtype):
    docs = [[[*range(first, first + 9)], [], [first]] for first in range(12)] + [[[]]]
    whole = Path(write_megatron(folder / "whole", docs, dtype))
    data = whole.with_suffix(".idx").read_bytes()
    mutated = changed_bytes(data, draw)
    shutil.copy(whole.with_suffix(".bin"), folder / "mutant.bin")
    (folder / "mutant.idx").write_bytes(mutated)
    split = draw.choice((None, "3,1"))
    expected = open_corpus(whole, split=split)
    try:
        found = open_corpus(folder / "mutant", split=split)
        rows = NpyDataSource(WindowLayout(found, 10)).read(range(9))
        sequences = found.sequences
    except GrainSftError as error:
        assert str(folder / "mutant") in str(error)
        return
    np.testing.assert_array_equal(rows["tokens"], NpyDataSource(WindowLayout(expected, 10)).read(range(9))["tokens"])
    np.testing.assert_array_equal(np.stack([*sequences]), np.stack([*expected.sequences]))
    if mutated[-8 * 14 :] == data[-8 * 14 :]:  # else entries of the document index may still ascend
        np.testing.assert_array_equal(np.stack([*found.documents]), np.stack([*expected.documents]))


@SETTINGS
@given(text=st.text(st.characters(codec="utf-8"), max_size=80))
def test_any_text_as_a_mix_is_an_error(folder, text):
    path = folder / "mix.txt"
    path.write_text(text, newline="")
    with pytest.raises(GrainSftError):
        open_corpus(path, format="mix", path_remap={"": "/nowhere/"})
