"""Both splits of a corpus in format primer are read, and wrong labels, starts of documents and metadata are named.

The label of a token is the token itself, or -100 where no loss is taken.
"""

import json
import os

import numpy as np
import pytest
from sft_files import EOS, assert_documents, documents, error_of, joined, write_primer

from grain_sft import NpyDataSource, WindowLayout, open_corpus


@pytest.mark.parametrize("meta", [True, False])
def test_both_splits_are_read_by_each_of_their_names(tmp_path, meta):
    train, val = documents(), documents(7, 1)
    write_primer(tmp_path, val, split="val", meta=meta)
    write_primer(tmp_path, train, meta=meta, sources=True)
    assert_documents(open_corpus(tmp_path / "val"), val)  # no folder has this name yet
    for split, docs in (("train", train), ("val", val)):
        (tmp_path / split).mkdir()
        for name, target in ((".bin", "input_ids.bin"), ("_labels.bin", "labels.bin"), ("_idx.npy", "idx.npy")):
            os.symlink(f"../{split}_{target}", tmp_path / split / f"shard_00000{name}")
        places = [tmp_path / split, *(tmp_path / split).iterdir()]
        places += [tmp_path / f"{split}_{name}" for name in ("input_ids.bin", "labels.bin", "idx.npy")]
        for place in [*places, tmp_path] if split == "train" else places:
            corpus = open_corpus(place)
            assert_documents(corpus, docs, sources=split == "train")
            assert corpus == open_corpus(place, format="primer")
        assert (corpus.dtype, corpus.has_loss, corpus.has_weights) == (np.uint16, True, False)
        assert corpus.eos_token_id == (EOS if meta else None)
        assert corpus.tokenizer_sha256 == ("abc" if meta else None)
        tokens, loss = joined(docs)
        rows = len(tokens) // 8
        batch = NpyDataSource(WindowLayout(corpus, 8)).read(range(rows))
        np.testing.assert_array_equal(batch["loss_mask"], loss[: rows * 8].reshape(-1, 8))


def test_tokens_without_their_labels_are_plain_tokens(tmp_path):
    write_primer(tmp_path, documents())
    (tmp_path / "train_labels.bin").unlink()
    assert not open_corpus(tmp_path / "train_input_ids.bin", dtype="uint16").has_loss
    assert "lacks train_labels.bin" in error_of(tmp_path)
    assert "is not of the format primer" in error_of(tmp_path / "train_input_ids.bin", format="primer")


def test_labels_that_are_shifted_or_of_other_tokens_are_named(tmp_path):
    write_primer(tmp_path, documents())
    path = tmp_path / "train_labels.bin"
    labels = np.fromfile(path, "<i4")
    for wrong in (np.roll(labels, -1), np.where(labels == -100, -1, labels), labels + (np.arange(len(labels)) == 0)):
        wrong.astype("<i4").tofile(path)
        message = error_of(tmp_path)
        assert f"{path}: label " in message and "expected the token itself or -100, not shifted" in message
    labels[:-1].tofile(path)
    assert "expected one value for each token of dtype uint16" in error_of(tmp_path)
    path.write_bytes(labels.tobytes()[:-1])
    assert "is not a multiple of 4, the size of a int32" in error_of(tmp_path)


STARTS_OUT_OF_ORDER = [([0, 5, 5], "start 2 is 5"), ([1, 5], "start 0 is 1"), ([0, 10**6], "start 1 is 1000000")]
WRONG_STARTS = [*STARTS_OUT_OF_ORDER, ([], "lists no document")]


def test_the_file_of_starts_may_be_raw_and_may_end_with_the_total_but_must_ascend(tmp_path):
    docs = documents()
    path = write_primer(tmp_path, docs) / "train_idx.npy"
    starts = np.append(np.load(path), len(joined(docs)[0]))
    for write in (np.save, lambda path, starts: starts.tofile(path)):
        write(path, starts)
        assert_documents(open_corpus(tmp_path), docs)
        for wrong, expected in WRONG_STARTS:
            write(path, np.array(wrong, "<i8"))
            assert f"{path}: {expected}" in error_of(tmp_path), wrong
    for wrong, expected in (
        (starts.astype("i4"), "dtype '<i4'; expected little-endian int64"),
        (starts.astype(">i8"), "dtype '>i8'; expected little-endian int64"),
        (starts.reshape(1, -1), "expected one dimension"),
    ):
        np.save(path, wrong)
        assert expected in error_of(tmp_path)


WRONG_KEYS = [
    ("special_token_ids", [1], "special_token_ids is [1]; expected a mapping"),
    ("special_token_ids", {"eot": "2"}, "special_token_ids: eot is '2'; expected an integer"),
    ("special_token_ids", {"eot": True}, "eot is True; expected an integer"),
    ("special_token_ids", {"eot": 1 << 16}, "eos_token_id=65536: expected an id that uint16 holds"),
    ("splits", {"train": {"num_tokens": -1}}, "num_tokens is -1; expected an integer"),
    ("splits", {"train": {"num_tokens": 3}}, "train has 3 tokens, but"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG_KEYS)
def test_a_wrong_value_in_meta_json_is_named(tmp_path, key, value, expected):
    path = write_primer(tmp_path, documents()) / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert expected in error_of(tmp_path)
