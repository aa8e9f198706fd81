"""The model of a run on many hosts: its rows, requests and bytes are those of the sampler and of the readers."""

import collections
import json
import re
import shutil

import numpy as np
import pytest
from batches import load
from emulator import LENGTH, put_windows
from sft_files import write_olmo

from grain_sft import Host
from grain_sft.cli.main import main
from grain_sft.simulate import Conditions, lines, processes, simulate
from grain_sft.simulate.demand import Walk
from grain_sft.simulate.host_process import measure
from grain_sft.simulate.reads import Reads
from grain_sft.simulate.waits import Waits
from grain_sft.storage import activity

COUNTS = {"requests": "remote_requests", "received": "remote_received_bytes", "local": "local_bytes"}
ONE_THREAD = Conditions(threads=1, prefetch=1)


def pipeline_of(folder, layout, sampler, **corpus):
    sections = {"corpus": {"path": str(folder), **corpus}, "layout": layout, "sampler": {"seed": 3, **sampler}}
    return load(sections)


def demand(pipeline, hosts, number, steps):
    """The model's figures of one host, per step."""
    walk = Walk(Reads(pipeline), pipeline.sampler.with_host(Host(0, hosts)), ONE_THREAD, [number])
    blocks = list(walk.blocks(steps))
    return {name: np.concatenate([getattr(block, name)[:, 0] for block in blocks]).tolist() for name in COUNTS}


def measured(pipeline, hosts, number, steps):
    """The counters of a real reader of the same host, per step."""
    mine = pipeline.replace(host=Host(number, hosts))
    found = collections.defaultdict(list)
    for step in steps:
        before = {name: activity.counts[counter] for name, counter in COUNTS.items()}
        mine[step]
        for name, counter in COUNTS.items():
            found[name].append(activity.counts[counter] - before[name])
    return dict(found)


@pytest.fixture(scope="module")
def bucket(client, tmp_path_factory):
    """Corpora in the emulator: windows, documents with boundaries and a loss mask, and episodes with weights."""
    pytest.importorskip("gcp_storage_emulator.server")
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    chats = [
        (rng.integers(1, 900, size).astype(np.uint32), rng.random(size) < 0.5) for size in rng.integers(9, 400, 150)
    ]
    write_olmo(folder / "chats", chats, dtype="uint32", part_tokens=5000)
    client.put(f"{folder}/chats/", "bucket/simulated_chats/", recursive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSSPEC_GS_TOKEN", "anon")
        yield {"windows": put_windows(client), "chats": "gs://bucket/simulated_chats/"}


HEAVY = pytest.param("chats", {"kind": "padded", "sequence_length": 256}, True, marks=pytest.mark.heavy)
WINDOWS = {"kind": "windows", "sequence_length": LENGTH}
PACKED = {"kind": "packed", "sequence_length": 512}
CACHE = {"remote": {"cache": {"max_bytes": "8MiB", "unit": "64KiB"}}}


@pytest.mark.parametrize(
    ("corpus", "layout", "cached"),
    [("windows", WINDOWS, False), ("windows", WINDOWS, True), ("chats", PACKED, False), HEAVY],
)
def test_requests_and_bytes_are_those_of_the_reader(bucket, tmp_path, corpus, layout, cached):
    options = {} if corpus == "windows" else {"format": "olmo", "eos_token_id": 901}
    if cached:
        options["remote"] = {"cache": {**CACHE["remote"]["cache"], "folder": str(tmp_path / "cache")}}
    pipeline = pipeline_of(bucket[corpus], layout, {"global_batch_size": 8}, **options)
    steps = range(2, 2 + min(12, pipeline.sampler.steps_per_epoch - 2))
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # opening has looked for the ends of documents
    assert demand(pipeline, 2, 1, steps) == measured(pipeline, 2, 1, steps)


@pytest.mark.heavy
def test_a_cache_that_is_too_small_drops_blocks_as_the_reader_does(bucket, tmp_path):
    cache = {"folder": str(tmp_path), "max_bytes": "1MiB", "unit": "64KiB"}
    pipeline = pipeline_of(bucket["windows"], WINDOWS, {"global_batch_size": 8}, remote={"cache": cache})
    steps = range(60)
    expected, found = measured(pipeline, 2, 1, steps), demand(pipeline, 2, 1, steps)
    total = sum(expected["requests"])
    assert total > 160  # far more than the 60 blocks
    assert (
        abs(sum(found["requests"]) - total) <= 0.1 * total
    )  # uses within one tick of the clock are dropped by their names


@pytest.fixture
def chats(tmp_path):
    sizes = np.random.default_rng(1).integers(9, 300, 400).tolist()
    made = [(np.full(size, 7, np.uint32), np.arange(size) > 2) for size in sizes]
    write_olmo(tmp_path / "chats", made, dtype="uint32", part_tokens=30_000)
    return {"path": str(tmp_path / "chats"), "format": "olmo", "eos_token_id": 7}


def mixture(chats, write_tokens):
    web = {"path": str(write_tokens("web.npy", np.arange(90 * 256) % 500)), "weight": 1, "dtype": "uint32"}
    layout = {"kind": "packed"}
    return {"mixture": {"chat": {**chats, "weight": 2, "layout": layout}, "web": web}}


@pytest.mark.parametrize("hosts", [1, 4, 8])
@pytest.mark.parametrize("kind", ["windows", "packed", "mixture"])
def test_rows_are_those_of_all_hosts_counted_one_by_one(chats, write_tokens, kind, hosts):
    corpus = mixture(chats, write_tokens) if kind == "mixture" else chats
    layout = {"kind": "windows" if kind == "mixture" else kind, "sequence_length": 256}
    config = {"corpus": corpus, "layout": layout, "sampler": {"seed": 1, "global_batch_size": 16}}
    pipeline = load(config)
    steps = range(1, 9)
    found = simulate(pipeline, hosts, steps, Conditions(step_ms=10), as_bucket=True)
    read = [pipeline.replace(host=Host(host, hosts)).sampler.rows(step) for step in steps for host in range(hosts)]
    rows, counts = np.unique(np.concatenate(read), return_counts=True)
    expected = {"rows_read": counts.sum(), "slots": 16 * 8, "distinct": len(rows), "most_often": counts.max()}
    assert found["coverage"] == expected
    sizes = pipeline.source.layout.pieces(np.concatenate(read)).length.sum()
    of_tokens = [
        gather for gather in Reads(pipeline).gathers if gather.files[0] in pipeline.source.layout.corpus.shards
    ]
    assert len(of_tokens) == len(pipeline.source.layout.parts)
    checks = found["checks"]["mean"] * hosts
    assert found["all_hosts"]["received"] >= sizes * 4 and found["all_hosts"]["requests"] >= checks + len(rows)
    assert found["all_hosts"]["local"] == 0 and found["run"]["rows_per_host"] == 16 // hosts


def test_rows_that_are_read_65536_times_are_counted(write_tokens):
    sampler, layout = {"global_batch_size": 1 << 15, "last_batch": "run_on"}, {"kind": "windows", "sequence_length": 8}
    pipeline = pipeline_of(write_tokens("a.npy", np.arange(16)), layout, sampler, dtype="uint32")
    expected = {"rows_read": 1 << 17, "slots": 1 << 17, "distinct": 2, "most_often": 1 << 16}
    assert simulate(pipeline, 1, range(4))["coverage"] == expected


def test_each_source_of_a_mixture_has_its_own_cache_or_none(write_tokens, tmp_path):
    cache = {"cache": {"folder": str(tmp_path / "cache"), "max_bytes": "8MiB", "unit": "64KiB"}}
    paths = [str(write_tokens(f"{name}.npy", np.arange(60 * 1024) % 500)) for name in "ab"]

    def found(*remote):
        sources = {
            name: {"path": path, "weight": 1, "dtype": "uint32", "remote": options}
            for name, path, options in zip("ab", paths, remote, strict=True)
        }
        sampler = {"seed": 1, "global_batch_size": 8}
        pipeline = load({"corpus": {"mixture": sources}, "layout": WINDOWS, "sampler": sampler})
        return simulate(pipeline, 2, range(15), as_bucket=True, restart_hosts=4)

    none, both, first, second = found({}, {}), found(cache, cache), found(cache, {}), found({}, cache)
    for name in ("requests", "received"):
        sums = [each["all_hosts"][name] for each in (none, both, first, second)]
        assert sums[0] + sums[1] == sums[2] + sums[3] and sums[0] != sums[1]
    assert first["cache"]["misses"]["mean"] + second["cache"]["misses"]["mean"] == both["cache"]["misses"]["mean"]
    assert none["cache"] is None and both["cache"]["hosts"] == 2


def test_a_process_has_shard_caches_of_its_own(write_tokens, tmp_path):
    path = str(write_tokens("a.npy", np.arange(60 * 1024) % 500))
    caches = {name: {"folder": f"/cache/{name}", "max_bytes": "8MiB"} for name in "xy"}
    sources = {
        name: {"path": path, "weight": 1, "dtype": "uint32", "remote": {"cache": caches[cache]}}
        for name, cache in zip("abc", "xyx", strict=True)
    }
    config = tmp_path / "config.json"
    corpus = {"mixture": {**sources, "plain": {"path": path, "weight": 1, "dtype": "uint32"}}}
    config.write_text(json.dumps({"corpus": corpus, "layout": WINDOWS, "sampler": {"seed": 1, "global_batch_size": 8}}))
    own = load(processes._config_with_own_caches(str(config), "/own"))
    used = {name: layout.corpus.remote.cache for name, layout in own.source.layout.parts.items() if name != "plain"}
    assert own.source.layout.parts["plain"].corpus.remote is None and used["a"] == used["c"] != used["b"]
    assert all(each.folder.startswith("/own/") and each.max_bytes == 1 << 23 for each in used.values())
    environment = processes._with_own_caches({"GRAIN_SFT_SHARD_CACHE": "/cache"}, "/own")
    assert environment == {"GRAIN_SFT_SHARD_CACHE": "/own/shards", "GRAIN_SFT_CACHE_DIR": "/own/derived"}


def test_waits_are_those_of_threads_that_read_ahead():
    """Two threads, three batches ahead, steps of 1 s, batches that take one host 3 s and the other 0.5 s."""
    waits = Waits(Conditions(threads=2, prefetch=3, step_ms=1000), 2)
    seconds = np.array([3.0, 0.5])
    # ready at 3, 3, 6, 6, 9, ...: two batches each 3 s; a step starts when the one before has taken its second
    assert [waits.add(seconds) for _ in range(6)] == [3.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert waits.first == 3.0 and waits.now == 11.0


def test_processes_that_share_a_core_take_longer_for_each_request(chats):
    pipeline = pipeline_of(chats["path"], PACKED, {"global_batch_size": 8}, format="olmo", eos_token_id=7)
    found = {
        cores: simulate(pipeline, 4, range(1), Conditions(request_ms=3, cores=cores), as_bucket=True)
        for cores in (2, 1, 0.25)
    }
    seconds = {cores: each["first_step"]["seconds"]["most"] for cores, each in found.items()}
    requests = found[1]["first_step"]["requests"]["most"]
    assert seconds[2] == seconds[1] and seconds[0.25] - seconds[1] == pytest.approx(requests * 0.003 * 3)


def test_a_bucket_that_answers_less_than_is_asked_sets_the_time_of_a_step(chats):
    """Steps of 10 ms, a batch that takes hosts 0.5 s, and a bucket that takes 2 s for it: 3 batches ahead help no longer."""
    waits = Waits(Conditions(threads=2, prefetch=3, step_ms=10), 2)
    assert [waits.add(np.array([0.5, 0.1]), 2.0) for _ in range(5)] == pytest.approx([2.0, *4 * [1.99]])
    pipeline = pipeline_of(chats["path"], PACKED, {"global_batch_size": 8}, format="olmo", eos_token_id=7)
    found = simulate(pipeline, 4, range(30), Conditions(step_ms=10, bucket_requests=20), as_bucket=True)
    assert found["steady"]["seconds_a_step"] == pytest.approx(found["all_hosts"]["requests"] / 20 / 30, rel=0.01)
    assert [each["asked"] for each in found["answers"] if not each["enough"]] == ["bucket, requests", "waits"]
    first = found["first_step"]["requests"]["mean"] * 4
    assert found["waits"]["first_s"] == pytest.approx(first / 20)


@pytest.mark.parametrize(("steps", "prefetch"), [(1, 8), (15, 8), (3, 1), (20, 3)])
def test_a_process_measures_the_steps_that_it_makes(chats, steps, prefetch):
    config = {"corpus": chats, "layout": PACKED, "sampler": {"seed": 1, "global_batch_size": 4}}
    found = measure(config, Host(0, 2), range(steps), threads=2, prefetch=prefetch, began=0.0)
    first, end = found["made"]
    assert first == 0 and steps < end <= steps + prefetch + 2 and len(found["batch_s"]) == end


def test_a_process_writes_no_audit_log(chats, tmp_path):
    config = {"corpus": chats, "layout": PACKED, "sampler": {"seed": 1, "global_batch_size": 4}}
    measure(config | {"audit": str(tmp_path / "audit")}, Host(0, 2), range(2), threads=1, prefetch=1, began=0.0)
    assert not list(tmp_path.glob("audit*"))


def test_a_process_measures_the_stage_of_its_first_step(chats):
    stages = [{"steps": 4}, {"steps": 3}, {"layout": {"sequence_length": 512}}]
    config = {"corpus": chats, "layout": PACKED, "sampler": {"seed": 1, "global_batch_size": 4}, "stages": stages}
    found = measure(config, Host(0, 2), range(4, 6), threads=2, prefetch=8, began=0.0)
    assert found["made"] == [4, 7]


def test_the_command_prints_answers_and_json(chats, tmp_path, capsys):
    config = {"corpus": chats, "layout": {"kind": "packed", "sequence_length": 256}}
    config["sampler"] = {"seed": 1, "global_batch_size": 8}
    (tmp_path / "run.json").write_text(json.dumps(config))
    about = "--hosts 4 --steps 0:20 --processes 0 --as-bucket"
    command = ["simulate", str(tmp_path / "run.json"), *about.split()]
    page = tmp_path / "page.html"
    assert main([*command, "--step-ms", "2000", "-o", str(tmp_path / "figures.json"), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert shown == "\n".join(lines(figures)) + "\n" and "bucket, requests" in shown
    assert [each["enough"] for each in figures["answers"]] == [True] * 4
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert json.loads(found[1]) == figures and page.read_text().count("<svg") == 4
    assert "feed this run? Yes." in page.read_text()
    assert main([*command, "--bucket-requests", "1"]) == 0
    assert "NOT ENOUGH" in capsys.readouterr().out
    assert main(["simulate", str(tmp_path / "run.json"), "--hosts", "3", "--steps", "0:20", "--processes", "0"]) == 1
    assert "can't be divided by 3 hosts" in capsys.readouterr().err
