"""`convert` writes the files of each format's original tool. `sft_files` and plain Python here imitate these tools."""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import sft_files
from prepared import save_trained, write_chats
from pyarrow import parquet

from grain_sft.errors import PrepareError
from grain_sft.prepare import Dataset, Request, convert, prepare
from grain_sft.prepare.writers import olmo

Documents = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grain_sft.prepare.documents.BLOCK_DOCUMENTS", 7)


def written(folder: Path, format: str, *, weighted=False, val=4, **options) -> dict[str, Documents]:
    """Convert 50 documents to a format in `folder`/out, and return them by split. One document has a single token."""
    docs = sft_files.documents(50, 50, high=500, weights=weighted)
    docs[9] = docs[9][0][:1], docs[9][1][:1]
    splits = {name: some for name, some in {"train": docs[val:], "val": docs[:val]}.items() if some}
    for split, some in splits.items():
        sft_files.write_episodes(folder / "given", some, split=split, dtype="uint16")
    convert(folder / "given", folder / "out", format, **options)
    return splits


def assert_files(found: Path, expected: Path) -> None:
    """Check that `found` has each file of `expected`, which `sft_files` wrote, with the same content."""
    for path in expected.iterdir():
        read = gzip.decompress if path.suffix == ".gz" else bytes
        assert read((found / path.name).read_bytes()) == read(path.read_bytes()), path.name


@pytest.mark.parametrize("part_bytes", [8, 34, 100, 1 << 30])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_olmo_files_are_those_of_the_original_tool_for_every_size_of_parts(tmp_path, monkeypatch, part_bytes, size):
    monkeypatch.setattr("grain_sft.prepare.documents.BLOCK_DOCUMENTS", size)
    for split, docs in written(tmp_path, "olmo", part_bytes=part_bytes).items():
        folder, alone = tmp_path / "out" / split, tmp_path / "alone" / split
        assert_files(folder, sft_files.write_olmo(alone, docs, part_tokens=part_bytes // 2))
        assert len(sft_files.tokens_of(folder)) == len(sft_files.tokens_of(alone))
        statistics = json.loads((folder / "dataset_statistics.json").read_text())["overall_statistics"]
        tokens, mask = sft_files.joined(docs)
        assert (statistics["total_tokens"], statistics["trainable_tokens"]) == (len(tokens), mask.sum())


@pytest.mark.parametrize("format", ["olmo", "episodes", "primer", "openchat"])
def test_training_files_have_the_same_paths_with_and_without_a_validation_split(tmp_path: Path, format: str) -> None:
    paths = {}
    for held_out in (0, 4):
        written(tmp_path / str(held_out), format, val=held_out)
        folder = tmp_path / str(held_out) / "out"
        paths[held_out] = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert paths[0] < paths[4]
    assert all("val" in path or "eval" in path for path in paths[4] - paths[0])


def test_more_shards_than_their_names_can_sort_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grain_sft.prepare.writers.episodes.MAX_SHARDS", 45)
    with pytest.raises(PrepareError, match=r"shard_tokens=1: 46 shards in train.*at most 45.*--tokens-per-shard"):
        written(tmp_path, "episodes", shard_tokens=1)
    convert(tmp_path / "given", tmp_path / "out", "episodes")  # the refused call left no unfinished work


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [1, 40, 111, 10**6])
def test_episodes_are_divided_into_shards_as_by_the_original_tool(tmp_path: Path, most: int, weighted: bool) -> None:
    for split, docs in written(tmp_path, "episodes", weighted=weighted, shard_tokens=most).items():
        shards: list[Documents] = [[]]
        for document in docs:  # the rule of the tool's EpisodeShardWriter
            used = sum(len(tokens) for tokens, _ in shards[-1])
            if used and used + len(document[0]) > most:
                shards.append([])
            shards[-1].append(document)
        folders = sorted((tmp_path / "out" / split).glob("shard_*"))
        assert [folder.name for folder in folders] == [f"shard_{number:05d}" for number in range(len(shards))]
        for folder, shard in zip(folders, shards, strict=True):
            alone = tmp_path / "alone" / split / folder.name
            sft_files.write_episodes(alone, shard, flat=True, metadata=False)
            assert_files(folder, alone / "train")
    metadata = json.loads((tmp_path / "out/dataset_metadata.json").read_text())
    assert metadata["schema"] == "episode_indexed_sft_v1" and metadata["has_loss_mask"]
    assert (metadata["num_train_episodes"], metadata["num_val_episodes"]) == (46, 4)
    assert metadata["token_dtype"] == "uint32"


def test_primer_files_are_those_of_the_original_tool(tmp_path: Path) -> None:
    for split, docs in written(tmp_path, "primer").items():
        sft_files.write_primer(tmp_path / "alone", docs, split=split, meta=False)
    assert_files(tmp_path / "out", tmp_path / "alone")
    assert json.loads((tmp_path / "out/meta.json").read_text())["splits"]["val"]["num_examples"] == 4


@pytest.mark.parametrize("weighted", [False, True])
def test_openchat_tables_are_those_of_the_original_tool(tmp_path: Path, weighted: bool) -> None:
    splits = written(tmp_path, "openchat", weighted=weighted)
    for docs, name in ((splits["train"], "train"), (splits["val"], "eval")):
        table = parquet.read_table(tmp_path / f"out/openchat.{name}.parquet")
        assert json.loads(table.schema.metadata[b"metadata_json"])
        types = [str(field.type) for field in table.schema]
        assert types == ["int32", "float", *["list<element: int32>"] * 4, "list<element: float>"]
        found, expected = table.to_pydict(), sft_files.openchat_columns(docs)
        assert found.pop("num_seqs") == pytest.approx(expected.pop("num_seqs"), rel=1e-6)
        assert found == expected
        first = np.fromfile(tmp_path / f"out/openchat.{name}.first_weights.bin", "<f4")
        assert first.tolist() == [float(loss[0]) for _, loss in docs]


WRONG: dict = {
    "rule put 10 documents in the splits .'train'.; expected each of the 20": {"rule": lambda ids, *_: {"train": ids[::2]}},
    "tasks returned parts of 0 tokens; expected the .* of train": {"tasks": lambda *_: None},
    "write wrote no file below": {"write": lambda *_: None},
    "finish: ZeroDivisionError: .*Fix its code": {"finish": lambda *_: 1 // 0},
    "split_paths has 'other' for train, which was not written": {"split_paths": {"train": "other"}},
    r"\n  code.format test_writers:WRITER": {},
}


def test_wrong_functions_and_changed_code_of_the_writer_of_another_package_are_refused(tmp_path, monkeypatch):
    chats, model = write_chats(tmp_path / "chats.jsonl", 20), save_trained(tmp_path)
    request = Request((Dataset((str(chats),)),), "primer", str(model), "test_writers:WRITER")
    for message, changes in WRONG.items():
        functions = {"write": lambda *each: olmo.write(*each)} | changes
        monkeypatch.setitem(globals(), "WRITER", dataclasses.replace(olmo.FORMAT, **functions))
        if not changes:
            prepare(request, tmp_path / "out", workers=1, overwrite=True)
            monkeypatch.setattr("grain_sft.prepare.writers.plan.code_sha256", lambda function: "other")
        with pytest.raises(PrepareError, match=message):
            prepare(request, tmp_path / "out", workers=1, overwrite=bool(changes))
