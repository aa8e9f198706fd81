"""An index that `Corpus.save` wrote opens as the same corpus, also after a move. A changed file or index is refused.

The last tests read and write the format of MaxText's index. MaxText 0.2.5 wrote `tests/golden/maxtext/index.json`.
"""

import functools
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from sft_files import error_of

from grain_sft import GrainSftError, NpyDataSource, WindowLayout, open_corpus
from grain_sft.corpus.index_writer import maxtext_fingerprint

TOKENIZER = "allenai/dolma3-tokenizer"


@pytest.fixture
def folder(tmp_path, write_tokens):
    """A folder `data` with a raw file, a true .npy file, an empty one, and a mix that labels them."""
    write_tokens("data/sub/a.npy", range(2000), "uint16")
    np.save(tmp_path / "data" / "b.npy", np.arange(50, dtype=np.uint16))
    write_tokens("data/empty.npy", [])
    (tmp_path / "data" / "mix.txt").write_text("web,sub/a.npy\ncode,b.npy\nweb,empty.npy\ncode,b.npy\n")
    return tmp_path / "data"


@pytest.fixture
def corpus(folder):
    return open_corpus(folder / "mix.txt", dtype="uint16", eos_token_id=np.uint32(7), tokenizer=TOKENIZER)


@pytest.fixture
def index(folder, corpus):
    corpus.save(folder / "index.json")
    return folder / "index.json"


def test_a_corpus_opened_from_its_index_is_equal(folder, corpus, tmp_path):
    for path in (folder / "index.json", folder / "index", tmp_path / "elsewhere" / "index.json"):
        corpus.save(path)
        again = open_corpus(path)
        assert again == corpus == open_corpus(path, dtype="uint16", eos_token_id=7)
        assert (again.dtype, again.eos_token_id, again.tokenizer) == (np.uint16, 7, TOKENIZER)
        assert again.fingerprint == corpus.fingerprint and again.num_documents == corpus.num_documents
        rows, expected = (NpyDataSource(WindowLayout(each, 10)).read(range(210))["tokens"] for each in (again, corpus))
        np.testing.assert_array_equal(rows, expected)
    again.save(tmp_path / "elsewhere" / "again.json")
    assert (tmp_path / "elsewhere" / "again.json").read_bytes() == (tmp_path / "elsewhere" / "index.json").read_bytes()
    plain = open_corpus(folder / "sub" / "a.npy", dtype="uint16")
    plain.save(folder / "index.json")
    assert open_corpus(folder / "index.json") == plain


def test_an_index_lists_a_file_whose_name_is_not_utf8(folder):
    path = os.fsdecode(os.fsencode(folder) + b'/"\xff.npy')
    corpus = open_corpus(shutil.copy(folder / "b.npy", path), tokenizer=path)
    corpus.save(folder / "index.json")
    assert open_corpus(folder / "index.json") == corpus


def test_an_index_opens_from_any_working_directory_and_its_relative_paths_are_remapped(folder, tmp_path, monkeypatch):
    """test_formats_gcs.py tests absolute paths."""
    monkeypatch.chdir(folder)
    corpus, index = open_corpus("mix.txt", dtype="uint16", eos_token_id=7, tokenizer=TOKENIZER), folder / "index.json"
    corpus.save("index.json")
    assert open_corpus("index.json") == corpus
    monkeypatch.chdir(tmp_path)
    assert open_corpus("data/index.json") == corpus
    moved = folder.rename(tmp_path / "moved")
    folder.mkdir()
    shutil.copy(moved / "index.json", index)
    # This remap replaces a prefix of the absolute path. The remap below replaces a prefix of the path that the index lists.
    assert open_corpus(index, path_remap={f"{folder}/": f"{moved}/"}).fingerprint == corpus.fingerprint
    (moved / "sub").rename(moved / "other")
    again = open_corpus(moved / "index.json", path_remap={"sub/": "other/"})
    assert again.shards[0].path == str(moved / "other" / "a.npy") and again.fingerprint == corpus.fingerprint


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(("change", "verb"), [(-2, "shrank"), (2, "grew")])
def test_a_file_of_another_size_is_named_with_both_sizes(corpus, index, number, change, verb):
    path = corpus.shards[number].path
    before = os.path.getsize(path)
    os.truncate(path, before + change)
    message = error_of(index)
    assert f"{path}: the file {verb} since it was indexed: {before + change} bytes, expected {before}." in message
    assert str(index) in message


DAMAGED = "edited or damaged: build it again"
GARBLED = "The index is damaged: build it again"
# Number of the changed shard, or None for a key of the whole index; the changes; the message. `...` as a value removes a key.
EDITED_INDEXES = [
    *((None, {"version": each}, f"version {each!r}; expected 1") for each in (0, 2, "1", None)),
    *((None, {key: wrong}, DAMAGED) for key, wrong in (("eos_token_id", 8), ("fingerprint", "sha256:0"))),
    *((0, change, DAMAGED) for change in ({"digest": "0"}, {"row": [4, 8]})),
    (0, {"num_tokens": 1999}, "but its size is 4000"),
    (0, {"size": 4002}, "but its size is 4002"),
    (0, {"path": "a\0b"}, "embedded null "),
    *((0, {key: "\ud800"}, "not JSON that can be read") for key in ("path", "digest", "size")),
    *((0, {key: "\udcff"}, "not JSON that can be read") for key in ("digest", "size")),
    *((0, {"num_tokens": wrong}, GARBLED) for wrong in (-1, 2000.0, True)),
    *((0, {key: wrong}, GARBLED) for key, wrong in (("path", 5), ("size", 1 << 80), ("digest", []))),
    *((None, {key: wrong}, GARBLED) for key, wrong in (("dtype", "int32"), ("tokenizer", 5), ("shards", [1]))),
    (None, {"eos_token_id": 65536}, "eos_token_id=65536: expected an id that uint16 holds"),
    (None, {"shards": []}, GARBLED),
    (None, {"format": "other"}, "not an index of grain_sft or MaxText"),
    *((None, {key: ...}, f"required field `{key}`") for key in ("version", "dtype", "eos_token_id", "shards")),
]


@pytest.mark.parametrize(("number", "changes", "expected"), EDITED_INDEXES)
def test_an_edited_index_is_refused(index, number, changes, expected):
    data = json.loads(index.read_text())
    entry = data if number is None else data["shards"][number]
    entry |= changes
    for key in [key for key, value in changes.items() if value is ...]:
        del entry[key]
    index.write_text(json.dumps(data))
    message = error_of(index)
    assert expected in message and str(index) in message


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "{}", '{"format": "grain_sft index"', "[" * 100_000])
def test_a_file_that_is_not_an_index_is_refused(tmp_path, text):
    path = tmp_path / "index.json"
    path.write_text(text)
    message = error_of(path)
    assert str(path) in message and ("JSON" in message or "not an index of grain_sft or MaxText" in message)
    assert len(message) < 1000


def test_options_that_contradict_the_index_are_refused_and_options_that_it_lacks_are_used(folder, index):
    assert "states uint16 tokens, but dtype=uint32" in error_of(index, dtype="uint32")
    assert "has eos_token_id 7, but 8 was given" in error_of(index, eos_token_id=8)
    plain = open_corpus(folder / "mix.txt", dtype="uint16")
    plain.save(folder / "index.json")
    again = open_corpus(folder / "index.json", eos_token_id=7, tokenizer="other")
    assert (again.eos_token_id, again.tokenizer) == (7, "other")
    assert again.fingerprint != plain.fingerprint


def test_saving_writes_nothing_but_the_index(folder, corpus, index):
    before = sorted(folder.rglob("*"))
    for place, expected in (("mix.txt/index.json", "can't be written"), ("sub", "would replace")):
        with pytest.raises(GrainSftError, match=rf"{place}.*{expected}"):
            corpus.save(folder / place)
    corpus.save("memory://saved/index.json")
    assert open_corpus("memory://saved/index.json").fingerprint == corpus.fingerprint
    with pytest.raises(GrainSftError, match="format='parquet': expected one of grain_sft, maxtext"):
        corpus.save(folder / "other.json", format="parquet")
    corpus.save(folder / "new" / "index.json")
    assert sorted(folder.rglob("*")) == sorted([*before, folder / "new", folder / "new" / "index.json"])


GOLDEN = Path(__file__).resolve().parents[1] / "golden/maxtext/index.json"
INDEX = json.loads(GOLDEN.read_text())
COUNTS = {"a/part-0.npy": 1000, "a/part-1.npy": 128, "b/part-0.npy": 515}


@pytest.fixture
def listed(tmp_path, write_tokens):
    """The folder of the files that MaxText's index lists."""
    for name, count in COUNTS.items():
        write_tokens(f"data/{name}", np.arange(count) + count)
    return tmp_path / "data"


@pytest.fixture
def remapped(listed):
    return {"path_remap": {"gs://bucket/": f"{listed}/"}}


def test_maxtexts_index_opens_as_the_corpus_of_its_files(listed, remapped):
    """Opening the index also compares its fingerprint, which MaxText computed."""
    corpus = open_corpus(GOLDEN, eos_token_id=1999, **remapped)
    expected = [(str(listed / name), name[0], count) for name, count in COUNTS.items()]
    assert [(shard.path, shard.label, shard.num_tokens) for shard in corpus.shards] == expected
    assert (corpus.dtype, corpus.tokenizer, corpus.eos_token_id) == (np.uint32, TOKENIZER, 1999)
    assert corpus.num_documents == 1 and corpus.fingerprint == open_corpus(listed, eos_token_id=1999).fingerprint
    layout = WindowLayout(corpus, 128)
    assert len(layout) == 12
    np.testing.assert_array_equal(NpyDataSource(layout)[8]["tokens"], np.arange(128) + 515)


def test_a_written_index_equals_maxtexts_except_for_paths_and_fingerprint(listed, remapped, tmp_path):
    mix, path = listed / "mix.txt", tmp_path / "index.json"
    mix.write_text("".join(f"{name[0]},{name}\n" for name in COUNTS))
    golden = open_corpus(GOLDEN, **remapped)
    named, unnamed = open_corpus(mix, tokenizer=TOKENIZER), open_corpus(mix)
    for corpus, tokenizer in ((named, None), (unnamed, TOKENIZER), (golden, None)):
        corpus.save(path, format="maxtext", sequence_length=128, tokenizer=tokenizer)
        assert open_corpus(path) == golden
        written = json.loads(path.read_text().replace(f"{listed}/", "gs://bucket/"))
        assert list(written) == list(INDEX) and list(written["files"][0]) == list(INDEX["files"][0])
        assert written.pop("fingerprint") not in (None, INDEX["fingerprint"])
        assert {**written, "fingerprint": INDEX["fingerprint"]} == INDEX


def test_an_index_for_maxtext_needs_a_sequence_length_and_warns_of_headers(tmp_path, caplog):
    """MaxText reads the header of a .npy file as tokens."""
    np.save(tmp_path / "a.npy", np.arange(256, dtype=np.uint32))
    save = functools.partial(open_corpus(tmp_path).save, tmp_path / "index.json", format="maxtext")
    names = [(9, 3, r"tokenizer is 3 \(int\); expected a name"), (9, "\udcff", "is not UTF-8, so MaxText")]
    for length, tokenizer, expected in [*((each, None, "sequence_length") for each in (None, 0, -1)), *names]:
        with pytest.raises(GrainSftError, match=expected):
            save(sequence_length=length, tokenizer=tokenizer)
    assert not (tmp_path / "index.json").exists()
    with caplog.at_level(logging.WARNING, "absl"):
        save(sequence_length=128)
    assert str(tmp_path / "a.npy") in caplog.text and "header" in caplog.text


OTHER_COUNTS = [(127, "the file shrank"), (129, "the file grew"), (None, "no such file")]


@pytest.mark.parametrize(("count", "change"), OTHER_COUNTS)
def test_a_file_that_is_missing_or_whose_length_is_not_the_listed_one_is_named(remapped, write_tokens, count, change):
    path = write_tokens("data/a/part-1.npy", range(count or 0))
    if count is None:
        path.unlink()
    message = error_of(GOLDEN, **remapped)
    assert f"{path}: {change}" in message
    assert count is None or f"{count} tokens, but MaxText's index {GOLDEN} lists 128" in message


EDITED = {"sequence_length": 256, "dtype": "uint16", "tokenizer": "other", "fingerprint": "sha256:0", "files": []}
EDITED_MAXTEXT_INDEXES = [
    *(({"format_version": each}, f"format version {each!r}; version '1' can be read") for each in ("2", 1)),
    *(({key: value}, "edited or damaged") for key, value in EDITED.items()),
    ({"tokenizer": 5}, "Expected `str`, got `int`"),
    ({"files": None}, "The index is damaged"),
    ({"files": [{}]}, "required field `path`"),
    ({"files": [], "fingerprint": maxtext_fingerprint(128, "uint32", TOKENIZER, [])}, "lists no file"),
    ({"dtype": "int32", "fingerprint": maxtext_fingerprint(128, "int32", TOKENIZER, INDEX["files"])}, "uint32"),
]


@pytest.mark.parametrize(("changes", "expected"), EDITED_MAXTEXT_INDEXES)
def test_an_edited_index_of_maxtext_is_refused(remapped, tmp_path, changes, expected):
    path = tmp_path / "index.json"
    path.write_text(json.dumps({**INDEX, **changes}))
    message = error_of(path, **remapped)
    assert str(path) in message and expected in message
