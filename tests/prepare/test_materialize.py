"""`materialize` writes packed rows whole or not at all, and continues an interrupted run. Damaged files are noticed."""

import dataclasses
import json
import shutil
import types

import pytest
from prepared import digests
from sft_files import error_of

import grain_sft
from grain_sft import NpyDataSource, PackedLayout, PaddedLayout
from grain_sft.errors import CorpusError, CorpusFileError, LayoutError, WrongTypeError
from grain_sft.layout import MaterializedLayout
from grain_sft.prepare.materialize import materialize

LENGTH = 64
pytestmark = pytest.mark.usefixtures("own_cache")
pytest_plugins = ["written_rows"]  # the fixtures `layout` and `written`


def test_an_interrupted_run_leaves_no_rows_and_continues_where_it_stopped(tmp_path, layout, monkeypatch):
    whole = materialize(layout, tmp_path / "whole", shard_bytes=1 << 10)
    calls, read = [], NpyDataSource.read

    def fails(self, rows):
        calls.append(rows)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(self, rows)

    monkeypatch.setattr(NpyDataSource, "read", fails)
    with pytest.raises(KeyboardInterrupt):
        materialize(layout, tmp_path / "rows", shard_bytes=1 << 10)
    assert not (tmp_path / "rows").exists()
    for _ in range(2):
        assert materialize(layout, tmp_path / "rows", shard_bytes=1 << 10) == whole
        assert len(calls) == 4 + len(whole["rows_of_shards"]) - 3  # the 3 shards that were finished are not read again
    assert digests(tmp_path / "rows") == digests(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "chats", "whole", "rows"}


@pytest.mark.parametrize("named", [True, False], ids=["with identity.json", "without identity.json"])
def test_unfinished_rows_of_another_layout_are_begun_anew(tmp_path, layout, monkeypatch, named):
    other = PackedLayout(layout.corpus, LENGTH, max_segments=2)
    materialize(other, tmp_path / "other", shard_bytes=1 << 10)
    made = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(NpyDataSource, "read", lambda self, rows: 1 / 0)
        materialize(other, tmp_path / "rows", shard_bytes=1 << 10)
    (work,) = [path for path in tmp_path.iterdir() if path.name not in made]
    shutil.copytree(tmp_path / "other", work / "corpus", dirs_exist_ok=True)
    if not named:
        (work / "identity.json").unlink()
    assert materialize(layout, tmp_path / "rows") == materialize(layout, tmp_path / "whole")
    assert digests(tmp_path / "rows") == digests(tmp_path / "whole")


def test_replaced_rows_are_noticed_whether_or_not_the_eos_is_given(tmp_path, layout):
    eos = materialize(layout, tmp_path / "rows", shard_bytes=1 << 12)["eos_token_id"]
    first, second, other = (tmp_path / "rows" / f"{name}.bin" for name in ("rows_0000", "rows_0001", "other"))
    for path, name in ((first, other), (second, first), (other, second)):
        path.rename(name)
    for options in ({}, {"eos_token_id": eos}, {"eos_token_id": eos + 1}):
        assert "A file was replaced" in error_of(tmp_path / "rows", **options)


def test_only_packed_rows_are_written_and_only_into_a_folder_that_holds_nothing_else(tmp_path, layout, monkeypatch):
    with pytest.raises(LayoutError, match=r"^PaddedLayout\(.*: only the rows of a PackedLayout can be written"):
        materialize(PaddedLayout(layout.corpus, LENGTH), tmp_path / "rows")
    with pytest.raises(LayoutError, match=r"^5: only the rows of a PackedLayout can be written"):
        materialize(5, tmp_path / "rows")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(LayoutError, match=r"is not empty, and holds no rows\.json"), monkeypatch.context() as patch:
        patch.setattr(type(layout.corpus), "content_hash", None)  # the folder is refused before all tokens are read
        materialize(layout, tmp_path / "full")
    materialize(layout, tmp_path / "rows")
    padded = dataclasses.replace(layout.corpus, pad_token_id=layout.corpus.padding_token_id + 1)
    for other in (PackedLayout(layout.corpus, LENGTH, max_segments=2), PackedLayout(padded, LENGTH)):
        with pytest.raises(LayoutError, match="holds other rows"):
            materialize(other, tmp_path / "rows")
    with pytest.raises(LayoutError, match=r"tokens\.bin: a corpus without rows"):
        MaterializedLayout(layout.corpus)
    with pytest.raises(WrongTypeError, match=r"corpus is 'a\.npy' \(str\)"):
        MaterializedLayout("a.npy", LENGTH)
    with pytest.raises(CorpusError, match="index materialized rows"):
        grain_sft.open_corpus(tmp_path / "rows").save(tmp_path / "index.json")


@pytest.mark.parametrize("name", ["rows_0001.bin", "loss_0001.bin", "documents_0001.idx"])
def test_files_that_are_missing_cut_short_or_replaced_are_errors(written, layout, name):
    path, source = written / name, NpyDataSource(MaterializedLayout(grain_sft.open_corpus(written)))
    data = path.read_bytes()
    for changed in (data[:-16], bytes([data[0] ^ 1]) + data[1:], None):
        path.unlink() if changed is None else path.write_bytes(changed)
        with pytest.raises((CorpusError, CorpusFileError), match=name if changed is None else "rows"):
            grain_sft.open_corpus(written)
        with pytest.raises(LayoutError, match=r"holds these rows, but they are damaged.*Remove the folder, and write"):
            materialize(layout, written, shard_bytes=1 << 10)
    if name.endswith(".bin"):
        path.write_bytes(data[:-16])
        with pytest.raises(CorpusFileError, match=name):
            source.read(range(len(source)))


def test_a_garbled_manifest_is_an_error_that_names_it(written):
    manifest = json.loads((written / "rows.json").read_text())
    for key, values in {
        "version": [1],
        "format": ["x"],
        "sequence_length": [32, "64", 2**31 - 1, 10**12],
        "rows_of_shards": [[], [0], ["x"]],
        "segments_dtype": ["int8", None],
        "most_segments": [3, -1, 1 << 40],
        "loss": ["labels"],
        "made_of": [None],
        "fingerprint": ["sha256:0"],
    }.items():
        for value in values:
            (written / "rows.json").write_text(json.dumps({**manifest, key: value}))
            assert "rows.json" in error_of(written)


def test_the_command_pack_writes_the_rows_of_materialize(tmp_path, layout, run_command):
    arguments = ["pack", tmp_path / "chats", "--sequence-length", LENGTH, "--algorithm", "best_fit_decreasing"]
    out = ["--materialize", tmp_path / "rows", "--output", tmp_path / "figures.json"]
    assert f"rows written  {tmp_path / 'rows'}" in run_command(*arguments, *out).out
    assert json.loads((tmp_path / "figures.json").read_text())["materialized"]["rows"] == len(layout)
    materialize(layout, tmp_path / "whole")
    assert digests(tmp_path / "rows") == digests(tmp_path / "whole")


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, layout, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=10))
    with pytest.raises(grain_sft.GrainSftError, match="GB free, but the rows take"):
        materialize(layout, tmp_path / "rows")
