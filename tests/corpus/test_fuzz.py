"""Damaged files, at random: a GrainSftError, or the right values; never anything else."""

from __future__ import annotations

import io
import json
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_files import write_megatron
from mutators import change_json, changed_bytes
from sft_files import EOS, documents, write_episodes, write_olmo, write_openchat, write_primer

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


def npy_bytes(header: bytes, data: bytes, version: int = 1) -> bytes:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + length + header + data


@SETTINGS
@given(draw=Randoms, dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]))
def test_a_mutated_npy_file_is_what_numpy_reads_or_an_error(folder, draw, dtype):
    stream = io.BytesIO()
    np.save(stream, np.arange(40).astype(dtype))
    data = changed_bytes(stream.getvalue(), draw, draw.randint(1, 6), reach=128)
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
    """Corpora by the name of their index: of two files with masks and boundaries, of two without, and of Megatron's splits."""
    write_olmo(folder / "sft", documents(40), part_tokens=400, sources=True)
    np.arange(100, dtype=np.uint16).tofile(folder / "x.npy")
    np.save(folder / "y.npy", np.arange(30, dtype=np.uint16))
    sft = open_corpus(folder / "sft", eos_token_id=EOS)
    plain = open_corpus([folder / "x.npy", folder / "y.npy"], dtype="uint16")
    sft.save(folder / "grain.json")
    plain.save(folder / "maxtext.json", format="maxtext", sequence_length=10, tokenizer="some/tokenizer")
    prefixes = [write_megatron(folder / name, [[tokens.tolist()] for tokens, _ in documents(40)]) for name in "pq"]
    split = open_corpus(prefixes, split="2,3", subset="valid", eos_token_id=EOS)
    split.save(folder / "megatron.json")
    return {"grain.json": sft, "maxtext.json": plain, "megatron.json": split}


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
@given(draw=Randoms, name=st.sampled_from(["grain.json", "maxtext.json", "megatron.json"]))
def test_a_mutated_index_is_right_or_an_error(folder, index, draw, name):
    is_right_or_an_error(folder / "mutated.json", changed_bytes((folder / name).read_bytes(), draw), index[name])


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["uint16", "1", 1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "a"]), inner, max_size=2),
    max_leaves=4,
)


@SETTINGS
@given(draw=Randoms, name=st.sampled_from(["grain.json", "maxtext.json", "megatron.json"]), value=json_values)
def test_an_index_with_any_value_for_a_field_is_right_or_an_error(folder, index, draw, name, value):
    stored = json.loads((folder / name).read_text())
    change_json(stored, draw, [value])
    is_right_or_an_error(folder / "changed.json", json.dumps(stored).encode(), index[name])


@SETTINGS
@given(text=st.text(st.characters(codec="utf-8"), max_size=80))
def test_any_text_as_a_mix_is_an_error(folder, text):
    path = folder / "mix.txt"
    path.write_text(text, newline="")
    with pytest.raises(GrainSftError):
        open_corpus(path, format="mix", path_remap={"": "/nowhere/"})


EVERY_FORMAT = pytest.mark.parametrize("name", ["olmo", "episodes", "primer", "openchat"])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A whole corpus of every format."""
    root = tmp_path_factory.mktemp("whole")
    docs, weighted = documents(12), documents(12, weights=True)
    write_olmo(root / "olmo", docs, part_tokens=60, sources=True)
    write_episodes(root / "episodes", weighted, shards=2)
    write_primer(root / "primer", docs, sources=True)
    write_openchat(root / "openchat", weighted, sources=True)
    tokenizer = {"eos_token_id": EOS, "pad_token_id": 0, "sha256": "abc"}
    prepare = {"tokenizer": tokenizer, "inputs": [{"path": "a.jsonl"}], "splits": {"train": {}}}
    written = {f"{name}/prepare.json": prepare for name in ("olmo", "episodes", "primer", "openchat")}
    written["olmo/dataset_statistics.json"] = {"configuration": {"token_dtype": "uint16"}}
    eos = {"content": "<e>"}
    written["olmo/tokenizer/tokenizer_config.json"] = {"eos_token": eos, "added_tokens_decoder": {str(EOS): eos}}
    (root / "olmo" / "tokenizer").mkdir()
    for name, data in written.items():
        (root / name).write_text(json.dumps(data))
    return root


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def use(path):
    """Open and read everything, in every way; return whether nothing was refused."""
    try:
        corpus = open_corpus(path)
        found = list(corpus.iter_documents())
        assert len(found) == corpus.num_documents == len(corpus.documents)
        for number, document in enumerate(found):
            assert len(document.tokens) == len(document.loss) == corpus.documents.length[number]
            np.testing.assert_array_equal(corpus.document(number).tokens, document.tokens)
        assert corpus.sources is None or corpus.sources.shape == (len(found), 2)
        batch = NpyDataSource(WindowLayout(corpus, 4)).read([0, -1])
        assert batch["loss_mask"].dtype == np.bool_ and batch["loss_mask"].shape == (2, 4)
        assert np.isfinite(batch.get("loss_weights", 0)).all()
        corpus.save(path / "saved-index")
        assert open_corpus(path / "saved-index", format="index") == corpus
    except GrainSftError as error:
        assert str(path) in str(error) or "leaves no row" in str(error) or "a token id of" in str(error)
        return False
    return True


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@EVERY_FORMAT
def test_a_mutated_file_is_an_error_or_read(corpora, name, tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("mutated") / name, files_of(corpora / name)
    assert use(shutil.copytree(corpora / name, folder))

    @SETTINGS
    @given(path=st.sampled_from(whole), draw=Randoms)
    def check(path, draw):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(corpora / name, folder)
        (folder / path).write_bytes(changed_bytes((folder / path).read_bytes(), draw))
        use(folder)

    check()


@EVERY_FORMAT
@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "random"])
def test_a_missing_or_emptied_file_is_an_error_or_read(corpora, name, kind, tmp_path):
    for number, path in enumerate(files_of(corpora / name)):
        folder = shutil.copytree(corpora / name, tmp_path / str(number))
        (folder / path).unlink()
        if kind == "folder":
            (folder / path).mkdir()
        elif kind != "missing":
            (folder / path).write_bytes(b"" if kind == "empty" else np.random.default_rng(number).bytes(1000))
        use(folder)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("olmo", "prepare.json"),
        ("olmo", "dataset_statistics.json"),
        ("olmo", "tokenizer/tokenizer_config.json"),
        ("episodes", "dataset_metadata.json"),
        ("primer", "meta.json"),
    ],
)
def test_metadata_with_any_value_is_an_error_or_read(corpora, name, file, tmp_path_factory):
    folder = shutil.copytree(corpora / name, tmp_path_factory.mktemp(name) / name)
    path = folder / file
    if file != "prepare.json":
        (folder / "prepare.json").unlink()
    whole = path.read_text()

    @SETTINGS
    @given(draw=Randoms, value=json_values)
    def check(draw, value):
        data = json.loads(whole)
        change_json(data, draw, [value])
        path.write_text(json.dumps(value if draw.random() < 0.1 else data))
        use(folder)

    check()
