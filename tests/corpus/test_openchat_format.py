"""OpenChat's Parquet files are unpacked to the cache once, and open as a corpus.

Next to each token, a Parquet file has the weight of the following token. In the corpus, each token has its own weight.
The weights of the first tokens of documents are in another file, `*.first_weights.bin`.
"""

import json
import os
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
import sft_files as sft

from grain_sft import NpyDataSource, WindowLayout, open_corpus


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A function that returns the folders of unpacked files in the cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(folder))
    return lambda: [path for path in folder.glob("openchat/*") if path.is_dir() and any(path.iterdir())]


def test_both_splits_are_opened_by_each_of_their_names(tmp_path, cache):
    train, val = sft.documents(weights=True), sft.documents(7, 1, weights=True)
    sft.write_openchat(tmp_path, train, sources=True)
    sft.write_openchat(tmp_path, val, split="eval")
    (tmp_path / "prepare.json").write_text(json.dumps({"tokenizer": {"eos_token_id": sft.EOS}}))
    for place in (tmp_path, tmp_path / "openchat.train.parquet"):
        corpus = open_corpus(place)
        assert corpus.has_loss and corpus.has_weights
        assert (corpus.dtype, corpus.eos_token_id) == (np.uint32, sft.EOS)
        sft.assert_documents(corpus, train, sources=True)
    sft.assert_documents(open_corpus(tmp_path / "openchat", format="openchat"), train, sources=True)
    for place in ("val", "eval", "openchat.eval.parquet"):
        sft.assert_documents(open_corpus(tmp_path / place), val)
    tokens, loss = sft.joined(train)
    rows = len(tokens) // 8
    batch = NpyDataSource(WindowLayout(corpus, 8)).read(range(rows))
    np.testing.assert_array_equal(batch["loss_weights"], loss[: rows * 8].reshape(-1, 8))
    assert len(cache()) == 2


def test_a_file_is_unpacked_once_and_again_when_it_changes(tmp_path, cache):
    docs = sft.documents(weights=True)
    sft.write_openchat(tmp_path, docs)
    open_corpus(tmp_path)
    (folder,) = cache()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    corpus = open_corpus(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "tokens.bin").write_bytes(b"")
    assert open_corpus(tmp_path) == corpus
    assert [folder] == cache()
    sft.write_openchat(tmp_path, docs[:5])
    sft.assert_documents(open_corpus(tmp_path), docs[:5])
    shutil.rmtree(folder.parent)
    assert not cache()
    sft.assert_documents(open_corpus(tmp_path), docs[:5])


def test_a_root_must_contain_the_parquet_file_but_not_the_cache_of_its_arrays(tmp_path):
    docs = sft.documents(weights=True)
    folder = sft.write_openchat(tmp_path / "data", docs, sources=True)
    for _ in range(2):
        sft.assert_documents(open_corpus(folder, root=folder), docs, sources=True)
    (tmp_path / "link.train.parquet").symlink_to(folder / "openchat.train.parquet")
    (tmp_path / "other").mkdir()
    for where in (folder, tmp_path):
        assert "lies outside of" in sft.error_of(where, root=tmp_path / "other")


def test_a_file_and_its_sidecars_are_found_in_a_folder_that_cant_be_listed(tmp_path, monkeypatch):
    docs, listdir = sft.documents(weights=True), os.listdir
    sft.write_openchat(tmp_path, docs, sources=True)
    monkeypatch.setattr(os, "listdir", lambda path: [] if str(path) == str(tmp_path) else listdir(path))
    sft.assert_documents(open_corpus(tmp_path / "openchat.train.parquet"), docs, sources=True)


def test_each_sequence_of_a_row_is_a_document_and_without_first_weights_its_first_token_weighs_0(tmp_path):
    docs = sft.documents(30, weights=True)
    # Row n of the file has documents 2n and 2n + 1.
    pairs = {name: zip(values[::2], values[1::2], strict=True) for name, values in sft.openchat_columns(docs).items()}
    columns = {name: [one + other for one, other in values] for name, values in pairs.items()}
    sft.write_openchat(tmp_path / "weights", docs, columns=columns)
    sft.assert_documents(open_corpus(tmp_path / "weights"), docs)
    sft.write_openchat(tmp_path / "none", docs, first_weights=False)
    for _, loss in docs:
        loss[0] = 0
    sft.assert_documents(open_corpus(tmp_path / "none"), docs)


DOCS = sft.documents(30, weights=True)
# WRONG_ROWS change document 11.
NUM_TOKENS = len(DOCS[11][0])
ONES = [1.0] * (NUM_TOKENS - 1) + [0.0]
WRONG_ROWS = [
    ({"total_length": 3}, "total_length is 3, but nz_input_ids has the length"),
    ({"nz_shifted_loss_weights": [0.0]}, "nz_shifted_loss_weights has the length 1"),
    ({"seqlens": [2, 1]}, "seqlens add up to 3, but nz_input_ids has the length"),
    ({"seqlens": [-1, NUM_TOKENS + 1]}, "seqlens holds a negative length"),
    ({"nz_input_ids": [-1] * NUM_TOKENS, "nz_shifted_loss_weights": ONES}, "nz_input_ids holds a token id"),
    ({"nz_position_ids": list(range(NUM_TOKENS))[::-1]}, "nz_position_ids don't count from 0"),
    ({"nz_shifted_loss_weights": [1.0] * NUM_TOKENS}, "nz_shifted_loss_weights is not 0 at the last token"),
    ({"nz_shifted_loss_weights": [np.nan] * NUM_TOKENS}, "nz_shifted_loss_weights holds a weight that is negative"),
    ({"nz_shifted_label_ids": [9999] * NUM_TOKENS, "nz_shifted_loss_weights": ONES}, "a label of nz_shifted_label"),
    ({"nz_input_ids": None}, "column nz_input_ids lacks a value in some rows from 8 on"),
]


@pytest.mark.parametrize(("changes", "expected"), WRONG_ROWS)
def test_a_row_whose_columns_contradict_each_other_is_named(tmp_path, cache, changes, expected):
    columns = sft.openchat_columns(DOCS)
    for name, value in changes.items():
        columns[name][11] = value
    sft.write_openchat(tmp_path, DOCS, columns=columns)
    place = "" if expected.startswith("column") else "row 12: "  # rows are counted from 1
    assert f"{tmp_path}/openchat.train.parquet: {place}{expected}" in sft.error_of(tmp_path)
    assert not cache()


def test_a_file_that_yields_fewer_rows_than_it_states_is_refused(tmp_path, monkeypatch):
    sft.write_openchat(tmp_path, sft.documents(40), group=40)
    batches = pa.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", lambda *a, **b: (each[1:] for each in batches(*a, **b)))
    path = tmp_path / "openchat.train.parquet"
    assert sft.error_of(path) == f"{path}: 39 rows; expected 40. Copy the file again."


def test_columns_that_are_missing_or_of_another_type_are_named(tmp_path):
    docs = sft.documents(5, weights=True)
    columns = sft.openchat_columns(docs)
    for name in columns:
        sft.write_openchat(tmp_path, docs, columns={key: value for key, value in columns.items() if key != name})
        assert f"0 columns are named {name}; expected one each of total_length, " in sft.error_of(tmp_path)
    for name, expected in (
        ("nz_input_ids", "column nz_input_ids is string; expected lists"),
        ("total_length", "column total_length holds string; expected numbers"),
    ):
        pa.parquet.write_table(pa.table({**columns, name: ["a"] * 5}), tmp_path / "openchat.train.parquet")
        assert expected in sft.error_of(tmp_path)


def test_sidecar_files_that_dont_fit_are_named(tmp_path):
    docs = sft.documents(5, weights=True)
    sft.write_openchat(tmp_path, docs)
    path = tmp_path / "openchat.train.first_weights.bin"
    for data, expected in (
        (bytes(16), "4 weights, but"),
        (bytes(19), "is not a multiple of 4"),
        (np.full(5, np.inf, "f4").tobytes(), "holds inf; expected a finite weight"),
    ):
        path.write_bytes(data)
        assert expected in sft.error_of(tmp_path)
    path.unlink()
    (tmp_path / "openchat.train.sources.bin").write_bytes(bytes(81))
    assert "81 bytes; expected 80" in sft.error_of(tmp_path)
    sft.write_openchat(tmp_path, docs)
    other = tmp_path / "other.train.parquet"
    os.link(tmp_path / "openchat.train.parquet", other)
    assert "holds openchat.train.parquet and other.train.parquet" in sft.error_of(tmp_path)
    assert "states uint32 tokens, but dtype=uint16 was given" in sft.error_of(other, dtype="uint16")


def test_a_missing_pyarrow_and_a_cache_that_cant_be_written_are_named(tmp_path, monkeypatch):
    sft.write_openchat(tmp_path, sft.documents(5))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert "needs pyarrow, which is not installed. Run `pip install '.[parquet]'`" in sft.error_of(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "file"))
    assert "can't be written" in sft.error_of(tmp_path) and (tmp_path / "file").read_text() == ""
