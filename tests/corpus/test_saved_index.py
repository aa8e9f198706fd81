"""Saved indexes: equal to the corpus they were made of, movable, and not to be fooled by files that changed."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import grain_sft

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
    return grain_sft.open_corpus(folder / "mix.txt", dtype="uint16", eos_token_id=7, tokenizer=TOKENIZER)


def rows(corpus):
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 10)).read(range(210))["tokens"]


def edit(path, **changes):
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def error_of(path, **options):
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.open_corpus(path, **options)
    return str(error.value)


def test_a_corpus_opened_from_its_index_is_equal(folder, corpus, tmp_path):
    for path in (folder / "index.json", folder / "index", tmp_path / "elsewhere" / "index.json"):
        corpus.save(path)
        again = grain_sft.open_corpus(path)
        assert again == corpus
        assert (again.shards, again.dtype, again.eos_token_id, again.tokenizer) == (
            corpus.shards,
            np.uint16,
            7,
            TOKENIZER,
        )
        assert again.fingerprint == corpus.fingerprint and again.num_tokens == corpus.num_tokens
        assert again.num_documents == corpus.num_documents
        np.testing.assert_array_equal(rows(again), rows(corpus))


def test_a_corpus_without_eos_and_tokenizer_is_equal_too(folder):
    corpus = grain_sft.open_corpus(folder / "sub" / "a.npy", dtype="uint16")
    corpus.save(folder / "index.json")
    assert grain_sft.open_corpus(folder / "index.json") == corpus


def test_saving_twice_gives_the_same_bytes(folder, corpus):
    corpus.save(folder / "1.json")
    grain_sft.open_corpus(folder / "1.json").save(folder / "2.json")
    assert (folder / "1.json").read_bytes() == (folder / "2.json").read_bytes()


def test_an_eos_token_id_may_be_any_integer_of_numpys(folder):
    corpus = grain_sft.open_corpus(folder / "sub", dtype="uint16", eos_token_id=np.uint32(7))
    corpus.save(folder / "index.json")
    assert grain_sft.open_corpus(folder / "index.json").eos_token_id == 7


def test_the_folder_of_files_and_index_can_be_moved(folder, corpus, tmp_path):
    corpus.save(folder / "index.json")
    expected = rows(corpus)
    moved = tmp_path / "new" / "place"
    shutil.copytree(folder, moved)
    shutil.rmtree(folder)
    again = grain_sft.open_corpus(moved / "index.json")
    assert [shard.path for shard in again.shards] == [
        str(moved / name) for name in ("sub/a.npy", "b.npy", "empty.npy", "b.npy")
    ]
    assert again.fingerprint == corpus.fingerprint
    np.testing.assert_array_equal(rows(again), expected)


def test_an_index_opens_from_any_working_directory(folder, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    grain_sft.open_corpus("mix.txt", dtype="uint16", eos_token_id=7, tokenizer=TOKENIZER).save("index.json")
    assert grain_sft.open_corpus("index.json") == corpus
    monkeypatch.chdir(tmp_path)
    assert grain_sft.open_corpus("data/index.json") == corpus


@pytest.mark.parametrize("beside", [True, False], ids=["index beside the files", "index elsewhere"])
def test_files_that_moved_without_their_index_are_found_by_path_remap(folder, corpus, tmp_path, beside):
    path = (folder if beside else tmp_path / "elsewhere") / "index.json"
    corpus.save(path)
    kept = tmp_path / "index.json"
    if beside:
        kept = path  # its entries are relative, and what a reader of `shards` sees is absolute: that is remapped
    else:
        path.rename(kept)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    for name in ("sub/a.npy", "b.npy", "empty.npy"):
        (folder / name).unlink()
    again = grain_sft.open_corpus(kept, path_remap={f"{folder}/": f"{moved}/"})
    assert {os.path.dirname(os.path.relpath(shard.path, moved)) for shard in again.shards} == {"sub", ""}
    assert again.fingerprint == corpus.fingerprint


def test_relative_entries_are_remapped_as_they_are_stored(folder, corpus):
    corpus.save(folder / "index.json")
    (folder / "sub").rename(folder / "other")
    again = grain_sft.open_corpus(folder / "index.json", path_remap={"sub/": "other/"})
    assert again.shards[0].path == str(folder / "other" / "a.npy")
    assert again.fingerprint == corpus.fingerprint


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(("change", "verb"), [(-2, "shrank"), (2, "grew")])
def test_a_file_of_another_size_is_named_with_both_sizes(folder, corpus, number, change, verb):
    corpus.save(folder / "index.json")
    path = corpus.shards[number].path
    before = os.path.getsize(path)
    os.truncate(path, before + change)
    message = error_of(folder / "index.json")
    assert f"{path}: the file {verb} since it was indexed: {before + change} bytes, expected {before}." in message
    assert str(folder / "index.json") in message


@pytest.mark.parametrize("name", ["sub/a.npy", "b.npy"])
def test_a_file_that_is_gone_is_named(folder, corpus, name):
    corpus.save(folder / "index.json")
    (folder / name).unlink()
    message = error_of(folder / "index.json")
    assert f"{folder / name}: can't be found" in message and "path_remap" in message and "index.json" in message


def test_a_replaced_file_of_the_same_size_is_found_out_when_it_is_first_read(folder, corpus):
    corpus.save(folder / "index.json")
    (np.arange(2000) + 1).astype(np.uint16).tofile(folder / "sub" / "a.npy")
    source = grain_sft.NpyDataSource(grain_sft.WindowLayout(grain_sft.open_corpus(folder / "index.json"), 10))
    np.testing.assert_array_equal(source[200]["tokens"], np.arange(10))  # of b.npy
    for _ in range(2):
        with pytest.raises(grain_sft.GrainSftError, match="other content: it was replaced") as error:
            source[0]
        assert str(folder / "sub" / "a.npy") in str(error.value)


def test_an_index_of_another_version_is_refused(folder, corpus):
    corpus.save(folder / "index.json")
    for version in (0, 2, "1", None):
        edit(folder / "index.json", version=version)
        message = error_of(folder / "index.json")
        assert f"index.json: index version {version!r}; this grain_sft reads version 1" in message


DAMAGED = "edited or damaged: build it again"
GARBLED = "The index is damaged: build it again"


@pytest.mark.parametrize(
    ("number", "changes", "expected"),
    [
        (None, {"eos_token_id": 8}, DAMAGED),
        (None, {"eos_token_id": None}, DAMAGED),
        (None, {"fingerprint": "sha256:0"}, DAMAGED),
        (None, {"shards": lambda shards: shards[::-1]}, DAMAGED),
        (None, {"shards": lambda shards: shards[1:]}, DAMAGED),
        (0, {"digest": "0"}, DAMAGED),
        (0, {"num_tokens": 1999}, "which is not its size of 4000"),
        (0, {"data_offset": 2}, "which is not its size of 4000"),
        (0, {"size": 4002}, "which is not its size of 4002"),
        (0, {"path": 5}, GARBLED),
        (0, {"path": "a\0b"}, "embedded null byte"),
        (0, {"path": "\ud800"}, "index.json"),
        (0, {"num_tokens": -1}, GARBLED),
        (0, {"num_tokens": 2000.0}, GARBLED),
        (0, {"num_tokens": True}, GARBLED),
        (0, {"size": 1 << 80}, GARBLED),
        (0, {"digest": []}, GARBLED),
        (None, {"dtype": "int32"}, GARBLED),
        (None, {"dtype": "uint32"}, "which is not its size"),
        (None, {"eos_token_id": "7"}, GARBLED),
        (None, {"eos_token_id": 65536}, "eos_token_id is 65536, which uint16 can't hold"),
        (None, {"tokenizer": 5}, GARBLED),
        (None, {"shards": []}, "lists no shard"),
        (None, {"shards": "abc"}, GARBLED),
        (None, {"shards": [1]}, GARBLED),
        (None, {"format": "other"}, "neither a grain_sft index nor MaxText's"),
        *((None, {key: ...}, f"required field `{key}`") for key in ("version", "dtype", "eos_token_id", "shards")),
    ],
)
def test_an_edited_index_is_refused(folder, corpus, number, changes, expected):
    path = folder / "index.json"
    corpus.save(path)
    data = json.loads(path.read_text())
    entry = data if number is None else data["shards"][number]
    for key, value in changes.items():
        entry[key] = value(entry[key]) if callable(value) else value
        if value is ...:
            del entry[key]
    path.write_text(json.dumps(data))
    message = error_of(path)
    assert expected in message and str(path) in message


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "{}", '{"format": "grain_sft index"', "[" * 100_000])
def test_what_is_no_index_is_refused(tmp_path, text):
    path = tmp_path / "index.json"
    path.write_text(text)
    message = error_of(path)
    assert str(path) in message and ("JSON" in message or "neither a grain_sft index nor MaxText's" in message)
    assert len(message) < 1000


def test_what_is_asked_for_must_be_what_the_index_holds(folder, corpus):
    corpus.save(folder / "index.json")
    assert "the index is of uint16 tokens, but dtype=uint32" in error_of(folder / "index.json", dtype="uint32")
    assert "has eos_token_id 7, but 8 was asked for" in error_of(folder / "index.json", eos_token_id=8)
    again = grain_sft.open_corpus(folder / "index.json", dtype="uint16", eos_token_id=7)
    assert again == corpus


def test_an_index_without_eos_takes_the_one_given(folder):
    plain = grain_sft.open_corpus(folder / "mix.txt", dtype="uint16")
    plain.save(folder / "index.json")
    again = grain_sft.open_corpus(folder / "index.json", eos_token_id=7, tokenizer="other")
    assert (again.eos_token_id, again.tokenizer) == (7, "other")
    assert again.fingerprint != plain.fingerprint


def listing(folder):
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)


def test_saving_leaves_nothing_but_the_index(folder, corpus):
    before = listing(folder)
    corpus.save(folder / "new" / "index.json")
    assert listing(folder) == sorted([*before, str(folder / "new" / "index.json")])


def test_an_index_that_cant_be_written_leaves_the_old_one_and_nothing_else(folder, corpus, monkeypatch):
    path = folder / "index.json"
    corpus.save(path)
    old, before = path.read_bytes(), listing(folder)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(grain_sft.GrainSftError, match=r"can't be written \(No space left on device\)") as error:
        corpus.save(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == old and listing(folder) == before


@pytest.mark.parametrize("place", ["mix.txt/index.json", "sub"])
def test_an_index_goes_where_a_file_can_be(folder, corpus, place):
    before = listing(folder)
    with pytest.raises(grain_sft.GrainSftError, match="can't be written") as error:
        corpus.save(folder / place)
    assert isinstance(error.value, OSError) and str(folder / place) in str(error.value)
    assert listing(folder) == before


def test_an_index_is_written_to_where_a_url_says(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    corpus.save("memory://saved/index.json")
    assert grain_sft.open_corpus("memory://saved/index.json").fingerprint == corpus.fingerprint
    assert listing(tmp_path) == before


def test_an_unknown_format_is_refused(corpus, tmp_path):
    with pytest.raises(grain_sft.GrainSftError, match="format='parquet': an index is written as"):
        corpus.save(tmp_path / "index.json", format="parquet")
    assert not (tmp_path / "index.json").exists()
