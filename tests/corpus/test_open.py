"""`open_corpus` opens every form of a path and refuses wrong arguments. Fingerprints depend on contents, not on names."""

import errno
import os
import re
import shutil

import numpy as np
import pytest
from batches import open_files
from sft_files import documents, error_of, write_episodes

from grain_sft import GrainSftError, corpus, open_corpus
from grain_sft.errors import CorpusFileError, WrongTypeError


@pytest.fixture
def tree(tmp_path, write_tokens):
    for name in ("b.npy", "a.npy", "sub/c.npy", "sub/deep/a.npy", "sub-2/z.npy", "a.bin", "notes.txt"):
        write_tokens(name, range(len(name)))
    return tmp_path


@pytest.fixture
def names(tree):
    """Return a function that opens a corpus and lists the paths of its shards, relative to `tree`."""
    return lambda where, **given: [os.path.relpath(each.path, tree) for each in open_corpus(where, **given).shards]


def test_the_files_of_a_folder_or_a_glob_are_sorted_and_a_list_keeps_its_order(tree, names, write_tokens):
    expected = ["a.npy", "b.npy", "sub-2/z.npy", "sub/c.npy", "sub/deep/a.npy"]
    assert names(tree) == names(f"{tree}/") == names(f"file://{tree}", format="files") == expected
    assert names(f"{tree}/*.npy") == names(f"{tree}/[ab].npy") == ["a.npy", "b.npy"]
    assert names(f"{tree}/sub*/*.npy") == ["sub-2/z.npy", "sub/c.npy"]
    assert names(f"{tree}/**/a.*") == ["a.bin", "a.npy", "sub/deep/a.npy"]
    listed = [tree / "sub/c.npy", f"{tree}/*.npy", str(tree / "sub/deep"), tree / "a.npy"]
    assert names(listed) == ["sub/c.npy", "a.npy", "b.npy", "sub/deep/a.npy", "a.npy"]
    (tree / "sub-2/latest").symlink_to(tree / "sub")
    for hidden in ("._a.npy", ".Trash/d.npy"):
        write_tokens(hidden, [1])
    assert names(tree) == expected  # the link leads to files that are read already, and hidden files are left out
    assert re.search(r"/latest: is a link .* Give the glob '.*/sub-2/\*\*/\*\.npy'", error_of(tree / "sub-2"))
    for split in ("train", "val"):
        shutil.copytree(tree / "sub", tree / "raw" / split)
        write_tokens(f"flat/c4_{split}_0.npy", [1])
    assert f"a glob of the training files, or '{tree}/raw/**/*.npy' for all files" in error_of(tree / "raw")
    assert f"holds {tree}/flat/c4_train_0.npy and {tree}/flat/c4_val_0.npy" in error_of(tree / "flat")
    (tree / "sub/e.npy").symlink_to(tree / "missing")
    assert "sub/e.npy: no such file" in error_of(tree / "sub")


@pytest.mark.parametrize("pattern", ["", "**/*.npy", "*/*.npy"])
def test_a_folder_that_cannot_be_listed_is_refused_but_lost_and_found_is_skipped(tree, names, monkeypatch, pattern):
    scandir = os.scandir

    def refusing(folder="."):
        if os.path.basename(os.fspath(folder).rstrip("/")) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(folder))
        return scandir(folder)

    (tree / "lost+found").mkdir()
    monkeypatch.setattr(os, "scandir", refusing)
    refused = {"lost+found"}
    assert {"sub/c.npy", "sub-2/z.npy"} <= set(names(tree / pattern))
    refused.add("sub-2")
    with pytest.raises(CorpusFileError, match=r"sub-2/?: can't be read .*Permission denied"):
        open_corpus(tree / pattern)


def test_paths_that_are_given_to_open_corpus_are_remapped(tree, names):
    remap = {"/old/": f"{tree}/"}
    assert names("/old/a.npy", path_remap=remap) == ["a.npy"]
    assert names(["/old/b.npy", "/old/sub*/*.npy"], path_remap=remap) == ["b.npy", "sub-2/z.npy", "sub/c.npy"]
    assert names(f"{tree}/c.npy", path_remap={f"{tree}/": f"{tree}/sub/"}) == ["sub/c.npy"]  # remapped once, not twice


def test_a_single_file_opens_by_every_form_of_its_path(tree, monkeypatch):
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree))
    for where in ("a.npy", "./a.npy", "~/a.npy", tree / "a.npy", f"file://{tree}/a.npy", ["a.npy"], (tree / "a.npy",)):
        corpus = open_corpus(where)
        assert [os.path.realpath(shard.path) for shard in corpus.shards] == [os.path.realpath(tree / "a.npy")]
        assert (corpus.num_tokens, corpus.dtype, corpus.shards[0].label) == (5, np.uint32, "")


def test_the_name_of_an_existing_file_is_not_a_pattern_and_tokens_may_look_like_text(tmp_path, write_tokens):
    path = write_tokens("run[1]/part[0].npy", [1, 2])
    write_tokens("run1/part0.npy", [1])
    # The first name is not that of a file of sources. Those are named "sources.bin" or "a.sources.bin".
    others = write_tokens("code_sources.bin", [1, 2]), write_tokens("brace.dat", [ord("{"), 1])
    for where in (path.parent, path, [path], *others):
        assert open_corpus(where).num_tokens == 2
    # The bytes of these tokens are those of the text "aaaaaaaa".
    assert open_corpus(write_tokens("text.dat", [0x61616161] * 2), format="files", dtype="uint32").num_tokens == 2


@pytest.mark.parametrize("where", ["none.npy", "none.bin", "none", "none.json", "none/", "none.txt", "none.parquet"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_missing_path_is_named(tmp_path, where, as_list):
    path = f"{tmp_path}/{where}"
    with pytest.raises(GrainSftError) as error:
        open_corpus([path] if as_list else path)
    assert isinstance(error.value, OSError) and path.rstrip("/") in str(error.value)


def test_paths_without_token_files_and_unknown_formats_are_refused(tmp_path):
    """test_sidecars.py tests files whose names are not those of token files."""
    assert f"{tmp_path}/*.npy: the glob matches no file" in error_of(f"{tmp_path}/*.npy")
    assert f"{tmp_path}: holds no .npy file. Give a glob" in error_of(tmp_path)
    assert "empty list of files: a corpus has at least one" in error_of([])
    assert "root is an empty path" in error_of(tmp_path, root="")
    assert "format 'parquet': expected one of files, index, mix, olmo" in error_of(tmp_path, format="parquet")
    assert "takes one path, not a list of 1" in error_of([tmp_path], format="mix")
    assert "is a URL with a query" in error_of(["https://host/x.npy?download=true"])


def test_an_index_replaces_no_file_of_its_corpus(tree):
    corpus = open_corpus(tree / "sub")
    (tree / "link.json").symlink_to(tree / "sub/c.npy")
    for name in ("sub/c.npy", "sub/../sub/deep/a.npy", "link.json"):
        with pytest.raises(GrainSftError, match="is an input, which the output"):
            corpus.save(tree / name)
    assert open_corpus(tree / "sub") == corpus


OUTSIDE = """
import grain_sft.corpus as c
class Dump(c.Format):
    any_path = True
class Whole(Dump):
    def split(self, home, listing):
        return c.Split(files=(home,), metadata=c.CorpusMetadata(), dtypes=("uint16",))
"""


def test_a_users_format_opens_only_by_its_name(tmp_path, write_tokens, monkeypatch):
    """tests/test_plugin.py tests a user's format that has documents."""
    (tmp_path / "outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    path = write_tokens("a.dump", [1, 2, 3], "uint16")
    assert open_corpus(path, format="outside:Whole").num_tokens == 3
    assert "Dump.split returned no files" in error_of(tmp_path, format="outside:Dump")
    assert "holds no .npy file" in error_of(tmp_path)
    assert "'outside:Other' cannot be imported" in error_of(write_tokens("b.npy", [1]), format="outside:Other")
    guarded = ("owner", "detect", "detect_list", "training_files", "check_parts", "whole_split", "part", "home")
    for where, name, value, message in (
        (path, "rank", "x", "rank is 'x'"),
        (path, "metadata_files", "(", f"metadata_files='(': {re.error.__name__}: "),
        (path, "split", lambda *given: 5, "Wrong.split: its result is 5 (int); expected a Split whose files are a tuple"),
        (path, "split", lambda *given: corpus.Split(str(path)), "(str); expected a Split whose files are"),
        ([path], "part", lambda *given: corpus.TokenFile("b"), "Wrong.part returned TokenFile(tokens='b'"),
        (path, "read", lambda *given: 7, "the corpus that the format returns is 7"),
        *(([tmp_path], name, None, "Wrong: TypeError: 'NoneType' object is not callable. Fix its") for name in guarded),
    ):
        members = dict.fromkeys(("detect", "owner"), lambda self, path, listing: path) | {name: value}
        monkeypatch.setitem(corpus.FORMATS._entries, "wrong", type("Wrong", (corpus.Format,), members))
        assert message in error_of(where)


def test_a_dtype_may_be_given_in_the_forms_that_numpy_accepts(write_tokens):
    for dtype in ("uint32", "u4", "<u4", np.uint32, np.dtype("uint32")):
        corpus = open_corpus(write_tokens("a.npy", range(4)), dtype=dtype)
        assert corpus.dtype == np.uint32 and corpus.num_tokens == 4, dtype


@pytest.mark.parametrize("where", [5, None, 1.5, b"a.npy", {"a": 1}, [5], ["a.npy", None], object()])
def test_a_path_of_a_wrong_type_is_an_error(where):
    with pytest.raises(WrongTypeError, match=r"where(: an item)? is .*expected a path"):
        open_corpus(where)


DTYPES = ("int32", "float32", ">u4", "bool", "u4,u4", "nonsense", "(2,u4", [("a", "u4")], "S4", "O")
WRONG_OPTIONS = [
    *(("dtype", value, "uint8, uint16, uint32, uint64") for value in DTYPES),
    *(("eos_token_id", value, f"={value!r}: expected an id that uint16") for value in (-1, 1 << 16, True, "0", 1.5)),
    *((name, 5, "") for name in ("format", "tokenizer", "root", "label_mask_paths", "remote", "dtype")),
    *(("path_remap", value, "") for value in (["a"], {"a": 5})),
    *(("use_loss_mask", value, "") for value in ("no", 1)),
    ("label_mask_paths", [5], ""),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG_OPTIONS)
def test_a_wrong_value_of_an_option_is_an_error_that_names_the_option(write_tokens, name, value, expected):
    message = error_of(write_tokens("a.npy", range(4), "uint16"), **{"dtype": "uint16", name: value})
    assert name in message and expected in message and "a.npy: eos_token_id" not in message


def test_a_corpus_is_a_value_without_open_files(tree):
    one, other = open_corpus(tree), open_corpus(tree)
    assert one == other and one is not other and repr(one) == repr(other)
    assert repr(one).startswith(f"Corpus(shards=5, num_tokens={one.num_tokens}, dtype=uint32, eos_token_id=None")
    assert one.fingerprint in repr(one)
    with_eos = open_corpus(tree, eos_token_id=0)
    assert one != with_eos and with_eos.num_documents == 5 and not open_files(tree)


VARIED = np.arange(20_000) * 2_654_435_761 % 50_021


@pytest.fixture
def folder(tmp_path, write_tokens):
    write_tokens("data/a.npy", VARIED)
    write_tokens("data/b.npy", VARIED[:300])
    return tmp_path / "data"


def fingerprint(where, **options):
    return open_corpus(where, **options).fingerprint


def test_names_labels_headers_and_the_tokenizers_name_do_not_change_the_fingerprint(folder, tmp_path):
    expected = fingerprint(folder)
    other = shutil.copytree(folder, tmp_path / "other" / "place")
    assert fingerprint(tmp_path / "other") == expected
    (other / "b.npy").rename(other / "c.npy")
    assert fingerprint(other) == expected
    (other / "mix.txt").write_text("web,a.npy\ncode,c.npy\n")
    assert fingerprint(other / "mix.txt", tokenizer="some") == expected
    np.save(other / "a.npy", VARIED.astype(np.uint32))
    assert fingerprint(other) == expected


def test_the_files_their_order_and_length_the_dtype_and_the_eos_change_the_fingerprint(folder):
    first, second = listed = [folder / "a.npy", folder / "b.npy"]
    found = [fingerprint(paths) for paths in (listed, [second, first], listed[:1], [*listed, second])]
    found += [fingerprint(folder, dtype=dtype) for dtype in ("uint8", "uint16", "uint64")]
    found += [fingerprint(folder, eos_token_id=eos) for eos in (0, 1, 100_257)]
    for length in (20_000, 30_000):  # both lengths have the same first and last 4 KiB: zeros
        np.zeros(length, np.uint32).tofile(second)
        found.append(fingerprint(folder))
    assert len(set(found)) == len(found)
    assert fingerprint(folder, eos_token_id=np.int64(7)) == fingerprint(folder, eos_token_id=7)


def test_sidecars_change_the_fingerprint(tmp_path):
    same = fingerprint(write_episodes(tmp_path / "same", documents()))
    assert fingerprint(write_episodes(tmp_path / "again", documents())) == same
    for name in ("mask.bin", "episodes.idx"):
        path = write_episodes(tmp_path / name, documents()) / "train" / "shard_00000" / name
        np.memmap(path, np.uint8, "r+")[8] ^= 1
        assert fingerprint(tmp_path / name) != same, name


def test_the_first_and_the_last_4_kib_change_the_fingerprint(folder):
    before = fingerprint(folder)
    for place in (0, 1023, -1024, -1):
        changed = VARIED.astype(np.uint32)
        changed[place] += 1
        changed.tofile(folder / "a.npy")
        assert fingerprint(folder) != before, place


def test_the_fingerprint_is_the_recorded_one(folder):
    # A run resumes only if the fingerprint is the same. If you change how it is computed, raise FINGERPRINT_VERSION and
    # record the new value here.
    assert fingerprint(folder, eos_token_id=1) == "sha256:c64f2a83cc59bf92c3dfdcb1c31b35098da5b2ff0c1135df77a8772bdf777eca"
