"""`grain-sft bench` without a config gives its figures for corpora that it makes up. No test asserts a speed."""

import importlib.util

import numpy as np
import pytest

from grain_sft.bench import Scale, loaders, plans
from grain_sft.bench.processes import measure_first_batch
from grain_sft.layout import ALGORITHMS, PackingOptions


@pytest.fixture
def bench(tmp_path, figures, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda words: figures("bench", *words.split(), "--dir", "~/here")


@pytest.mark.heavy
def test_every_loader_is_compared_with_its_limit(bench):
    small = "--files 2 --tokens 200000 --seconds 0.01 --repeats 1 --sequence-length 1024"
    only = "--only windows --only startup --only orders"
    figures, printed = bench(f"{only} {small} --order-rows 300000 --startup-files 8 8")
    assert {"limit: numpy, contiguous rows", "source.read, tokens only"} < set(figures["throughput"])
    assert all(row["mtok_per_s"] > 0 for row in figures["throughput"].values())
    assert all(row["wait_ms"] > 0 for row in figures["wait"].values())
    assert "filter on, one thread" in printed
    first, again = (row for name, row in figures["orders"].items() if name.startswith("order olmo"))
    assert first["mb"] < 300 and again["mb"] < 300


def test_packed_rows_are_compared_with_grains(bench, monkeypatch):
    small = [profile._replace(documents=profile.documents // 20) for profile in loaders.PROFILES]
    monkeypatch.setattr(loaders, "PROFILES", tuple(small))
    figures, printed = bench("--only packed --seconds 0.01 --repeats 1")
    assert list(figures) == [f"packed, {profile.name}" for profile in loaders.PROFILES]
    for rows in figures.values():
        assert rows[loaders.LIMIT]["of_limit"] == 1 and rows[loaders.GRAIN]["times_grain"] == 1
    assert loaders.OURS in printed


def test_every_way_to_plan_a_corpus_is_measured(bench, tmp_path):
    figures, printed = bench("--only plans --plan-documents 20000")
    found = figures["plans"]
    peer = {plans.OLMO} if importlib.util.find_spec("olmo_core") else set()
    assert found.keys() == {plans.OURS, plans.GROUPED, plans.PACKED} | peer
    lengths = np.minimum(plans.made_up_lengths(20_000), plans.LENGTH)
    rows = len(ALGORITHMS["best_fit_decreasing"](lengths, PackingOptions(plans.LENGTH)).ends)
    assert found[plans.GROUPED]["rows"] == found[plans.PACKED]["rows"] == rows <= found[plans.OURS]["rows"]
    assert all(f"{name} " in printed for name in found)
    assert not list((tmp_path / "here").iterdir())  # the benchmark removed its files


def test_runs_with_and_without_withdrawn_documents_are_compared(bench):
    figures, printed = bench("--only withdrawn --plan-documents 5000 --seconds 0.01 --repeats 1")
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
