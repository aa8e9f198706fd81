"""Damaged files, at random: a GrainSftError, or the right values; never anything else."""

from __future__ import annotations

import io
import json
import warnings

import numpy as np
import pytest
import sft_files
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import GrainSftError, NpyDataSource, WindowLayout, open_corpus

SETTINGS = settings(max_examples=examples(400), deadline=None, derandomize=True, database=None)

Mutations = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "cut"]), st.integers(0, 1 << 16), st.integers(0, 255)),
    min_size=1,
    max_size=6,
)


def mutate(data: bytes, mutations: list[tuple[str, int, int]], reach: int | None = None) -> bytes:
    """`data` with single bytes set, inserted or deleted within its first `reach` bytes, or its end cut off."""
    changed = bytearray(data)
    for kind, where, value in mutations:
        at = where % max(1, min(reach or len(changed), len(changed)))
        if kind == "set" and changed:
            changed[at] = value
        elif kind == "insert":
            changed.insert(at, value)
        elif kind == "delete" and changed:
            del changed[at]
        elif kind == "cut":
            del changed[-(value % 8 + 1) :]
    return bytes(changed)


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


def npy_bytes(header: bytes, data: bytes, version: int = 1) -> bytes:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + length + header + data


@SETTINGS
@given(mutations=Mutations, dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]))
def test_a_mutated_npy_file_is_what_numpy_reads_or_an_error(folder, mutations, dtype):
    stream = io.BytesIO()
    np.save(stream, np.arange(40).astype(dtype))
    data = mutate(stream.getvalue(), mutations, reach=128)
    corpus = opened(folder / "a.npy", data)
    if corpus is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        has_header = data.startswith(b"\x93NUMPY")
        expected = np.load(io.BytesIO(data)) if has_header else np.frombuffer(data, np.uint32)
    assert (corpus.num_tokens, corpus.dtype) == (len(expected), expected.dtype)
    if len(expected):
        source = NpyDataSource(WindowLayout(corpus, len(expected)))
        np.testing.assert_array_equal(source[0]["tokens"], expected)


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


@pytest.fixture(scope="module")
def index(folder):
    """Corpora by the name of their index: of two files with masks and boundaries, and of two files without."""
    sft_files.write_olmo(folder / "sft", sft_files.documents(40), part_tokens=400, sources=True)
    np.arange(100, dtype=np.uint16).tofile(folder / "x.npy")
    np.save(folder / "y.npy", np.arange(30, dtype=np.uint16))
    sft = open_corpus(folder / "sft", eos_token_id=sft_files.EOS)
    plain = open_corpus([folder / "x.npy", folder / "y.npy"], dtype="uint16")
    sft.save(folder / "grain.json")
    plain.save(folder / "maxtext.json", format="maxtext", sequence_length=10, tokenizer="some/tokenizer")
    return {"grain.json": sft, "maxtext.json": plain}


def is_right_or_an_error(path, data, corpus):
    """Opening `data` as an index: an error, or the corpus but for what does not decide its rows."""
    path.write_bytes(data)
    try:
        found = open_corpus(path)
        assert (found.dtype, found.num_tokens) == (corpus.dtype, corpus.num_tokens)
        rows, expected = (NpyDataSource(WindowLayout(each, 10)).read(range(13)) for each in (found, corpus))
        if corpus.has_boundary_files:
            np.testing.assert_array_equal(found.documents.start, corpus.documents.start)
        _ = found.sources
    except GrainSftError as error:
        assert str(path) in str(error) or str(path.parent) in str(error) or "no such file" in str(error)
        return
    for key, array in rows.items():
        np.testing.assert_array_equal(array, expected[key])


@SETTINGS
@given(mutations=Mutations, name=st.sampled_from(["grain.json", "maxtext.json"]))
def test_a_mutated_index_is_right_or_an_error(folder, index, mutations, name):
    is_right_or_an_error(folder / "mutated.json", mutate((folder / name).read_bytes(), mutations), index[name])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["uint16", "1", 1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "a"]), inner, max_size=2),
    max_leaves=4,
)


@SETTINGS
@given(data=st.data(), name=st.sampled_from(["grain.json", "maxtext.json"]), value=json_values)
def test_an_index_with_any_value_for_a_field_is_right_or_an_error(folder, index, data, name, value):
    stored = json.loads((folder / name).read_text())
    places = [(stored, key) for key in stored]
    for key in ("shards", "files"):
        entries = stored.get(key, [])
        entries = entries + [entry[kind] for entry in entries for kind in ("loss", "boundaries") if kind in entry]
        places += [(entry, field) for entry in entries for field in entry]
    where, key = data.draw(st.sampled_from(range(len(places))).map(places.__getitem__))
    if data.draw(st.booleans()):
        where[key] = value
    else:
        del where[key]
    is_right_or_an_error(folder / "changed.json", json.dumps(stored).encode(), index[name])


@SETTINGS
@given(text=st.text(st.characters(codec="utf-8"), max_size=80))
def test_any_text_as_a_mix_is_an_error(folder, text):
    path = folder / "mix.txt"
    path.write_text(text, newline="")
    with pytest.raises(GrainSftError):
        open_corpus(path, format="mix", path_remap={"": "/nowhere/"})
