"""OpenChat's Parquet files as a corpus: unpacked once, shifted back."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from sft_files import (
    EOS,
    assert_documents,
    documents,
    error_of,
    joined,
    openchat_columns,
    write_openchat,
    write_sources,
)

import grain_sft

pa = pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(folder))
    return folder / "openchat"


def test_both_splits_are_read_by_each_of_their_names(tmp_path, cache):
    train, val = documents(weights=True), documents(7, 1, weights=True)
    write_openchat(tmp_path, train, sources=True)
    write_openchat(tmp_path, val, split="eval")
    (tmp_path / "prepare.json").write_text(json.dumps({"tokenizer": {"eos_token_id": EOS}}))
    for place in (tmp_path, tmp_path / "openchat.train.parquet"):
        corpus = grain_sft.open_corpus(place)
        assert (corpus.dtype, corpus.has_loss, corpus.has_weights, corpus.eos_token_id) == (np.uint32, True, True, EOS)
        assert_documents(corpus, train, sources=True)
    assert_documents(grain_sft.open_corpus(tmp_path / "openchat", format="openchat"), train, sources=True)
    for place in ("val", "eval", "openchat.eval.parquet"):
        assert_documents(grain_sft.open_corpus(tmp_path / place), val)
    tokens, loss = joined(train)
    rows = len(tokens) // 8
    batch = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 8)).read(range(rows))
    np.testing.assert_array_equal(batch["loss_weights"], loss[: rows * 8].reshape(-1, 8))
    assert len(list(cache.iterdir())) == 2


def test_the_weight_of_first_tokens_is_0_without_their_file(tmp_path):
    docs = documents(weights=True)
    write_openchat(tmp_path, docs, first_weights=False)
    for _, loss in docs:
        loss[0] = 0
    assert_documents(grain_sft.open_corpus(tmp_path), docs)


def test_it_is_unpacked_once_and_again_when_it_changes(tmp_path, cache):
    docs = documents(weights=True)
    write_openchat(tmp_path, docs)
    grain_sft.open_corpus(tmp_path)
    (folder,) = cache.iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    corpus = grain_sft.open_corpus(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "tokens.bin").write_bytes(b"")
    assert grain_sft.open_corpus(tmp_path) == corpus
    assert [folder] == list(cache.iterdir())
    write_openchat(tmp_path, docs[:5])
    assert_documents(grain_sft.open_corpus(tmp_path), docs[:5])
    shutil.rmtree(cache)
    assert_documents(grain_sft.open_corpus(tmp_path), docs[:5])


def test_a_row_of_several_sequences_is_as_many_documents(tmp_path):
    docs = documents(30, weights=True)
    single, columns = openchat_columns(docs), {}
    for name, values in single.items():
        pairs = zip(values[::2], values[1::2], strict=True)
        columns[name] = [one + other for one, other in pairs]
    write_openchat(tmp_path, docs, columns=columns)
    assert_documents(grain_sft.open_corpus(tmp_path), docs)


def changed(columns, name, row, value):
    columns = {key: list(values) for key, values in columns.items()}
    columns[name][row] = value
    return columns


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("total_length", 3, "row 12: total_length is 3, but nz_input_ids has the length"),
        ("nz_position_ids", [0, 1], "row 12: nz_position_ids has the length 2, but nz_input_ids"),
        ("nz_shifted_loss_weights", [0.0], "row 12: nz_shifted_loss_weights has the length 1"),
        ("seqlens", [2, 1], "row 12: seqlens add up to 3, but nz_input_ids has the length"),
        ("seqlens", [-1, 5], "row 12: seqlens add up to 4"),
        ("nz_input_ids", "negative", "row 12: nz_input_ids holds a token id"),
        ("nz_position_ids", "reversed", "row 12: nz_position_ids don't count from 0"),
        ("nz_shifted_loss_weights", "ones", "row 12: the last of nz_shifted_loss_weights is not 0"),
        (
            "nz_shifted_loss_weights",
            "nan",
            "row 12: nz_shifted_loss_weights holds a weight that is negative or not finite",
        ),
        ("nz_shifted_label_ids", "other", "row 12: a label of nz_shifted_label_ids takes loss, but is not the token"),
        ("nz_input_ids", None, "column nz_input_ids has no value in some of the rows from 8 on"),
    ],
)
def test_rows_that_dont_fit_together_are_named(tmp_path, cache, name, value, expected):
    docs = documents(30, weights=True)
    columns = openchat_columns(docs)
    count = len(docs[11][0])
    values = {
        "negative": [-1] * count,
        "reversed": list(range(count))[::-1],
        "ones": [1.0] * count,
        "nan": [float("nan")] * count,
        "other": [9999] * count,
    }
    columns = changed(columns, name, 11, values.get(value, value) if isinstance(value, str) else value)
    if value in ("other", "negative"):
        columns = changed(columns, "nz_shifted_loss_weights", 11, [1.0] * (count - 1) + [0.0])
    write_openchat(tmp_path, docs, columns=columns)
    message = error_of(tmp_path)
    assert str(tmp_path / "openchat.train.parquet") in message and expected in message
    assert not list(cache.iterdir())


def test_columns_that_are_missing_or_of_another_type_are_named(tmp_path):
    docs = documents(5, weights=True)
    columns = openchat_columns(docs)
    for name in columns:
        write_openchat(tmp_path, docs, columns={key: value for key, value in columns.items() if key != name})
        assert f"has 0 columns {name}; expected the columns total_length, " in error_of(tmp_path)
    write_openchat(tmp_path, docs, columns={**columns, "seqlens": [[1]] * 5, "total_length": [1] * 5})
    table = pa.table({**columns, "nz_input_ids": ["a"] * 5})
    pa.parquet.write_table(table, tmp_path / "openchat.train.parquet")
    assert "column nz_input_ids is string; expected lists" in error_of(tmp_path)
    pa.parquet.write_table(pa.table({**columns, "total_length": ["a"] * 5}), tmp_path / "openchat.train.parquet")
    assert "column total_length holds string; expected numbers" in error_of(tmp_path)


def test_files_beside_it_that_dont_fit_are_named(tmp_path):
    docs = documents(5, weights=True)
    write_openchat(tmp_path, docs)
    path = tmp_path / "openchat.train.first_weights.bin"
    path.write_bytes(bytes(16))
    assert "4 weights, but" in error_of(tmp_path)
    path.write_bytes(bytes(19))
    assert "is not a multiple of 4" in error_of(tmp_path)
    path.write_bytes(np.full(5, np.inf, "f4").tobytes())
    assert "weight 0 is inf" in error_of(tmp_path)
    path.unlink()
    write_sources(tmp_path / "openchat.train.sources.bin", docs * 2)
    assert "160 bytes; expected 80" in error_of(tmp_path)
    write_openchat(tmp_path, docs)
    os.link(tmp_path / "openchat.train.parquet", tmp_path / "other.train.parquet")
    assert "holds openchat.train.parquet and other.train.parquet" in error_of(tmp_path)
    assert "dtype=uint16; tokens of the format openchat are read as uint32" in error_of(
        tmp_path / "other.train.parquet", dtype="uint16"
    )


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    write_openchat(tmp_path, documents(5))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow, which is not installed. Run `pip install '.[parquet]'`" in error_of(tmp_path)


def test_a_cache_that_cant_be_written_is_named(tmp_path, monkeypatch):
    write_openchat(tmp_path, documents(5))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "file"))
    assert "can't be written" in error_of(tmp_path) and Path(tmp_path / "file").read_text() == ""
