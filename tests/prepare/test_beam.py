"""Apache Beam writes the bytes of a local run, even if the runner does work in another order, twice or in another process."""

import concurrent.futures
import dataclasses
import random
import re
import sys
import weakref
from pathlib import Path

import pytest
from prepared import StoppedError, digests, save_trained, stamps, stop_half_way, write_chats

import grain_sft
from grain_sft.errors import MissingExtraError, PrepareError
from grain_sft.prepare import Dataset, Request, beam, documents, prepare
from grain_sft.prepare.chunks import Chunks
from grain_sft.prepare.records import inputs
from grain_sft.prepare.run import make_corpus
from grain_sft.prepare.target import Target
from grain_sft.storage import files

ANOTHER_PROCESS = ("--direct_running_mode=multi_processing", "--direct_num_workers=1")
FILES = 7


@pytest.fixture(autouse=True)
def _each_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 7 files of chats and a tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    for number in range(FILES):
        write_chats(folder / f"{number}.jsonl", 40 + 20 * number)
    save_trained(folder)
    return folder


def request_of(chats: Path | str, format: str = "olmo", **options: object) -> Request:
    datasets = (Dataset((f"{chats}/[0-4].jsonl",), "1.5"), Dataset((f"{chats}/[5-9].jsonl",)))
    options = {"datasets": datasets, "part_bytes": 30_000, "shard_tokens": 20_000, "max_length": 120, **options}
    return Request(template="primer", tokenizer=f"{chats}/spm.model", format=format, val_frac=0.1, **options)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize(
    ("format", "arguments", "resumed"),
    [("olmo", ANOTHER_PROCESS, False), ("episodes", (), True), ("primer", (), False), ("openchat", (), False)],
)
def test_beam_gives_the_bytes_of_a_local_run(chats, tmp_path, format, arguments, resumed):
    request = request_of(chats, format, on_error="stop" if arguments else "skip")
    expected = prepare(request, tmp_path / "local", workers=1)
    if resumed:
        with pytest.raises(StoppedError):
            prepare(request, tmp_path / "beam", workers=1, progress=stop_half_way)
        assert 2 < len(list(Path(Target(tmp_path / "beam").chunks).iterdir())) < FILES
        with pytest.raises(PrepareError, match=r"unfinished work(.|\n)*seed: 42 -> 7"):
            beam.prepare(dataclasses.replace(request, seed=7), tmp_path / "beam")
        assert left_behind(tmp_path) == [".beam.grain_sft-work"]
    assert beam.prepare(request, tmp_path / "beam", pipeline_args=arguments) == expected
    assert digests(tmp_path / "beam") == digests(tmp_path / "local")
    assert format != "olmo" or len(grain_sft.open_corpus(tmp_path / "beam/train").shards) > 3
    before = stamps(tmp_path / "beam")
    for function in (prepare, beam.prepare):
        assert function(request, tmp_path / "beam") == {**expected, "already": True}
    assert stamps(tmp_path / "beam") == before
    assert not left_behind(tmp_path)


class Twice(beam.Pipelines):
    """Pipelines that run each item twice, in random order, four at once. A runner that loses workers may do the same."""

    def run(self, name, step, items):
        copies = [item for item in items for _ in range(2)]
        random.Random(name).shuffle(copies)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda item: list(step(item, self.shared)), copies))
        assert len(found) == 2 * len(items) > 2 and not [failure for [(*_, failure)] in found if failure]
        return sorted({result[0]: result for [result] in found}.values())


@pytest.mark.parametrize("format", ["olmo", "episodes"])
def test_steps_may_run_in_any_order_twice_and_at_once(chats, tmp_path, format):
    request = request_of(chats, format)
    expected = prepare(request, tmp_path / "local", workers=1)
    shared = f"{Target(tmp_path / 'out').work}/beam-test"
    assert make_corpus(request, tmp_path / "out", Twice(None, shared, None, None)) == expected
    list(beam.render(0, shared))  # a copy of work that runs after the end changes nothing
    assert digests(tmp_path / "out") == digests(tmp_path / "local")


UNKNOWN_OPTIONS = [
    (["--max-lenght=3"], "--max-lenght=3: neither grain_sft nor Beam's DirectRunner has such options"),
    (["stray"], "stray: neither"),
    (["--direct_num_workers=x"], "invalid int value: 'x'"),
    (["--streaming=x"], "ignored explicit argument 'x'"),
    (["--help"], "--help does nothing here"),
    (["--runner=None"], "Unexpected pipeline runner: None"),
    (["--no_wait_until_finish"], "needs the results of its pipelines"),
]


@pytest.mark.parametrize(("arguments", "part"), UNKNOWN_OPTIONS)
def test_unknown_and_unusable_options_of_beam_are_errors(chats, tmp_path, arguments, part, capsys):
    with pytest.raises(PrepareError, match=re.escape(part)):
        beam.prepare(request_of(chats), tmp_path / "out", pipeline_args=arguments)
    assert not capsys.readouterr().err
    assert not left_behind(tmp_path)


def test_without_beam_the_extra_is_named(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[beam\]'"):
        beam.prepare(request_of(chats), tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "google.cloud", None)
    with pytest.raises(MissingExtraError, match=r"apache-beam\[gcp\]"):
        beam.prepare(request_of(chats), tmp_path / "out", pipeline_args=["--runner=DataflowRunner"])


def test_the_command_passes_the_options_of_beam_on_and_prints_what_a_local_run_prints(chats, tmp_path, run_command):
    words = ["prepare", chats, "--template", "primer", "--tokenizer", chats / "spm.model", "--format", "olmo", "-o"]
    expected = run_command(*words, tmp_path / "local").out
    words = [*words, tmp_path / "beam"]
    printed = run_command(*words, "--runner", "DirectRunner", "--direct_num_workers", "1")
    assert printed.out == expected.replace(str(tmp_path / "local"), str(tmp_path / "beam")) and not printed.err
    assert digests(tmp_path / "beam") == digests(tmp_path / "local")
    assert "nothing to do" in run_command(*words, "--runner", "direct", "--", "--direct_num_workers=1").out
    assert "--workers" in run_command(*words, "--runner", "direct", "--workers", "2", status=1).err
    error = run_command(*words, "--direct_num_workers", "1", status=2).err
    assert "unrecognized arguments: --direct_num_workers 1" in error


@pytest.fixture
def bucket(client, chats: Path):
    """A bucket with the files of `chats` in the folder `in`."""
    for path in chats.iterdir():
        client.pipe_file(f"bucket/in/{path.name}", path.read_bytes())
    yield "gs://bucket"
    client.rm(client.find("bucket/"))


def fetched(client, folder: Path, name: str) -> dict[str, str]:
    """Copy a corpus of the bucket to `folder`, and return its digests."""
    for path in client.find(f"bucket/{name}/"):  # `get` would read `out[2]` as a pattern
        client.get_file(path, f"{folder}/{path.removeprefix('bucket/')}")
    return digests(folder / name)


@pytest.mark.parametrize("format", ["olmo", "openchat"])
def test_a_corpus_in_a_bucket_has_the_bytes_of_a_local_one(client, bucket, chats, tmp_path, format, monkeypatch):
    here, there = (request_of(place, format, part_bytes=100_000) for place in (chats, f"{bucket}/in"))
    monkeypatch.setattr(documents, "BLOCK_TOKENS", 7000)
    monkeypatch.setattr(documents, "GATHER_BLOCKS", 2)
    expected = prepare(here, tmp_path / "here", workers=1)
    gather, gathered = documents.ChunkDocuments._gather, []

    def gather_with_room(self, ids):
        assert not any(tokens() is not None for tokens in gathered)  # the tokens of earlier calls are freed
        found = gather(self, ids)
        gathered.append(weakref.ref(found[0]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(documents.ChunkDocuments, "_gather", gather_with_room)
        local = prepare(there, f"{bucket}/local", workers=1)
    assert len(gathered) > 1
    by_beam = beam.prepare(there, f"{bucket}/beam")
    assert by_beam == local and by_beam["splits"] == expected["splits"]
    assert fetched(client, tmp_path, "beam") == fetched(client, tmp_path, "local")
    ours, theirs = (digests(tmp_path / name, replace=(str(chats), f"{bucket}/in")) for name in ("here", "beam"))
    manifest = ours.pop("prepare.json"), theirs.pop("prepare.json")
    assert ours == theirs and all(manifest)
    assert not [path for path in client.find("bucket/") if ".grain_sft-work" in path]
    assert prepare(there, f"{bucket}/beam") == {**by_beam, "already": True}


def test_a_corpus_in_a_bucket_is_replaced_only_if_asked(client, bucket: str, tmp_path: Path) -> None:
    few = (Dataset((f"{bucket}/in/[01].jsonl",)),)
    request, other = (request_of(f"{bucket}/in", datasets=few, seed=seed) for seed in (42, 7))
    client.pipe({"bucket/out2/foreign": b"not ours", "bucket/out[2]/": b""})
    prepare(request, f"{bucket}/out[2]", workers=1)
    for function in (prepare, beam.prepare):
        with pytest.raises(PrepareError, match="seed: 42 -> 7"):
            function(other, f"{bucket}/out[2]")
        with pytest.raises(PrepareError, match="not empty"):
            function(other, f"{bucket}/out2", overwrite=True)
        for no_folder in (bucket, "gs://"):
            with pytest.raises(PrepareError, match="expected a folder in a bucket"):
                function(other, no_folder)
    beam.prepare(other, f"{bucket}/out[2]", overwrite=True)
    prepare(other, f"{bucket}/fresh", workers=1)
    assert fetched(client, tmp_path, "out[2]") == fetched(client, tmp_path, "fresh")
    assert client.cat_file("bucket/out2/foreign") == b"not ours"
    assert not files.exists(f"{bucket}/.out[2].grain_sft-work/identity.json")


def test_missing_chunks_in_a_bucket_take_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exists", "size", "read_range"):
        monkeypatch.setattr(files, name, None)
    assert Chunks("memory://bucket/none", "key").existing_headers(2) == [None, None]
