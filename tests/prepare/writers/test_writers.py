"""Each format's files against what its original tool writes for the same documents: `sft_files`, or plain Python."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sft_files

from grain_sft.prepare import FORMATS, Dataset, Request
from grain_sft.prepare.documents import Documents, Ids, in_blocks
from grain_sft.prepare.writers import Plan, SplitStatistics

TOKENIZER = {"kind": "test", "sha256": "0" * 64, "vocab_size": 500, "eos_token_id": 1, "special_tokens": {"<|sys|>": 4}}


class Given(Documents):
    """Documents in memory."""

    def __init__(self, docs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> None:
        lengths = np.array([len(tokens) for tokens, _ in docs], np.uint32)
        firsts = np.array([0, len(docs)])
        first_weights = any(loss[0] for _, loss in docs)
        super().__init__(lengths, np.cumsum(lengths) - lengths, firsts, np.uint16, docs[0][1].dtype, first_weights)
        self._tokens, self._loss = (np.concatenate(part) for part in zip(*docs, strict=True))

    def fill(self, part: int, start: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        tokens[:], loss[:] = (array[start : start + len(tokens)] for array in (self._tokens, self._loss))

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        for some in in_blocks(self.lengths, ids, 7, 100):
            yield np.stack([some * 0 + 3, some + 1], axis=1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grain_sft.prepare.documents.BLOCK_DOCUMENTS", 7)


def documents(weighted: bool) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """50 documents, one of them a token long."""
    found = sft_files.documents(50, 50, high=500, weights=weighted)
    found[3] = found[3][0][:1], found[3][1][:1]
    return found


def assert_files(found: Path, expected: Path) -> None:
    """Every file of `expected`, which sft_files wrote, is in `found`."""
    for path in expected.iterdir():
        read = gzip.decompress if path.suffix == ".gz" else bytes
        assert read((found / path.name).read_bytes()) == read(path.read_bytes()), path.name


def joined(docs: list[Any], ids: Any, part: int) -> npt.NDArray[Any]:
    return np.concatenate([docs[i][part] for i in ids])


def written(folder: Path, format: str, docs: list[Any], *, val: int = 0, **options: Any) -> Plan:
    request = Request((Dataset(("a.jsonl",)),), "primer", "spm.model", format, **options)
    ids = np.random.default_rng(1).permutation(len(docs))
    splits = {"train": ids[val:], **({"val": ids[:val]} if val else {})}
    losses = {name: joined(docs, part, 1) for name, part in splits.items()}
    counts = {
        name: SplitStatistics(len(part), len(losses[name]), int(np.count_nonzero(losses[name])))
        for name, part in splits.items()
    }
    binary = all(set(np.unique(loss)) <= {0, 1} for _, loss in docs)
    plan = Plan(str(folder), request, TOKENIZER, Given(docs), splits, counts, binary)
    made = FORMATS[format]
    made.check(plan)
    for split in splits:
        tasks = made.tasks(plan, split)
        assert [task.number for task in tasks] == list(range(len(tasks)))
        for task in reversed(tasks):  # in any order
            made.write(plan, task)
    made.finish(plan)
    return plan


@pytest.mark.parametrize("part_bytes", [8, 34, 100, 1 << 30])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_olmo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, size: int) -> None:
    monkeypatch.setattr("grain_sft.prepare.documents.BLOCK_DOCUMENTS", size)
    docs = documents(weighted=False)
    plan = written(tmp_path, "olmo", docs, part_bytes=part_bytes)
    order = plan.splits["train"]
    tokens, mask = joined(docs, order, 0), joined(docs, order, 1)
    folder = tmp_path / "train"
    alone = sft_files.write_olmo(tmp_path / "alone", [docs[i] for i in order], part_tokens=part_bytes // 2)
    assert_files(folder, alone)
    assert len(sft_files.tokens_of(folder)) == len(sft_files.tokens_of(alone))
    statistics = json.loads((folder / "dataset_statistics.json").read_text())["overall_statistics"]
    assert statistics["total_tokens"] == len(tokens) and statistics["trainable_tokens"] == mask.sum()
    assert np.fromfile(folder / "sources.bin", "<i8").reshape(-1, 2).tolist() == [[3, i + 1] for i in order]


@pytest.mark.parametrize("format", ["olmo", "episodes", "primer", "openchat"])
def test_training_documents_have_the_same_paths_with_and_without_validation(tmp_path: Path, format: str) -> None:
    if format == "openchat":
        pytest.importorskip("pyarrow")
    paths = {}
    for held_out in (0, 4):
        folder = tmp_path / str(held_out)
        written(folder, format, documents(weighted=False), val=held_out)
        paths[held_out] = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert paths[0] < paths[4]
    assert all("val" in path or "eval" in path for path in paths[4] - paths[0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [1, 40, 111, 10**6])
def test_episodes(tmp_path: Path, most: int, weighted: bool) -> None:
    docs = documents(weighted)
    plan = written(tmp_path, "episodes", docs, val=4, shard_tokens=most)
    for split, ids in plan.splits.items():
        shards: list[list[int]] = [[]]
        for i in ids:  # the rule of the tool's EpisodeShardWriter
            used = sum(len(docs[j][0]) for j in shards[-1])
            if used and used + len(docs[i][0]) > most:
                shards.append([])
            shards[-1].append(i)
        folders = sorted((tmp_path / split).glob("shard_*"))
        assert [folder.name for folder in folders] == [f"shard_{number:05d}" for number in range(len(shards))]
        for folder, shard in zip(folders, shards, strict=True):
            alone = tmp_path / "alone" / split / folder.name
            sft_files.write_episodes(alone, [docs[i] for i in shard], flat=True, metadata=False)
            assert_files(folder, alone / "train")
    metadata = json.loads((tmp_path / "dataset_metadata.json").read_text())
    assert metadata["schema"] == "episode_indexed_sft_v1" and metadata["has_loss_mask"]
    assert (metadata["num_train_episodes"], metadata["num_val_episodes"]) == (46, 4)
    assert metadata["token_dtype"] == "uint32"


def test_primer(tmp_path: Path) -> None:
    docs = documents(weighted=False)
    plan = written(tmp_path, "primer", docs, val=6)
    for split, ids in plan.splits.items():
        sft_files.write_primer(tmp_path / "alone", [docs[i] for i in ids], split=split, meta=False)
    assert_files(tmp_path, tmp_path / "alone")
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["splits"]["val"]["num_examples"] == 6


@pytest.mark.parametrize("weighted", [False, True])
def test_openchat(tmp_path: Path, weighted: bool) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    docs = documents(weighted)
    plan = written(tmp_path, "openchat", docs, val=3)
    for split, name in (("train", "train"), ("val", "eval")):
        table = parquet.read_table(tmp_path / f"openchat.{name}.parquet")
        assert json.loads(table.schema.metadata[b"metadata_json"])
        types = [str(field.type) for field in table.schema]
        integers = ["list<element: int32>"] * 4
        assert types == ["int32", "float", *integers, "list<element: float>"]
        found, expected = table.to_pydict(), sft_files.openchat_columns([docs[i] for i in plan.splits[split]])
        assert found.pop("num_seqs") == pytest.approx(expected.pop("num_seqs"), rel=1e-6)
        assert found == expected
        first = np.fromfile(tmp_path / f"openchat.{name}.first_weights.bin", "<f4")
        assert first.tolist() == [float(docs[i][1][0]) for i in plan.splits[split]]
