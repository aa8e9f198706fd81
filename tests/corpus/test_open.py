"""What `open_corpus` takes: globs, directories, lists, single files; and what it refuses."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

import grain_sft


def names(corpus: grain_sft.Corpus, folder: pathlib.Path) -> list[str]:
    return [os.path.relpath(shard.path, folder) for shard in corpus.shards]


@pytest.fixture
def tree(tmp_path, write_tokens):
    for name in ("b.npy", "a.npy", "sub/c.npy", "sub/deep/a.npy", "sub-2/z.npy", "a.bin", "notes.txt"):
        write_tokens(name, range(len(name)))
    return tmp_path


def test_a_directory_is_every_npy_file_below_it_sorted_by_path(tree):
    expected = ["a.npy", "b.npy", "sub-2/z.npy", "sub/c.npy", "sub/deep/a.npy"]
    assert names(grain_sft.open_corpus(tree), tree) == expected
    assert names(grain_sft.open_corpus(str(tree) + "/"), tree) == expected
    assert names(grain_sft.open_corpus(f"file://{tree}", format="files"), tree) == expected


def test_a_glob_is_its_matches_sorted(tree):
    assert names(grain_sft.open_corpus(f"{tree}/*.npy"), tree) == ["a.npy", "b.npy"]
    assert names(grain_sft.open_corpus(f"{tree}/sub*/*.npy"), tree) == ["sub-2/z.npy", "sub/c.npy"]
    assert names(grain_sft.open_corpus(f"{tree}/**/a.*"), tree) == ["a.bin", "a.npy", "sub/deep/a.npy"]
    assert names(grain_sft.open_corpus(f"{tree}/[ab].npy"), tree) == ["a.npy", "b.npy"]


def test_a_list_keeps_its_order_and_expands_in_place(tree):
    listed = [tree / "sub/c.npy", f"{tree}/*.npy", str(tree / "sub/deep"), tree / "a.npy"]
    assert names(grain_sft.open_corpus(listed), tree) == [
        "sub/c.npy",
        "a.npy",
        "b.npy",
        "sub/deep/a.npy",
        "a.npy",
    ]


def test_a_single_file_is_a_corpus_whatever_names_it(tree, monkeypatch):
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree))
    for where in ("a.npy", "./a.npy", "~/a.npy", tree / "a.npy", f"file://{tree}/a.npy", ["a.npy"], (tree / "a.npy",)):
        corpus = grain_sft.open_corpus(where)
        assert [os.path.realpath(shard.path) for shard in corpus.shards] == [os.path.realpath(tree / "a.npy")]
        assert (corpus.num_tokens, corpus.dtype, corpus.shards[0].label) == (5, np.uint32, "")


def test_a_raw_file_of_another_suffix_is_told_by_its_bytes(write_tokens):
    assert grain_sft.open_corpus(write_tokens("tokens.dat", range(100))).num_tokens == 100
    assert (
        grain_sft.open_corpus(write_tokens("text.dat", [0x61616161] * 2), format="files", dtype="uint32").num_tokens
        == 2
    )


def test_names_with_brackets_stand_for_themselves_where_they_exist(tmp_path, write_tokens):
    write_tokens("run[1]/part[0].npy", [1, 2])
    write_tokens("run1/part0.npy", [1])
    assert grain_sft.open_corpus(tmp_path / "run[1]").num_tokens == 2
    assert grain_sft.open_corpus(tmp_path / "run[1]" / "part[0].npy").num_tokens == 2
    assert grain_sft.open_corpus([tmp_path / "run[1]" / "part[0].npy"]).num_tokens == 2


def test_paths_that_are_not_a_mixs_are_remapped_too(tree):
    remap = {"/old/": f"{tree}/"}
    assert names(grain_sft.open_corpus("/old/a.npy", path_remap=remap), tree) == ["a.npy"]
    assert names(grain_sft.open_corpus(["/old/b.npy", "/old/sub*/*.npy"], path_remap=remap), tree) == [
        "b.npy",
        "sub-2/z.npy",
        "sub/c.npy",
    ]


def test_the_order_of_a_list_decides_the_rows(write_tokens):
    first, second = write_tokens("1.npy", [1, 1]), write_tokens("0.npy", [0, 0])
    rows = grain_sft.NpyDataSource(grain_sft.WindowLayout(grain_sft.open_corpus([first, second]), 2)).read([0, 1])
    np.testing.assert_array_equal(rows["tokens"], [[1, 1], [0, 0]])


@pytest.mark.parametrize("where", ["none.npy", "none.bin", "none", "none.json", "none/", "none.txt"])
@pytest.mark.parametrize("as_list", [False, True])
def test_what_is_not_there_is_named(tmp_path, where, as_list):
    path = f"{tmp_path}/{where}"
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.open_corpus([path] if as_list else path)
    assert isinstance(error.value, OSError) and path.rstrip("/") in str(error.value)


@pytest.mark.parametrize("name", ["mix.txt", "index.json"])
def test_a_mix_or_an_index_in_a_list_is_not_read_as_tokens(write_tokens, tmp_path, name):
    (tmp_path / name).write_text("a,0.npy\n" * 2)
    with pytest.raises(grain_sft.GrainSftError, match=f"{name}: a mix or an index, in a list"):
        grain_sft.open_corpus([write_tokens("0.npy", [1]), tmp_path / name], dtype="uint8")


def test_a_glob_without_matches_is_an_error(tmp_path):
    with pytest.raises(grain_sft.GrainSftError, match="the glob matches no file") as error:
        grain_sft.open_corpus(f"{tmp_path}/*.npy")
    assert f"{tmp_path}/*.npy" in str(error.value)


def test_a_directory_without_token_files_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(grain_sft.GrainSftError, match=r"holds no \.npy file. Give a glob") as error:
        grain_sft.open_corpus(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_an_empty_list_is_an_error():
    with pytest.raises(grain_sft.GrainSftError, match="empty list of files: a corpus has at least one"):
        grain_sft.open_corpus([])


def test_a_directory_above_or_a_list_with_label_masks_is_opened_with_them(tmp_path, write_tokens):
    write_tokens("sub/token_ids_part_0.npy", [1, 2])
    write_tokens("sub/labels_mask_part_0.npy", [1, 0], "bool")
    whole = grain_sft.open_corpus(tmp_path / "sub")
    assert whole.has_loss
    for where in (tmp_path, [tmp_path / "sub"], f"{tmp_path}/sub/*.npy", f"{tmp_path}/sub/token_ids_part_*.npy"):
        assert grain_sft.open_corpus(where) == whole


def test_an_unknown_format_is_an_error_that_lists_the_known(tmp_path):
    with pytest.raises(grain_sft.GrainSftError, match="format 'parquet': expected one of files, index, mix, olmo"):
        grain_sft.open_corpus(tmp_path, format="parquet")
    with pytest.raises(grain_sft.GrainSftError, match="takes one path, not a list of 1"):
        grain_sft.open_corpus([tmp_path], format="mix")


def test_a_format_from_outside_opens_by_its_name_and_never_by_itself(tmp_path, write_tokens, monkeypatch):
    write_tokens("wiki/wiki.dump", [5, 3, 6, 7, 3], "uint16")
    (tmp_path / "outside_format.py").write_text(
        """
import numpy as np
from grain_sft.corpus import CorpusMetadata, Format, Split

class Wikidump(Format):
    expected = "a folder with wiki.dump"

    def detect(self, path, listing):
        return path if "wiki.dump" in listing.names(path) else None

    def split(self, home, listing):
        metadata = CorpusMetadata(eos_token_id=3)
        return Split(files=(home + "/wiki.dump",), metadata=metadata, dtype=np.dtype("uint16"))
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    corpus = grain_sft.open_corpus(tmp_path / "wiki", format="outside_format:Wikidump")
    assert [document.tokens.tolist() for document in corpus.iter_documents()] == [[5, 3], [6, 7, 3]]
    for where, format in ((tmp_path / "wiki", "auto"), (tmp_path, "outside_format:Wikidump")):
        with pytest.raises(grain_sft.GrainSftError, match=r"holds no .npy file|expected a folder with wiki.dump"):
            grain_sft.open_corpus(where, format=format)
    with pytest.raises(grain_sft.GrainSftError, match="'outside_format:Other' cannot be imported"):
        grain_sft.open_corpus(tmp_path / "wiki", format="outside_format:Other")


@pytest.mark.parametrize(
    "dtype", ["int32", "float32", ">u4", "bool", "u4,u4", "nonsense", "(2,u4", [("a", "u4")], "S4", "O"]
)
def test_a_dtype_that_tokens_cant_have_is_an_error(write_tokens, dtype):
    path = write_tokens("a.npy", range(4))
    with pytest.raises(grain_sft.GrainSftError, match="dtype") as error:
        grain_sft.open_corpus(path, dtype=dtype)
    assert "uint8, uint16, uint32, uint64" in str(error.value)


@pytest.mark.parametrize("dtype", ["uint32", "u4", "<u4", np.uint32, np.dtype("uint32")])
def test_a_dtype_may_be_given_as_numpy_takes_it(write_tokens, dtype):
    corpus = grain_sft.open_corpus(write_tokens("a.npy", range(4)), dtype=dtype)
    assert corpus.dtype == np.uint32 and corpus.num_tokens == 4


@pytest.mark.parametrize("eos", [-1, 1 << 16, True, "0", 1.5])
def test_an_eos_token_id_that_no_token_can_be_is_an_error(write_tokens, eos):
    path = write_tokens("a.npy", range(4), "uint16")
    with pytest.raises(grain_sft.GrainSftError, match=r"eos_token_id=.*uint16") as error:
        grain_sft.open_corpus(path, dtype="uint16", eos_token_id=eos)
    assert repr(eos) in str(error.value)


def test_a_corpus_is_a_value(tree):
    one, other = grain_sft.open_corpus(tree), grain_sft.open_corpus(tree)
    assert one == other and one is not other
    assert repr(one) == repr(other)
    assert repr(one).startswith(f"Corpus(shards=5, num_tokens={one.num_tokens}, dtype=uint32, eos_token_id=None")
    assert one.fingerprint in repr(one)
    assert one != grain_sft.open_corpus(tree, eos_token_id=0)


def test_opening_a_corpus_leaves_no_file_open(tree):
    corpus = grain_sft.open_corpus(tree, eos_token_id=0)
    assert corpus.num_documents == 5
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if link.startswith(str(tree))]
