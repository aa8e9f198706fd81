"""`num_documents`: EOS tokens, counted in every shard."""

from __future__ import annotations

import os

import numpy as np
import pytest

import grain_sft
from grain_sft.corpus import eos_scan

EOS = 3


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_documents_are_eos_tokens_over_all_chunks_and_shards(write_tokens, monkeypatch, dtype):
    monkeypatch.setattr(eos_scan, "_SCAN_BYTES", 256)
    random = np.random.default_rng(1)
    arrays = [random.integers(0, 8, count) for count in (1000, 0, 1, 64, 65, 129)]
    arrays.append(np.full(200, EOS))  # at both sides of every border
    listed = [write_tokens(f"{number}.npy", array, dtype) for number, array in enumerate(arrays)]
    corpus = grain_sft.open_corpus(listed, dtype=dtype, eos_token_id=EOS)
    assert corpus.num_documents == sum(int((array == EOS).sum()) for array in arrays)


def test_a_file_longer_than_a_chunk_is_counted_whole(write_tokens):
    tokens = np.zeros((eos_scan._SCAN_BYTES >> 1) + 5, np.uint16)
    tokens[[0, -5, -6, -4, -1]] = EOS
    np.save(write_tokens("a.npy", []), tokens)
    (corpus,) = (grain_sft.open_corpus(write_tokens("raw.npy", tokens, "uint16"), dtype="uint16", eos_token_id=EOS),)
    assert corpus.num_documents == 5


def test_the_header_of_a_npy_file_holds_no_document(tmp_path):
    np.save(tmp_path / "a.npy", np.array([EOS, 1, EOS], np.uint8))
    for eos, count in ((EOS, 2), (ord(" "), 0), (ord("N"), 0)):
        assert grain_sft.open_corpus(tmp_path, eos_token_id=eos).num_documents == count


def test_without_an_eos_token_id_the_number_is_not_known(write_tokens):
    assert grain_sft.open_corpus(write_tokens("a.npy", [EOS])).num_documents is None


def test_a_shard_that_changed_is_an_error_not_a_number(write_tokens):
    path = write_tokens("a.npy", [EOS, 1, 2])
    for change in (lambda: os.truncate(path, 8), lambda: path.write_bytes(b"x" * 12), path.unlink):
        corpus = grain_sft.open_corpus(write_tokens("a.npy", [EOS, 1, 2]), eos_token_id=EOS)
        change()
        with pytest.raises(grain_sft.GrainSftError) as error:
            _ = corpus.num_documents
        assert str(path) in str(error.value)
