"""A folder as an input means the files of records below it, in sorted order, locally and in a bucket."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from grain_sft.errors import CorpusFileError, PrepareError
from grain_sft.prepare.records import inputs

SAVED = Path(__file__).parents[2] / "golden/inputs/saved"


def files_in(folder: Path, names: list[str], text: str = "{}\n") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def named(where: str | Path) -> list[str]:
    return [entry.path for entry in inputs.list_inputs([[str(where)]])]


def error_of(where: str | Path) -> str:
    with pytest.raises(CorpusFileError) as error:
        named(where)
    return str(error.value)


TREE = [
    *("z.jsonl", "a/b.ndjson", "a/b/c.json.gz", "a.parquet", "B/X.JSONL.zst", "b/.x.jsonl", "b/_x.json"),
    *("c4-train.array_record-00000-of-00002", "one.arrayrecord", "d/e.arrow", "d/e.feather"),
]
IGNORED = [
    "readme.md", "notes.txt", "a/b.py", ".git/x.json", "a/_temporary/x.jsonl", "x.array_record.md5",
    "a.parquet.crc", "a/._x.jsonl",
]  # fmt: skip


def test_a_folder_means_its_files_of_records_but_not_its_texts_or_hidden_folders(tmp_path, monkeypatch, client):
    files_in(tmp_path, [*TREE, *IGNORED])
    monkeypatch.setattr(inputs, "_describe", lambda dataset, path, size, report: (inputs.Input(dataset, path, size, ""), ()))
    assert named(tmp_path) == named(f"{tmp_path}/") == sorted(f"{tmp_path}/{name}" for name in TREE)
    monkeypatch.chdir(tmp_path)
    assert named(".") == named("./") == sorted(TREE)
    for name in (*TREE, *IGNORED):
        client.pipe_file(f"bucket/tree/{name}", b"{}\n")
    for where in ("gs://bucket/tree", "gs://bucket/tree/", "gcs://bucket/tree"):
        assert named(where) == sorted(f"gs://bucket/tree/{name}" for name in TREE)
    for name in ("run[1]/a.jsonl", "run1/a.jsonl"):
        client.pipe_file(f"bucket/{name}", b"{}\n")
    assert named("gs://bucket/run[1]") == ["gs://bucket/run[1]/a.jsonl"] == named("gs://bucket/run[[]1]/*")
    client.pipe_file("bucket/tree/_delta_log/0.json", b"{}\n")
    assert "gs://bucket/tree: is a Delta table" in error_of("gs://bucket/tree")
    monkeypatch.setattr(Path, "is_dir", mock.Mock(side_effect=PermissionError))  # as in a folder that can't be entered
    assert "can't be read" in error_of(tmp_path)


def test_a_folder_without_records_means_its_texts(tmp_path):
    texts = ["A.TXT", "b/c.md", "b/d.txt"]
    files_in(tmp_path, [*texts, "b/e.py", ".cache/f.txt", "g.html"], "# A text\n")
    assert named(tmp_path) == sorted(f"{tmp_path}/{name}" for name in texts)
    assert "b: is a folder. Name the folder itself instead of a glob" in error_of(tmp_path / "*")
    with pytest.raises(CorpusFileError, match=r"names no file\. Expected \.jsonl.* or a folder of them"):
        named(files_in(tmp_path / "empty", ["a.py"]))
    (files_in(tmp_path / "one", ["a.jsonl"]) / "b.jsonl.xz").write_bytes(b"\xfd7zXZ\x00")
    with pytest.raises(PrepareError, match=r"b\.jsonl\.xz: not a plain, \.gz or \.zst file"):
        named(tmp_path / "one")
    twice = files_in(tmp_path / "twice", ["b/a.jsonl", "c/a.jsonl", "c/a.jsonl.XZ"])
    assert "c/a.jsonl.XZ: is next to the same file without compression, so its rec" in error_of(twice)
    table = files_in(tmp_path / "in", ["t/a.parquet", "t/_delta_log/0.json"])
    assert "in/t: is a Delta table, which may have files of old versions" in error_of(table)


def test_corpora_that_were_prepared_are_not_inputs(tmp_path, client):
    """Otherwise a finished run that is started again would read its own output."""
    made = ["prepare.json", "tokenizer/tokenizer.json", "train/corpus.json"]
    names = ["a.jsonl", "b.rejected.jsonl", *(f"out/{name}" for name in made), "out.rejected.jsonl", "out2/b.jsonl"]
    files_in(tmp_path, names)
    expected = ["a.jsonl", "b.rejected.jsonl", "out2/b.jsonl"]
    assert named(tmp_path) == [f"{tmp_path}/{name}" for name in expected]
    assert "out: is a prepared corpus. Name the files" in error_of(tmp_path / "out")
    for name in names:
        client.pipe_file(f"bucket/made/{name}", b"{}\n")
    assert named("gs://bucket/made") == [f"gs://bucket/made/{name}" for name in expected]


SPLITS = [
    (("a/train/1", "b/train/2", "a/other/x", "c/Training/3"), ("a/val/1", "b/eval/2"), "train and validation"),
    (("train-00000-of-00002", "train-00001-of-00002", "more"), ("test-00000-of-00001",), "test and train"),
    (("a/partial-train/0", "c4-train.00000-of-00001"), ("c4-validation.00000-of-00001",), "train and validation"),
]


@pytest.mark.parametrize(("one", "other", "splits"), SPLITS, ids=["folders", "files", "words"])
def test_files_of_several_splits_are_not_mixed(tmp_path, one, other, splits):
    """Repositories of datasets have a folder for each split, or the files of all splits in one folder."""
    files_in(tmp_path, [f"{name}.jsonl" for name in one])
    assert len(named(tmp_path)) == len(one)
    files_in(tmp_path, [f"{name}.jsonl" for name in other])
    first = ", ".join(sorted(f"{tmp_path}/{name}.jsonl" for name in (one[0], other[0])))
    with pytest.raises(CorpusFileError, match=rf"has files of the splits {splits}: {first}\. Expected one .*Name the"):
        named(tmp_path)
    assert named(tmp_path / f"{other[0]}*") == [f"{tmp_path}/{other[0]}.jsonl"]


def test_a_folder_may_be_a_link_but_not_to_a_folder_that_it_is_in(tmp_path):
    files_in(tmp_path, ["data/a.jsonl", "other/b.jsonl"])
    (tmp_path / "data/linked").symlink_to(tmp_path / "other")
    assert named(tmp_path / "data") == [f"{tmp_path}/data/a.jsonl", f"{tmp_path}/data/linked/b.jsonl"]
    (tmp_path / "data/twice").symlink_to(tmp_path / "other")
    with pytest.raises(CorpusFileError, match=r"data/twice: is the same folder as .*data/linked, so its files would be"):
        named(tmp_path / "data")
    (tmp_path / "data/twice").unlink()
    (tmp_path / "other/back").symlink_to(tmp_path / "data")
    assert "linked/back: is a link to a folder above it" in error_of(tmp_path / "data")


def test_the_error_of_a_dataset_with_several_splits_names_them(tmp_path):
    error = error_of(SAVED)
    assert error == f"{SAVED}: is a dataset with the splits train, test. Name one of them: {SAVED}/train"
    assert [Path(path).parent.name for path in named(error.rpartition(": ")[2])] == ["train", "train"]
    for splits in ({"train": {}, "test": {}}, [{"name": "train"}, {"name": "test"}]):  # of Hugging Face, of TensorFlow
        files_in(tmp_path, ["d-train.jsonl", "d-test.jsonl", "features.json"])
        (tmp_path / "dataset_info.json").write_text(json.dumps({"splits": splits}))
        error = error_of(tmp_path)
        assert "has the splits train, test. Name the files" in error
        assert named(error.rpartition(": ")[2].strip("'")) == [f"{tmp_path}/d-train.jsonl"]


def test_a_dataset_in_a_bucket_is_read_as_a_local_one(client):
    client.put(str(SAVED), "bucket/saved", recursive=True)
    assert "the splits train, test. Name one of them: gs://bucket/saved/train" in error_of("gs://bucket/saved")
    here, there = (list(inputs.all_records([[str(where)]])) for where in (SAVED / "train", "gs://bucket/saved/train"))
    assert [each[1:] for each in there] == [each[1:] for each in here] and len({path for path, *_ in there}) == 2


def test_caches_in_the_folder_of_a_saved_dataset_are_not_read(tmp_path):
    """`map` and `filter` leave caches in the folder from which their dataset was loaded. These are not part of the dataset."""
    folder = shutil.copytree(SAVED / "train", tmp_path / "one")
    (folder / "cache-1f0b9a.arrow").write_bytes((folder / "data-00000-of-00002.arrow").read_bytes())
    expected = [f"{folder}/data-0000{number}-of-00002.arrow" for number in range(2)]
    assert named(folder) == expected
    (folder / "state.json").unlink()
    assert named(folder) == expected


DAMAGED_DATASETS = [
    (None, "data-00001-of-00002.arrow: missing"),
    ('{"_indices_data_files": ["i.arrow"]}', "a file of indices selects its rows"),
    ('{"_data_files": [{}]}', "state.json: can't be read as a file of the library datasets"),
    ("{", "state.json: can't be read as a file of the library datasets"),
]


@pytest.mark.parametrize(("state", "expected"), DAMAGED_DATASETS)
def test_a_saved_dataset_with_a_missing_file_or_a_wrong_state_is_an_error(tmp_path, state, expected):
    folder = shutil.copytree(SAVED / "train", tmp_path / "one")
    if state is None:
        (folder / "data-00001-of-00002.arrow").unlink()
    else:
        (folder / "state.json").write_text(state)
    with pytest.raises(CorpusFileError, match=expected):
        named(folder)
