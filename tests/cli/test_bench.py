"""`grain-sft bench` gives its figures and its advice for a config, and without one its figures for corpora that it makes up.

No test asserts a speed.
"""

import importlib.util
import re

import numpy as np
import pytest
from batches import load, sections, write_config
from mixed_corpora import mixture_config, write_sources
from sft_files import documents, make_pairs, write_olmo, write_pairs

from grain_sft.bench import Scale, advice, loaders, measuring, plans, stages
from grain_sft.bench import config as of_config
from grain_sft.bench.advice import Choice, Setting
from grain_sft.bench.processes import measure_first_batch
from grain_sft.layout import ALGORITHMS, PackingOptions, packing_report
from grain_sft.prepare import materialize


@pytest.fixture
def made_up(tmp_path, figures, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda words: figures("bench", *words.split(), "--dir", "~/here")


@pytest.mark.heavy
def test_every_loader_is_compared_with_its_limit(made_up):
    small = "--files 2 --tokens 200000 --seconds 0.01 --repeats 1 --sequence-length 1024"
    only = "--only windows --only startup --only orders"
    figures, printed = made_up(f"{only} {small} --order-rows 300000 --startup-files 8 8")
    assert {"limit: numpy, contiguous rows", "source.read, tokens only"} < set(figures["throughput"])
    assert all(row["mtok_per_s"] > 0 for row in figures["throughput"].values())
    assert all(row["wait_ms"] > 0 for row in figures["wait"].values())
    assert "filter on, one thread" in printed
    first, again = (row for name, row in figures["orders"].items() if name.startswith("order olmo"))
    assert first["mb"] < 300 and again["mb"] < 300


def test_packed_rows_are_compared_with_grains(made_up, monkeypatch):
    small = [profile._replace(documents=profile.documents // 20) for profile in loaders.PROFILES]
    monkeypatch.setattr(loaders, "PROFILES", tuple(small))
    figures, printed = made_up("--only packed --seconds 0.01 --repeats 1")
    assert list(figures) == [f"packed, {profile.name}" for profile in loaders.PROFILES]
    for rows in figures.values():
        assert rows[loaders.LIMIT]["of_limit"] == 1 and rows[loaders.GRAIN]["times_grain"] == 1
    assert loaders.OURS in printed


def test_every_way_to_plan_a_corpus_is_measured(made_up, tmp_path):
    figures, printed = made_up("--only plans --plan-documents 20000")
    found = figures["plans"]
    peer = {plans.OLMO} if importlib.util.find_spec("olmo_core") else set()
    assert found.keys() == {plans.OURS, plans.GROUPED, plans.PACKED} | peer
    lengths = np.minimum(plans.made_up_lengths(20_000), plans.LENGTH)
    rows = len(ALGORITHMS["best_fit_decreasing"](lengths, PackingOptions(plans.LENGTH)).ends)
    assert found[plans.GROUPED]["rows"] == found[plans.PACKED]["rows"] == rows <= found[plans.OURS]["rows"]
    assert all(f"{name} " in printed for name in found)
    assert not list((tmp_path / "here").iterdir())  # the benchmark removed its files


def test_runs_with_and_without_withdrawn_documents_are_compared(made_up):
    figures, printed = made_up("--only withdrawn --plan-documents 5000 --seconds 0.01 --repeats 1")
    assert len(figures["withdrawn"]) == 5 and all(row["of_speed"] > 0 for row in figures["withdrawn"].values())
    assert "4.4% of the documents withdrawn" in printed


@pytest.mark.heavy
def test_traces_of_a_run_are_measured(tmp_path):
    (table,) = plans.traces(tmp_path, Scale(documents=20_000))
    assert len(list(table.lines())) == 8 and len(table.rows) == 7
    assert all(run["seconds"] > 0.05 and run["gigabytes"] > 0.02 for run in table.rows.values())


def test_724_million_rows_are_shuffled_without_an_order_in_memory(tmp_path):
    figures = measure_first_batch(tmp_path)
    assert figures["rows"] == 724_000_000
    # `mb_before` is 205 to 280, depending on the version of Python; an order of int64 would need 5,800 MB
    assert figures["peak_mb"] - figures["mb_before"] < 90


QUICK = ("--seconds", "0.02", "--repeats", "1", "--step-ms", "1", "--step-ms", "2")
ALWAYS = {measuring.LIMIT, stages.ROW_NUMBERS, stages.READING, stages.PIECES, stages.WHOLE}


@pytest.fixture
def bench(tmp_path, figures):
    """`bench(config, *arguments)` runs the command; it returns its figures, read from JSON, and the text that it printed."""

    def measured(config, *arguments, workers=0):
        path = write_config(tmp_path / "config.json", config)
        return figures("bench", path, *QUICK, "--max-workers", workers, *arguments)

    return measured


def windows(folder, **sampler):
    np.random.default_rng(0).integers(3, 250, 4000).astype(np.uint16).tofile(folder / "web.npy")
    options = {"order": "shuffle", "global_batch_size": 8, **sampler}
    config = sections(folder / "web.npy", 32, corpus={"dtype": "uint16"}, layout="windows", **options)
    return config | {"transforms": ["ngram_filter", "shift_targets"]}


def packed(folder):
    write_olmo(folder / "chat", documents(60, seed=1), part_tokens=400)
    return sections(folder / "chat", 64, corpus={"dtype": "uint16", "eos_token_id": 2}, order="shuffle")


def check(figures, printed):
    """Check what all figures have in common: each stage is there and printed, and each time is positive."""
    names = [row["name"] for row in figures["stages"]]
    assert set(names) >= ALWAYS and all(name in printed for name in names)
    delivered, chosen = figures["delivered"], figures["recommended"]
    for row in (*figures["stages"], *delivered, chosen):
        assert row["ms_per_batch"] > 0 and row["mtok_per_s"] > 0 and row["of_limit"] > 0
    assert figures["stages"][0]["of_limit"] == 1 and figures["stages"][-1]["of_step"] == 1
    for row in (*delivered, chosen):
        assert [wait["step_ms"] for wait in row["waits"]] == [1, 2]
        assert all(0 < wait["median_ms"] <= wait["longest_ms"] and wait["steps"] >= 3 for wait in row["waits"])
    threads = [row["threads"] for row in delivered]
    assert threads[:2] == [0, 1] and chosen["threads"] in threads[1:]
    stated = re.search(r"recommended .*\n(threads=\d+, prefetch=\d+, worker_count=\d+) ", printed)[1]
    assert stated == str(Setting(chosen["threads"], chosen["prefetch"], chosen["worker_count"]))
    assert chosen["reason"] in " ".join(printed.split())
    for row in figures["accelerators"]:
        assert row["this_host"] == int(chosen["mtok_per_s"] * 1e6 // row["tokens_per_second"])
        assert row["all_hosts"] == row["this_host"] * figures["host"]["count"]


def test_each_stage_of_windows_with_a_filter_is_measured(bench, tmp_path):
    figures, printed = bench({**windows(tmp_path), "audit": str(tmp_path / "audit")})
    check(figures, printed)
    assert figures["batch"] == {"rows": 8, "tokens": 256, "padding_share": 0, "bytes": 4 * 5 * 256, "arrays": 5}
    names = [row["name"] for row in figures["stages"]]
    assert names[3:] == [stages.PIECES, "NgramFilter", "ShiftTargets", stages.WHOLE]
    assert [row["tokens_per_second"] for row in figures["accelerators"]] == list(advice.RATES)
    assert not list(tmp_path.glob("audit*"))  # because no trainer got a batch


def test_the_rows_of_one_host_of_two_are_measured(bench, tmp_path):
    figures, printed = bench(packed(tmp_path), "--host", "1/2", "--tokens-per-second", "700", workers=1)
    check(figures, printed)
    assert (figures["host"], figures["batch"]["rows"]) == ({"index": 1, "count": 2}, 2)
    assert 0 < figures["batch"]["padding_share"] < 0.5
    assert [row["tokens_per_second"] for row in figures["accelerators"]] == [700]
    assert "on 2 such hosts" in printed
    assert "threads=0, prefetch=8, worker_count=1" in figures["left_out"] and "left out, the time was up" in printed


def test_mixtures_padded_rows_materialized_rows_and_pairs_are_measured(bench, tmp_path):
    (tmp_path / "mixture").mkdir()
    write_sources(tmp_path / "mixture")
    figures, printed = bench(mixture_config(tmp_path / "mixture"))
    check(figures, printed)
    assert figures["layout"]["kind"] == "MixtureLayout" and figures["batch"]["rows"] == 12
    config = packed(tmp_path)
    check(*bench({**config, "layout": {"kind": "padded", "sequence_length": 64}}))
    materialize(load(config).source.layout, tmp_path / "rows")
    rows = {"path": str(tmp_path / "rows")}
    check(*bench({**config, "corpus": rows, "layout": {"kind": "materialized", "sequence_length": 64}}))
    write_pairs(tmp_path / "pairs", make_pairs(20, 1))
    figures, printed = bench(sections(tmp_path / "pairs", 64, layout="pairs"))
    check(figures, printed)
    assert figures["batch"]["tokens"] == 4 * (32 + 32 + 32)


def test_a_bucket_is_tried_with_more_threads_than_cores(bench, client, tmp_path):
    config = windows(tmp_path)
    client.pipe_file("bucket/web.npy", (tmp_path / "web.npy").read_bytes())
    figures, printed = bench({**config, "corpus": {**config["corpus"], "path": "gs://bucket/web.npy"}})
    check(figures, printed)
    tried = [row["threads"] for row in figures["delivered"]]
    assert tried + [int(name[8:].split(",")[0]) for name in figures["left_out"]] == [0, 1, 2, 4, 8, 16]


def test_a_run_of_two_steps_and_the_first_steps_of_a_schedule_are_measured(bench, tmp_path):
    two_steps = {"order": "sequential", "epochs": 1, "last_batch": "fill", "global_batch_size": 72}
    for sampler, rows in ((two_steps, 72), ({"schedule": [{"step": 3, "global_batch_size": 16}]}, 8)):
        figures, printed = bench(windows(tmp_path, **sampler))
        check(figures, printed)
        assert figures["batch"]["rows"] == rows, sampler


def test_a_later_stage_is_measured_without_the_documents_that_were_withdrawn_before_it(tmp_path):
    amendments = [{"withdraw": {"from": 1, "documents": list(range(0, 60, 2))}}]
    run = load({**packed(tmp_path), "amendments": amendments, "stages": [{"steps": 3}, {"steps": 3}]})
    endless, steps = of_config.first_steps_forever(run.stages[1])
    for step in range(2 * steps):
        np.testing.assert_equal(endless[step], run[3 + step % steps])
    reading = stages.stages(endless, [endless[0]])[stages.READING]()
    assert (reading["loss_mask"] == endless.source_at(0).read(endless.sampler.rows(0))["loss_mask"]).all()
    assert (reading["loss_mask"] != run.stages[1].source.read(run.stages[1].sampler.rows(3))["loss_mask"]).any()


@pytest.mark.heavy
def test_worker_processes_are_measured_if_there_is_time(bench, tmp_path):
    figures, printed = bench(packed(tmp_path), "--seconds", "20", workers=1)
    check(figures, printed)
    assert [row["worker_count"] for row in figures["delivered"]][-1] == 1 and not figures["left_out"]


def row(threads, worker_count, ms, *waits):
    """Return the figures of a measured setting; `waits` are the median waits in ms, with steps of 10 ms and of 50 ms."""
    listed = [{"step_ms": step_ms, "median_ms": wait} for step_ms, wait in zip((10.0, 50.0), waits, strict=True)]
    return {"threads": threads, "prefetch": 8, "worker_count": worker_count, "ms_per_batch": ms, "waits": listed}


ADVICE = {
    "one is enough": ([row(1, 0, 2, 0.1, 0.1), row(2, 0, 1, 0, 0)], 9, Choice(Setting(1, 4, 0), 10)),
    "two are enough": ([row(1, 0, 9, 4, 0.1), row(2, 0, 5, 0.1, 0.1)], 95, Choice(Setting(2, 16, 0), 10)),
    "one is enough for longer steps": ([row(1, 0, 30, 20, 0.2), row(0, 2, 8, 0, 0)], 9, Choice(Setting(1, 4, 0), 50)),
    "one is too slow": ([row(1, 0, 11, 0.1, 0.1), row(2, 0, 6, 0.1, 0.1)], 9, Choice(Setting(2, 4, 0), 10)),
    "only workers are enough": ([row(1, 0, 90, 80, 40), row(0, 2, 45, 35, 0)], 99, Choice(Setting(0, 4, 2), 50)),
    "none is enough": ([row(1, 0, 90, 80, 40), row(2, 0, 88, 78, 38)], 99, Choice(Setting(1, 8, 0), None)),
    "none, two faster": ([row(1, 0, 90, 80, 40), row(2, 0, 60, 50, 10)], 99, Choice(Setting(2, 8, 0), None)),
}
"""By how many threads are enough: measured settings, the slowest batch in ms, and the advice: a setting, and the step in ms."""


@pytest.mark.parametrize(("rows", "slowest_ms", "expected"), ADVICE.values(), ids=ADVICE)
def test_the_fewest_threads_with_which_no_step_waits_are_advised(rows, slowest_ms, expected):
    direct = row(0, 0, 100, 100, 100)
    choice = advice.choose([direct, *rows], slowest_ms)
    assert choice == expected
    taken = next(each for each in rows if each["worker_count"] == choice.setting.worker_count)
    assert " ms" in advice.reason(choice, taken, [direct, *rows])


def test_wrong_arguments_have_status_2_and_other_failures_status_1(tmp_path, run_command):
    for arguments, message in (
        ("config.json --only packed", "--only: only without CONFIG"),
        ("--host 0/2", "--host: only with CONFIG"),
        ("--stage 2", "--stage: only with CONFIG"),
        ("config.json --host 2/2", "--host"),
        ("config.json --tokens-per-second 0", "--tokens-per-second"),
        ("config.json --max-workers -1", "--max-workers"),
    ):
        assert f"argument {message}" in run_command("bench", *arguments.split(), status=2).err, arguments
    path = write_config(tmp_path / "config.json", windows(tmp_path))
    error = run_command("bench", path, "--stage", "2", status=1).err
    assert "--stage 2: expected at most 1, the last stage of the config." in error
    for words in ([tmp_path / "none.yaml"], [path, "--host", "0/3"], [path, "--output", path], ["--dir", path], [path]):
        if words == [path]:  # the last case: the corpus has no row
            (tmp_path / "web.npy").write_bytes(b"\1\0" * 2)
        assert re.match(r"grain-sft bench: (?!FileExistsError)", run_command("bench", *words, status=1).err), words


def test_the_limit_copies_each_array_of_the_batch_once():
    shared = np.zeros((3, 8), np.int32)
    batch = {"inputs": np.ones((3, 8), np.int32), "a": shared, "b": shared, "weights": np.zeros((3, 8), np.float32)}
    copies = measuring.limit(batch | {"rows": np.arange(3, dtype=np.int32), "weight": np.float32(1)})()
    found = [(array.shape, array.dtype.name) for array in copies]
    assert found == [((3, 8), "int32"), ((3, 8), "int32"), ((3, 8), "float32"), ((3, 1), "int32")]


def test_the_report_measures_the_limit_of_bench_and_the_padding_of_batches_is_that_of_the_layout(tmp_path):
    config = packed(tmp_path)
    config |= {"sampler": {**config["sampler"], "epochs": 1, "last_batch": "fill"}, "audit": str(tmp_path / "audit")}
    pipeline = load(config)
    figures = of_config.report_speed(pipeline, 0.01)
    assert not list(tmp_path.glob("audit*"))  # because no trainer got a batch
    assert figures["rows"][0]["name"] == measuring.LIMIT and figures["rows"][0]["of_limit"] == 1
    found = stages.facts([pipeline[step] for step in range(len(pipeline))])
    assert stages.facts([{"a": 3}])["rows"] == 0  # a user's transform may return such an element
    num_tokens = found["tokens"] * len(pipeline) * (1 - found["padding_share"])
    assert num_tokens == pytest.approx(packing_report(pipeline.source.layout)["tokens"])
