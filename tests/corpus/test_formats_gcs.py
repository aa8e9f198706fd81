"""A corpus that is opened in a bucket, by a remapped path or from a saved index equals the local corpus."""

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import batches
import numpy as np
import pytest
import sft_files as sft
from megatron_corpora import write_megatron

import grain_sft
from grain_sft.corpus import boundary_documents
from grain_sft.corpus.formats import metadata

FORMATS = ("olmo", "episodes", "primer", "openchat")


@pytest.fixture
def docs():
    """Documents of the training split, by the name of the format."""
    return {name: sft.documents(60, weights=name in ("episodes", "openchat")) for name in FORMATS}


@pytest.fixture
def folder(tmp_path, docs):
    """A folder with a corpus in each format. Each has a training split, and its first 5 documents as a validation split."""
    root = tmp_path / "data"
    sft.write_olmo(root / "olmo" / "train", docs["olmo"], part_tokens=300, sources=True)
    sft.write_olmo(root / "olmo" / "val", docs["olmo"][:5])
    (root / "olmo" / "prepare.json").write_text(json.dumps({"tokenizer": {"eos_token_id": sft.EOS}}))
    sft.write_episodes(root / "episodes", docs["episodes"], shards=2)
    sft.write_episodes(root / "episodes", docs["episodes"][:5], split="val")
    sft.write_primer(root / "primer", docs["primer"][:5], split="val")
    sft.write_primer(root / "primer", docs["primer"], sources=True)
    sft.write_openchat(root / "openchat", docs["openchat"], sources=True)
    sft.write_openchat(root / "openchat", docs["openchat"][:5], split="eval")
    return root


@pytest.fixture
def bucket(client, folder, request):
    """Address of a bucket with a copy of `folder`. In a test with the parameter `name`, the copy is only of this format."""
    name = request.node.callspec.params.get("name", "")
    client.put(f"{folder / name}/", f"bucket/sft/{name}", recursive=True)
    yield "gs://bucket/sft"
    client.rm("bucket/sft", recursive=True)


def assert_same(one, other):
    assert one.fingerprint == other.fingerprint and one.dtype == other.dtype
    for name in ("eos_token_id", "tokenizer_sha256", "source_names"):
        assert getattr(one, name) == getattr(other, name)
    sources = (grain_sft.NpyDataSource(grain_sft.WindowLayout(each, 16)) for each in (one, other))
    batches.assert_same(*(source.read([0, 11, 3, -1]) for source in sources))


@pytest.mark.parametrize("name", FORMATS)
def test_a_corpus_in_a_bucket_equals_the_local_corpus(folder, bucket, docs, name, tmp_path):
    local, remote = grain_sft.open_corpus(folder / name), grain_sft.open_corpus(f"{bucket}/{name}")
    assert_same(remote, local)
    remote.save(tmp_path / "index.json")
    again = grain_sft.open_corpus(tmp_path / "index.json")
    assert again == remote
    named = grain_sft.open_corpus(f"{bucket}/{name}", format=name)
    for corpus in (remote, again, named, grain_sft.open_corpus(f"{bucket}/{name}/")):
        sft.assert_documents(corpus, docs[name], sources=name != "episodes")
    sft.assert_documents(grain_sft.open_corpus(f"{bucket}/{name}/val"), docs[name][:5])
    assert_same(grain_sft.open_corpus(f"/nowhere/{name}", path_remap={"/nowhere": bucket}), local)


@pytest.mark.parametrize("name", ["olmo", "episodes", "primer"])
def test_an_index_opens_after_its_files_moved_with_it_or_were_remapped(folder, docs, name, tmp_path):
    local = grain_sft.open_corpus(folder / name)
    local.save(folder / "index.json")
    local.save(tmp_path / "elsewhere" / "index.json")
    assert grain_sft.open_corpus(folder / "index.json") == local
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    sft.assert_documents(grain_sft.open_corpus(moved / "index.json"), docs[name], sources=name != "episodes")
    index = tmp_path / "elsewhere" / "index.json"
    message = sft.error_of(index)
    for part in (f"{folder}/{name}", "can't be found", "path_remap", str(index)):
        assert part in message
    again = grain_sft.open_corpus(index, path_remap={str(folder): str(moved)})
    assert_same(again, grain_sft.open_corpus(moved / name))
    sft.assert_documents(again, docs[name], sources=name != "episodes")
    loss = again.shards[-1].loss
    os.truncate(loss.path, loss.size - 4)
    assert f"{loss.path}: the file shrank since it was indexed" in sft.error_of(moved / "index.json")


@pytest.mark.parametrize("lists", [True, False])
def test_sidecars_in_a_bucket_are_found_for_listed_files(folder, bucket, lists, monkeypatch):
    """In the case `lists=False`, files can be read but folders can't be listed."""
    local = {name: grain_sft.open_corpus(folder / name) for name in ("olmo", "episodes", "primer")}
    if not lists:
        monkeypatch.setattr("grain_sft.corpus.formats.metadata._list", lambda folder: [])
    patterns = {"olmo": "train/token_ids*.npy", "episodes": "train/*/tokens.bin", "primer": "train_input_ids.bin"}
    for name, pattern in patterns.items():
        parts = sorted(str(path.relative_to(folder / name)) for path in (folder / name).glob(pattern))
        corpus = grain_sft.open_corpus([f"{bucket}/{name}/{part}" for part in parts], eos_token_id=sft.EOS)
        assert corpus.fingerprint == dataclasses.replace(local[name], eos_token_id=sft.EOS).fingerprint, name
    for pattern in ("*.npy", "*"):
        corpus = grain_sft.open_corpus(f"{bucket}/olmo/train/{pattern}", eos_token_id=sft.EOS)
        assert corpus.fingerprint == local["olmo"].fingerprint


def test_folders_in_a_bucket_are_listed_only_if_necessary(client, calls_of, tmp_path):
    for path in ("tokens/a", "tokens/.hidden", "run[1]/a", "run1/a", "run1/b"):
        client.pipe_file(f"bucket/{path}.npy", np.arange(9, dtype=np.uint32).tobytes())
    listed = calls_of(metadata, "_list")
    assert grain_sft.open_corpus("gs://bucket/tokens").num_tokens == 9
    assert ("gs://bucket/tokens",) in listed and ("gs://bucket",) not in listed  # the parent may hold very many files
    grain_sft.open_corpus(["gs://bucket/tokens/*", "gs://bucket/run[1]"]).save(tmp_path / "index.json")
    listed.clear()
    assert grain_sft.open_corpus(tmp_path / "index.json").num_tokens == 18 and not listed


def test_the_files_of_shards_in_a_bucket_are_listed_and_read_at_once(tmp_path, monkeypatch):
    local = grain_sft.open_corpus(sft.write_episodes(tmp_path, sft.documents(40), shards=9))
    start, _ = local.documents
    remote = local.map_files(lambda file: dataclasses.replace(file, path=f"gs://b{file.path}"))
    together = threading.Barrier(9, timeout=10)  # breaks if one request waits for another

    def local_path(path):
        if "shard_" in path:
            together.wait()
        return Path(path.removeprefix("gs://b"))

    monkeypatch.setattr(boundary_documents, "read_whole", lambda file: local_path(file.path).read_bytes())
    assert remote.documents.start.tolist() == start.tolist()
    monkeypatch.setattr(metadata, "_list", lambda folder: [path.name for path in local_path(folder).glob("*")])
    assert grain_sft.corpus.FORMATS.make("pairs").detect(f"gs://b{tmp_path}", grain_sft.corpus.DirectoryListing()) is None


def megatron_paths(place):
    """Return every kind of path that opens Megatron's files. The last is a blend with weights."""
    web, code = f"{place}/web", f"{place}/code"
    return [place, web, f"{web}.idx", f"{place}/*.bin", [code, web], [0.3, web, 0.7, code]]


def megatron_config(place):
    rows = {"kind": "megatron_gpt", "sequence_length": 16, "num_samples": 60}
    corpus = {"path": megatron_paths(place)[-1], "format": "megatron", "split": "3,1", "eos_token_id": sft.EOS}
    return {"corpus": corpus, "layout": rows, "sampler": {"global_batch_size": 4, "seed": 0, "epochs": 1}}


def test_megatrons_files_in_a_bucket_equal_the_local_files(tmp_path, client, own_cache, monkeypatch):
    for name, count in (("web", 40), ("code", 30)):
        write_megatron(tmp_path / "data" / name, [[tokens.tolist()] for tokens, _ in sft.documents(count)])
    client.put(f"{tmp_path / 'data'}/", "bucket/megatron/", recursive=True)
    bucket, local = "gs://bucket/megatron", str(tmp_path / "data")
    for paths in zip(megatron_paths(bucket), megatron_paths(local), strict=True):
        for split in (None, "3,1"):
            found, expected = (grain_sft.open_corpus(path, split=split) for path in paths)
            assert found.weights == expected.weights
            assert_same(*(dataclasses.replace(each, weights=()) for each in (found, expected)))
            np.testing.assert_array_equal(found.sequences.start, expected.sequences.start)
    pipelines = [grain_sft.load(megatron_config(place)) for place in (local, bucket)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", f"{bucket}/cache")
    shared = grain_sft.load(megatron_config(bucket))
    assert len({each.receipt.code for each in (*pipelines, shared)}) == 1
    assert client.glob("bucket/megatron/cache/megatron/*.arrays")
    for step in (0, 5, len(shared) - 1):
        batches.assert_same(pipelines[1][step], pipelines[0][step])
        batches.assert_same(shared[step], pipelines[0][step])
    remote = grain_sft.open_corpus(f"{bucket}/web", split="3,1", subset="valid")
    remote.save(tmp_path / "index.json")
    assert grain_sft.open_corpus(tmp_path / "index.json") == remote
    client.put(f"{local}/code.idx", "bucket/megatron/web.idx")
    with pytest.raises(grain_sft.GrainSftError, match=r"web\.idx"):
        _ = remote.documents
    with pytest.raises(grain_sft.GrainSftError, match=r"web\.bin: .* bytes, but .*web\.idx lists"):
        grain_sft.open_corpus(f"{bucket}/web")
