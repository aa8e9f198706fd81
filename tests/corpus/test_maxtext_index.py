"""MaxText's own index, read and written. `tests/golden/maxtext_index.json` is what maxtext 0.2.5 wrote."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import sft_files

from grain_sft import GrainSftError, NpyDataSource, WindowLayout, open_corpus
from grain_sft.corpus.index_writer import maxtext_fingerprint

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "maxtext_index.json"
INDEX = json.loads(GOLDEN.read_text())
COUNTS = {"a/part-0.npy": 1000, "a/part-1.npy": 128, "b/part-0.npy": 515}
TOKENIZER = "allenai/dolma3-tokenizer"


@pytest.fixture
def folder(tmp_path, write_tokens):
    for name, count in COUNTS.items():
        write_tokens(f"data/{name}", np.arange(count) + count)
    return tmp_path / "data"


def open_golden(folder, **options):
    return open_corpus(GOLDEN, path_remap={"gs://bucket/": f"{folder}/"}, **options)


def error_of(path, folder):
    return sft_files.error_of(path, path_remap={"gs://bucket/": f"{folder}/"})


def test_the_fingerprint_is_maxtexts():
    assert maxtext_fingerprint(128, "uint32", TOKENIZER, INDEX["files"]) == INDEX["fingerprint"]


def test_maxtexts_index_is_the_corpus_of_its_files(folder):
    corpus = open_golden(folder, eos_token_id=1999)
    expected = [(str(folder / name), name[0], count) for name, count in COUNTS.items()]
    assert [(shard.path, shard.label, shard.num_tokens) for shard in corpus.shards] == expected
    assert (corpus.dtype, corpus.tokenizer, corpus.eos_token_id) == (np.uint32, TOKENIZER, 1999)
    assert corpus.num_documents == 1
    assert corpus.fingerprint == open_corpus(folder, eos_token_id=1999).fingerprint
    layout = WindowLayout(corpus, 128)
    assert len(layout) == 12
    np.testing.assert_array_equal(NpyDataSource(layout)[8]["tokens"], np.arange(128) + 515)


def test_a_written_index_is_maxtexts_but_for_paths_and_fingerprint(folder, tmp_path):
    mix, path = folder / "mix.txt", tmp_path / "index.json"
    mix.write_text("".join(f"{name[0]},{name}\n" for name in COUNTS))
    for corpus, tokenizer in (
        (open_corpus(mix, tokenizer=TOKENIZER), None),
        (open_corpus(mix), TOKENIZER),
        (open_golden(folder), None),
    ):
        corpus.save(path, format="maxtext", sequence_length=128, tokenizer=tokenizer)
        assert open_corpus(path) == open_golden(folder)
        text = path.read_text()
        written = json.loads(text.replace(f"{folder}/", "gs://bucket/"))
        assert list(written) == list(INDEX) and list(written["files"][0]) == list(INDEX["files"][0])
        assert written.pop("fingerprint") not in (None, INDEX["fingerprint"])
        assert {**written, "fingerprint": INDEX["fingerprint"]} == INDEX


def test_an_index_for_maxtext_needs_a_sequence_length(folder, tmp_path):
    for length in (None, 0, -1):
        with pytest.raises(GrainSftError, match="sequence_length"):
            open_golden(folder).save(tmp_path / "index.json", format="maxtext", sequence_length=length)
    assert not (tmp_path / "index.json").exists()


def test_a_npy_header_draws_a_warning_as_maxtext_reads_it_as_tokens(tmp_path, caplog):
    np.save(tmp_path / "a.npy", np.arange(256, dtype=np.uint32))
    with caplog.at_level(logging.WARNING, "absl"):
        open_corpus(tmp_path).save(tmp_path / "index.json", format="maxtext", sequence_length=128)
    assert str(tmp_path / "a.npy") in caplog.text and "header" in caplog.text


@pytest.mark.parametrize(("change", "verb"), [(-1, "shrank"), (1, "grew")])
def test_a_file_of_another_length_is_named_with_both(folder, write_tokens, change, verb):
    write_tokens("data/a/part-1.npy", range(128 + change))
    message = error_of(GOLDEN, folder)
    assert f"{folder}/a/part-1.npy: the file {verb}" in message
    assert f"{128 + change} tokens, but MaxText's index {GOLDEN} lists 128" in message


def test_a_missing_file_is_named(folder):
    (folder / "b/part-0.npy").unlink()
    assert f"{folder}/b/part-0.npy: no such file" in error_of(GOLDEN, folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *(({"format_version": each}, f"format version {each!r}; version '1' can be read") for each in ("2", 1)),
        *(
            ({key: value}, "edited or damaged")
            for key, value in {
                "sequence_length": 256,
                "dtype": "uint16",
                "tokenizer": "other",
                "fingerprint": "sha256:0",
                "files": [],
            }.items()
        ),
        ({"tokenizer": 5}, "Expected `str`, got `int`"),
        ({"files": None}, "The index is damaged"),
        ({"files": [{}]}, "required field `path`"),
        ({"files": [[]]}, "The index is damaged"),
        ({"files": [], "fingerprint": maxtext_fingerprint(128, "uint32", TOKENIZER, [])}, "lists no file"),
        ({"dtype": "int32", "fingerprint": maxtext_fingerprint(128, "int32", TOKENIZER, INDEX["files"])}, "uint32"),
    ],
)
def test_an_edited_index_is_refused(folder, tmp_path, changes, expected):
    path = tmp_path / "index.json"
    path.write_text(json.dumps({**INDEX, **changes}))
    message = error_of(path, folder)
    assert str(path) in message and expected in message
