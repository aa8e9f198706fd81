"""`simulate` models a run on many hosts: its rows are those of the sampler, its requests and bytes those of real readers."""

import collections
import json
import os
import re
import shutil

import numpy as np
import pytest
from batches import load, write_config
from emulator import LENGTH, put_windows
from sft_files import write_olmo

from grain_sft import Host, child_environment
from grain_sft.errors import PipelineError, SamplerError
from grain_sft.simulate import Conditions, lines, processes, simulate
from grain_sft.simulate.cache import HostCache
from grain_sft.simulate.conditions import Waits
from grain_sft.simulate.demand import DemandModel
from grain_sft.simulate.host_process import measure
from grain_sft.simulate.reads import Reads
from grain_sft.storage import CacheOptions, activity

COUNTS = {"requests": "remote_requests", "received": "remote_received_bytes", "local": "local_bytes"}
ONE_THREAD = Conditions(threads=1, prefetch=1)


def config_of(corpus, layout, batch, **sampler):
    return {"corpus": corpus, "layout": layout, "sampler": {"seed": 3, "global_batch_size": batch, **sampler}}


def demand(pipeline, hosts, number, steps):
    """Return the counts that the model gives for host `number` of `hosts`, per step."""
    model = DemandModel(Reads(pipeline), pipeline.sampler.with_host(Host(0, hosts)), ONE_THREAD, [number])
    demands = list(model.demands(steps))
    return {name: np.concatenate([getattr(each, name)[:, 0] for each in demands]).tolist() for name in COUNTS}


def measured(pipeline, hosts, number, steps):
    """Return the same counts of a real reader, per step."""
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
    """Corpora in the emulator: tokens without documents for windows, and chats with boundaries and a loss mask."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    sizes = rng.integers(9, 400, 150)
    chats = [(rng.integers(1, 900, size).astype(np.uint32), rng.random(size) < 0.5) for size in sizes]
    write_olmo(folder / "chats", chats, dtype="uint32", part_tokens=5000)
    client.put(f"{folder}/chats/", "bucket/simulated_chats/", recursive=True)
    chats = {"path": "gs://bucket/simulated_chats/", "format": "olmo", "eos_token_id": 901}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSSPEC_GS_TOKEN", "anon")
        yield {"windows": {"path": put_windows(client)}, "chats": chats}


HEAVY = pytest.param("chats", {"kind": "padded", "sequence_length": 256}, True, marks=pytest.mark.heavy)
WINDOWS = {"kind": "windows", "sequence_length": LENGTH}
PACKED = {"kind": "packed", "sequence_length": 512}


def cache_in(folder, size="8MiB"):
    """Return the options of a shard cache."""
    return {"cache": {"folder": str(folder), "max_bytes": size, "unit": "64KiB"}}


@pytest.mark.parametrize(
    ("corpus", "layout", "cached"), [("windows", WINDOWS, False), ("windows", WINDOWS, True), ("chats", PACKED, False), HEAVY]
)
def test_requests_and_bytes_are_those_of_the_reader(bucket, tmp_path, corpus, layout, cached):
    remote = {"remote": cache_in(tmp_path / "cache")} if cached else {}
    pipeline = load(config_of(bucket[corpus] | remote, layout, 8))
    steps = range(2, 2 + min(12, pipeline.sampler.steps_per_epoch - 2))
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # opening the corpus filled it
    assert demand(pipeline, 2, 1, steps) == measured(pipeline, 2, 1, steps)


@pytest.mark.heavy
def test_a_cache_that_is_too_small_drops_blocks_as_the_reader_does(bucket, tmp_path):
    pipeline = load(config_of(bucket["windows"] | {"remote": cache_in(tmp_path, "1MiB")}, WINDOWS, 8))
    total, found = (sum(of(pipeline, 2, 1, range(60))["requests"]) for of in (measured, demand))
    assert total > 160  # the corpus has 60 blocks, so blocks were dropped and read again
    assert abs(found - total) <= 0.1 * total  # the reader can't tell which block was used last in one clock tick


@pytest.fixture
def chats(tmp_path):
    sizes = np.random.default_rng(1).integers(9, 300, 400).tolist()
    made = [(np.full(size, 7, np.uint32), np.arange(size) > 2) for size in sizes]
    write_olmo(tmp_path / "chats", made, dtype="uint32", part_tokens=30_000)
    return {"path": str(tmp_path / "chats"), "format": "olmo", "eos_token_id": 7}


def mixture(chats, write_tokens):
    web = {"path": str(write_tokens("web.npy", np.arange(90 * 256) % 500)), "weight": 1, "dtype": "uint32"}
    return {"mixture": {"chat": {**chats, "weight": 2, "layout": {"kind": "packed"}}, "web": web}}


@pytest.mark.parametrize("hosts", [1, 4, 8])
@pytest.mark.parametrize("kind", ["windows", "packed", "mixture"])
def test_rows_are_those_of_all_hosts_counted_one_by_one(chats, write_tokens, kind, hosts):
    corpus = mixture(chats, write_tokens) if kind == "mixture" else chats
    layout = {"kind": "windows" if kind == "mixture" else kind, "sequence_length": 256}
    pipeline, steps = load(config_of(corpus, layout, 16)), range(1, 9)
    found = simulate(pipeline, hosts, steps, Conditions(step_ms=10, prefetch=20), as_bucket=True)
    assert found["first_batches"]["batches"] == 8  # not `prefetch`, because the run has 8 steps
    read = [pipeline.replace(host=Host(host, hosts)).sampler.rows(step) for step in steps for host in range(hosts)]
    rows, counts = np.unique(np.concatenate(read), return_counts=True)
    expected = {"rows_read": counts.sum(), "slots": 16 * 8, "distinct": len(rows), "most_often": counts.max()}
    assert found["coverage"] == expected
    layout = pipeline.source.layout
    sizes = layout.pieces(np.concatenate(read)).length.sum()
    assert sum(gather.files[0] in layout.corpus.shards for gather in Reads(pipeline).gathers) == len(layout.parts)
    checks = found["checks"]["mean"] * hosts
    assert found["all_hosts"]["received"] >= sizes * 4 and found["all_hosts"]["requests"] >= checks + len(rows)
    assert found["all_hosts"]["local"] == 0 and found["run"]["rows_per_host"] == 16 // hosts


def test_rows_that_are_read_65536_times_are_counted(write_tokens):
    corpus = {"path": str(write_tokens("a.npy", np.arange(16))), "dtype": "uint32"}
    pipeline = load(config_of(corpus, {"kind": "windows", "sequence_length": 8}, 1 << 15, last_batch="run_on"))
    expected = {"rows_read": 1 << 17, "slots": 1 << 17, "distinct": 2, "most_often": 1 << 16}
    assert simulate(pipeline, 1, range(4))["coverage"] == expected
    for steps in (range(0, 4, 2), 4):
        with pytest.raises(SamplerError, match=f"{re.escape(str(steps))}: expected consecutive"):
            simulate(pipeline, 1, steps)
    with pytest.raises(SamplerError, match="count=0"):
        simulate(pipeline, 1, range(4), restart_hosts=0)


def test_each_source_of_a_mixture_has_its_own_cache_or_none(write_tokens, tmp_path):
    cache, plain = cache_in(tmp_path / "cache"), {"weight": 1, "dtype": "uint32"}
    paths = [str(write_tokens(f"{name}.npy", np.arange(60 * 1024) % 500)) for name in "ab"]

    def found(*remote):
        sources = {path[-5]: plain | {"path": path, "remote": each} for path, each in zip(paths, remote, strict=True)}
        pipeline = load(config_of({"mixture": sources}, WINDOWS, 8))
        return simulate(pipeline, 2, range(15), as_bucket=True, restart_hosts=4)

    none, both, first, second = found({}, {}), found(cache, cache), found(cache, {}), found({}, cache)
    for name in ("requests", "received"):
        sums = [each["all_hosts"][name] for each in (none, both, first, second)]
        assert sums[0] + sums[1] == sums[2] + sums[3] and sums[0] != sums[1]
    assert first["cache"]["misses"]["mean"] + second["cache"]["misses"]["mean"] == both["cache"]["misses"]["mean"]
    assert none["cache"] is None and both["cache"]["hosts"] == 2


def test_a_long_piece_without_room_in_the_cache_takes_several_requests():
    cache = HostCache(CacheOptions("/cache", "1MiB", "shard"))
    assert cache.read([("gs://bucket/0.npy", 1 << 25, 0, 20 << 20)]) == (3, 20 << 20)  # parts of 8 MiB


def test_a_process_has_caches_of_its_own(write_tokens, tmp_path, monkeypatch):
    plain = {"path": str(write_tokens("a.npy", np.arange(60 * 1024) % 500)), "weight": 1, "dtype": "uint32"}
    folders = {"a": "/cache/x", "b": "/cache/y", "c": "/cache/x"}
    sources = {name: plain | {"remote": cache_in(folder)} for name, folder in folders.items()}
    stated = config_of({"mixture": {**sources, "plain": plain}}, WINDOWS, 8)
    config = write_config(tmp_path / "config.json", stated)
    own = load(processes._config_with_own_caches(str(config), "/own"))
    used = {name: layout.corpus.remote.cache for name, layout in own.source.layout.parts.items() if name != "plain"}
    assert own.source.layout.parts["plain"].corpus.remote is None and used["a"] == used["c"] != used["b"]
    assert all(each.folder.startswith("/own/") and each.max_bytes == 1 << 23 for each in used.values())
    stated["sampler"]["schedule"] = [{"step": 1, "global_batch_size": 16}]
    stated["amendments"] = [{"replace": {"from": 2, "source": "a", "path": plain["path"]}}]
    replaced = str(write_config(tmp_path / "replaced.json", stated))
    assert load(processes._config_with_own_caches(replaced, "/own")).data_key == load(replaced).data_key
    monkeypatch.setenv("GRAIN_SFT_SHARD_CACHE", "/cache")
    monkeypatch.setenv("GRAIN_SFT_SHARD_CACHE_BYTES", "8MiB")
    monkeypatch.setattr(processes, "run_python", lambda *_, environment: environment)
    environment = processes.run_host(str(config), Host(0, 1), range(1), Conditions())
    folder = environment["GRAIN_SFT_SHARD_CACHE"].removesuffix("/shards")
    assert "grain_sft_simulate_" in folder and environment["GRAIN_SFT_CACHE_DIR"] == f"{folder}/derived"


def test_waits_are_those_of_threads_that_read_ahead():
    """Two threads, three batches ahead, steps of 1 s, batches that take one host 3 s and the other 0.5 s."""
    waits = Waits(Conditions(threads=2, prefetch=3, step_ms=1000), 2)
    seconds = np.array([3.0, 0.5])
    # Batches are ready at 3, 3, 6, 6, 9, 9 s. A step starts when its batch is ready and the step before has taken its 1 s.
    assert [waits.add(seconds) for _ in range(6)] == [3.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert waits.now == 11.0


def test_processes_that_share_a_core_take_longer_for_each_request(chats):
    pipeline, first = load(config_of(chats, PACKED, 8)), {}
    for cores in (2, 1, 0.25):
        conditions = Conditions(request_ms=3, cores=cores)
        first[cores] = simulate(pipeline, 4, range(1), conditions, as_bucket=True)["first_step"]
    seconds = {cores: each["seconds"]["most"] for cores, each in first.items()}
    requests = first[1]["requests"]["most"]
    assert seconds[2] == seconds[1] and seconds[0.25] - seconds[1] == pytest.approx(requests * 0.003 * 3)


def test_a_bucket_that_answers_less_than_is_asked_sets_the_time_of_a_step(chats):
    """A step takes 10 ms, a host 0.5 s for its batch, and the bucket 2 s for all hosts. Reading 3 batches ahead can't help."""
    waits = Waits(Conditions(threads=2, prefetch=3, step_ms=10), 2)
    assert [waits.add(np.array([0.5, 0.1]), 2.0) for _ in range(5)] == pytest.approx([2.0, *4 * [1.99]])
    conditions = Conditions(step_ms=10, bucket_requests=20)
    found = simulate(load(config_of(chats, PACKED, 8)), 4, range(30), conditions, as_bucket=True)
    assert found["steady"]["seconds_a_step"] == pytest.approx(found["all_hosts"]["requests"] / 20 / 30, rel=0.01)
    assert [each["asked"] for each in found["answers"] if not each["enough"]] == ["bucket, requests", "waits"]
    assert found["waits"]["first_s"] == pytest.approx(found["first_step"]["requests"]["mean"] * 4 / 20)


@pytest.mark.parametrize(("steps", "prefetch"), [(1, 8), (15, 8), (3, 1), (20, 3)])
def test_a_process_measures_the_steps_that_it_makes_and_writes_no_audit_log(chats, tmp_path, steps, prefetch):
    config = config_of(chats, PACKED, 4) | {"audit": str(tmp_path / "audit")}
    found = measure(config, Host(0, 2), range(steps), threads=2, prefetch=prefetch, began=0.0)
    first, end = found["made"]
    assert first == 0 and steps < end <= steps + prefetch + 2 and len(found["batch_s"]) == end
    assert not list(tmp_path.glob("audit*"))


def test_a_process_measures_the_stage_of_its_first_step(chats, tmp_path):
    stage = {"corpus": (config := config_of(chats, PACKED, 4)).pop("corpus")}
    config["stages"] = [stage | {"steps": 4}, stage | {"steps": 3}, stage | {"layout": {"sequence_length": 512}}]
    config["stages"][1]["corpus"] = stage["corpus"] | {"remote": cache_in("/cache/x")}
    own = processes._config_with_own_caches(str(write_config(tmp_path / "config.json", config)), "/own")
    assert own["stages"][1]["corpus"]["remote"]["cache"]["folder"] == "/own/shards_0"
    assert measure(own, Host(0, 2), range(4, 6), threads=2, prefetch=8, began=0.0)["made"] == [4, 7]


def test_the_command_prints_answers_and_json(chats, tmp_path, run_command, monkeypatch):
    config = str(write_config(tmp_path / "run.json", config_of(chats, PACKED, 8)))
    command = ["simulate", config, "--hosts", "4", "--steps", "0:20", "--as-bucket"]
    page, model = tmp_path / "page.html", ["--processes", "0", "--step-ms", "2000", "--bucket-requests", "1234567"]
    assert "the file of --output" in run_command(*command, "-o", page, "--html", page, status=2).err
    shown = run_command(*command, *model, "-o", tmp_path / "figures.json", "--html", page).out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert shown == "\n".join(lines(figures)) + "\n" and "bucket, requests" in shown
    assert [each["enough"] for each in figures["answers"]] == [True] * 4
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert json.loads(found[1]) == figures and page.read_text().count("<svg") == 4
    assert "feed this run? Yes." in page.read_text() and "1,234,567<" in page.read_text()
    shown = run_command(*command, "--processes", "1", "--bucket-requests", "1").out
    assert "NOT ENOUGH" in shown and re.search("start-up .* s until the first batch", shown)
    for option, value in (("--bucket-requests", "inf"), ("--threads", "10001"), ("--prefetch", "0")):
        assert f"argument {option}" in run_command(*command, option, value, status=2).err
    monkeypatch.setattr(processes, "run_host", None)  # no process runs before the error
    assert "can't be divided by 3 hosts" in run_command(*command, "--restart-hosts", "3", status=1).err


@pytest.mark.parametrize(
    ("program", "message"), [("sleep(60)", "was ended after 0.1 s"), ("exit('reason')", "ended with status 1: reason")]
)
def test_a_process_that_fails_or_hangs_is_an_error(monkeypatch, program, message):
    monkeypatch.setattr(child_environment, "_MOST_SECONDS", 0.1 if "sleep" in program else 60)
    with pytest.raises(PipelineError, match=f"it {message}"):
        child_environment.run_python("it", "-c", f"from time import sleep; {program}", environment=os.environ)
