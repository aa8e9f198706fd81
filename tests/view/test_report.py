"""The figures of `grain-sft report` equal counts of the corpus and the batches, and its page shows all of them."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from batches import load, sections, write_config
from report_tables import check_tables, data_of, tables_of

from grain_sft import PackedLayout
from grain_sft.cli.main import main
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.report import packing_report
from grain_sft.transforms import NgramFilter
from grain_sft.view import report as report_module
from grain_sft.view import report_page
from grain_sft.view.pictures import draw_pictures
from grain_sft.view.report import make_report
from grain_sft.view.text import TokenTexts

LENGTH = 300
PICTURES = ["lengths", "packing", "left_out", "sources", "mixture", "throughput"]


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    """The HTML file of a report of the config `run` with NgramFilter added, and the path of the changed config."""
    folder = tmp_path_factory.mktemp("report")
    stated = json.loads(run.read_text()) | {"transforms": [{"ngram_filter": {"count_padding": True}}, "shift_targets"]}
    stated["layout"]["sequence_length"] = LENGTH
    config = write_config(folder / "run & <b>.json", stated)
    out = folder / "out" / "report.html"
    assert main(["report", str(config), "--output", str(out), "--seconds", "0.02", "--steps", "7"]) == 0
    return out, config


@pytest.fixture(scope="module")
def report(written):
    return json.loads(written[0].with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def pipeline(written):
    return load(written[1])


def test_page_json_and_pictures_are_in_one_folder(written, report):
    out, _ = written
    pictures = [out.with_suffix(f".{name}.png") for name in PICTURES]
    assert set(out.parent.iterdir()) == {out, out.with_suffix(".json"), *pictures}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    page = out.read_text()
    assert data_of(out) == report
    check_tables(tables_of(page), report)
    assert page.count("<svg") == len(PICTURES)
    assert not re.findall(r"https?://|@import|src=|<b>|\$", re.sub("<style>.*?</style>", "", page, flags=re.S))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_lengths_are_those_of_the_documents(report, pipeline):
    lengths, found = pipeline.source.layout.corpus.documents.length, report["lengths"]
    assert (found["documents"], found["tokens"], found["longest"]) == (len(lengths), lengths.sum(), lengths.max())
    assert found["percentiles"]["50%"] == np.median(lengths)
    for each in found["bins"]:
        inside = lengths[(lengths >= each["first"]) & (lengths <= each["last"])]
        assert (each["documents"], each["tokens"]) == (len(inside), inside.sum())
    assert sum(each["documents"] for each in found["bins"]) == len(lengths)


def test_packing_figures_are_those_of_the_rows_that_each_algorithm_makes(report, pipeline, tmp_path):
    assert [each["algorithm"] for each in report["packing"]["algorithms"]] == list(ALGORITHMS)
    assert report["packing"]["used"] == "best_fit_decreasing"
    for each in report["packing"]["algorithms"]:
        options = {"algorithm": each["algorithm"], "batch_rows": 4, "cache_dir": tmp_path}
        packed = packing_report(PackedLayout(pipeline.source.layout.corpus, LENGTH, **options))
        assert each == packed | {"seconds": each["seconds"]}


def test_the_algorithm_of_the_config_is_marked_also_if_it_packs_whole_batches(report):
    page = report_page({**report, "packing": {**report["packing"], "used": "multipack"}}, {})
    assert re.findall("<tr class=used><td class=text>([^<]*)<", page) == ["multipack x 4"]


def test_attention_is_compared_between_the_devices_of_each_step(report, pipeline):
    """The attention cost of a device is the sum of squared segment lengths of its rows: 1, 2 or 4 rows a device."""
    layout, spreads = pipeline.source.layout, {1: [], 2: [], 4: []}
    for step in report["sources"]["steps"]:
        rows = pipeline.sampler.rows(step).tolist()
        costs = [sum((span.stop - span.start) ** 2 for span in layout.spans(row)) for row in rows]
        for each, found in spreads.items():
            devices = [sum(costs[at : at + each]) for at in range(0, len(rows), each)]
            found.append(max(devices) / np.mean(devices))
    for figures, (rows, found) in zip(report["attention"], spreads.items(), strict=True):
        assert figures["rows_a_device"] == rows
        assert (figures["mean"], figures["worst"]) == pytest.approx((np.mean(found), max(found)))
        assert figures["step"] == report["sources"]["steps"][int(np.argmax(found))]


def test_tokens_of_each_source_are_counted_in_the_batches(report, pipeline):
    steps, columns = report["sources"]["steps"], report["sources"]["columns"]
    assert len(steps) == 7 and (steps[0], steps[-1]) == (0, len(pipeline) - 1)
    corpus, layout = pipeline.source.layout.corpus, pipeline.source.layout
    tokens, trainable = np.zeros((2, 7, 2), int)
    for number, step in enumerate(steps):
        batch = pipeline[step]
        for row, instance in enumerate(pipeline.sampler.rows(step).tolist()):
            for segment, span in enumerate(layout.spans(instance), 1):
                source = corpus.sources[span.document][0]
                tokens[number, source] += (batch["inputs_segmentation"][row] == segment).sum()
                trainable[number, source] += (batch["targets_segmentation"][row] == segment).sum()
    assert columns["source"] == list(corpus.source_names)
    assert [report["sources"]["tokens"][name] for name in corpus.source_names] == tokens.T.tolist()
    assert (columns["tokens"], columns["trainable"]) == (tokens.sum(0).tolist(), trainable.sum(0).tolist())
    assert 0 < trainable.sum() < tokens.sum()


def test_rejected_rows_are_those_of_the_filter_and_examples_repeat(report, pipeline):
    found, steps = report["filter"], report["sources"]["steps"]
    rows = np.concatenate([pipeline.sampler.rows(step) for step in steps])
    fails = NgramFilter(count_padding=True).fails(pipeline.source.read(rows)["tokens"])
    assert (found["used"], found["rows"], found["rejected"]) == (True, len(rows), fails.sum())
    assert 0 < found["rejected_for_padding"] < found["rejected"]
    taken = sum(int((pipeline[step]["targets_segmentation"] != 0).any(axis=1).sum()) for step in steps)
    assert taken == len(rows) - found["rejected"]
    assert found["examples"]
    for example in found["examples"]:
        tokens = pipeline.source[example["instance"]]["tokens"].tolist()
        at, period, times = example["at"], example["period"], example["times"]
        assert tokens[at : at + period * times] == tokens[at : at + period] * times and times >= 32
        assert example["instance"] in pipeline.sampler.rows(example["step"]) and "again" in example["text"]


def test_left_out_tokens_add_up(report, pipeline):
    tokens = {each["what"]: each["tokens"] for each in report["left_out"]}
    layout = pipeline.source.layout
    packed, rest = int(layout.pieces(np.arange(len(layout))).length.sum()), len(layout) % 4
    cut = tokens[f"truncated to {LENGTH} tokens"] + tokens["dropped"] + tokens["in no document"]
    assert packed + cut == layout.corpus.num_tokens
    assert tokens["padding of rows"] == len(layout) * LENGTH - packed
    unused = tokens[f"{rest} rows that no step of an epoch reads; a shuffled order omits different rows in each epoch"]
    assert rest and unused == rest * LENGTH


def made(config, layout=None, **changed):
    """Return a pipeline of one epoch of the chats, and the (documents, tokens) that it leaves out, by reason."""
    path = config(layout=None, sampler={"epochs": 1, "last_batch": "fill"}, **changed)
    pipeline = load(json.loads(path.read_text()) | {"layout": layout or {"kind": "padded", "sequence_length": 50}})
    return pipeline, {each["what"]: (each["documents"], each["tokens"]) for each in report_module.left_out(pipeline)}


def test_windows_leave_out_the_ends_of_files(config):
    pipeline, lines = made(config, {"kind": "windows", "sequence_length": 64})
    what, (_, tokens) = next(iter(lines.items()))
    assert what.startswith("ends of")
    assert tokens == sum(shard.num_tokens % 64 for shard in pipeline.source.layout.corpus.shards) > 0
    report = make_report(pipeline, TokenTexts(None), steps=3)
    assert report["throughput"] is None and report["filter"]["used"] is False
    assert report["lengths"]["documents"] == len(pipeline.source.layout.corpus.documents)


def test_padded_rows_leave_out_ends_of_long_documents_and_short_documents(config):
    pipeline, lines = made(config, {"kind": "padded", "sequence_length": 50, "min_tokens": 40})
    lengths = pipeline.source.layout.corpus.documents.length
    kept, dropped = lengths[lengths >= 40], lengths[lengths < 40]
    assert lines["truncated to the last 50 tokens"] == ((kept > 50).sum(), np.maximum(kept - 50, 0).sum())
    assert lines["dropped, shorter than 40 tokens"] == (len(dropped), dropped.sum())
    assert lines["padding of rows"] == (None, np.maximum(50 - kept, 0).sum())
    filling = -len(kept) % 4
    what = f"{filling} rows of padding, which fill the last step of an epoch"
    assert lines.get(what) == ((None, filling * 50) if filling else None)


def test_documents_that_prepare_truncated_or_dropped_are_in_the_report(config, run, tmp_path):
    chats = tmp_path / "chats"
    shutil.copytree(json.loads(run.read_text())["corpus"]["path"], chats)
    manifest = json.loads((chats / "prepare.json").read_text())
    manifest["splits"]["train"] |= {"truncated": 3, "cut_tokens": 77}
    (chats / "prepare.json").write_text(json.dumps(manifest | {"dropped": {"empty": 4}, "rejected": 2}))
    _, lines = made(config, corpus={"path": str(chats)})
    assert lines["preparing: truncated, split train"] == (3, 77)
    assert lines["preparing: dropped, empty"] == (4, None) and lines["preparing: rejected"] == (2, None)
    (chats / "prepare.json").write_text("[]")
    _, lines = made(config, corpus={"path": str(chats)})
    assert any("can't be read" in what for what in lines)


def write_plain(folder, corpus):
    """Write a config that reads windows of 100 tokens from files of tokens alone, and return its path."""
    options = {"layout": "windows", "order": "shuffle", "global_batch_size": 2}
    return write_config(folder / "plain.json", sections("", 100, corpus=corpus, **options))


def test_without_matplotlib_the_extra_is_named(run, tmp_path, monkeypatch, run_command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install '.[report]'" in run_command("report", run, "--output", tmp_path / "x.html", status=1).err
    assert list(tmp_path.iterdir()) == []


def test_a_large_corpus_is_sampled_and_the_report_states_how_much(write_tokens, tmp_path, monkeypatch, pipeline):
    for number in range(8):
        write_tokens(f"many/{number}.npy", np.arange(1000) % 50, "uint16")  # EOS is 7: 20 documents
    path = write_plain(tmp_path, {"path": str(tmp_path / "many"), "dtype": "uint16", "eos_token_id": 7})
    monkeypatch.setattr(report_module, "MOST_SCANNED", 4000)
    monkeypatch.setattr(report_module, "MOST_PACKED", 60)
    monkeypatch.setattr(report_module, "MOST_TOKENS", 1000)
    report = make_report(load(path), TokenTexts(None), steps=64)
    assert report["lengths"]["documents"] == 4 * 20
    assert report["lengths"]["sampled"].startswith("From 4 of the 8 files, evenly spaced, with 50.0% of the tokens")
    assert report["packing"]["sampled"].startswith("From 3 of the 8 files, evenly spaced, with 37.5% of the tokens")
    assert report["sampled"] == {"steps": 5, "of": 40, "ends": False}
    tried = report_module.packing(load(path))["algorithms"]
    assert len(tried) == len(ALGORITHMS) and not any("error" in each for each in tried)
    assert make_report(pipeline, TokenTexts(None), steps=1)["sampled"]["steps"] == 1


def test_a_corpus_without_documents_is_reported_without_lengths(write_tokens, tmp_path, run_command):
    tokens = write_tokens("a.npy", np.arange(1000) % 9, "uint16")
    path, out = write_plain(tmp_path, {"path": str(tokens), "dtype": "uint16"}), tmp_path / "out.html"
    assert "lengths" not in run_command("report", path, "--output", out, "--seconds", "0").out
    assert "eos_token_id" in json.loads((tmp_path / "out.json").read_text())["lengths"]["error"]
    assert "Not measured." in out.read_text() and "eos_token_id" in out.read_text()


def test_no_page_replaces_its_config(config, run_command):
    path = config()
    before, replaces = path.read_bytes(), "is an input, which the output"
    for command, reason in (
        (f"report {path} --output {path}", replaces),
        (f"report {path} --output {path.with_suffix('.html')}", replaces),
        (f"report {path} --output a.json", "Name it a.html"),
        (f"report {path} --output=", "the output is an empty name"),
        (f"inspect {path} --step 0 --html {path}", replaces),
        (f"simulate {path} --hosts 2 --steps 0:1 --html {path}", replaces),
    ):
        assert reason in run_command(*command.split(), status=1).err
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_a_browser_shows_all_tables_and_pictures_of_the_report(written, report, browser, scheme, width):
    browser.set_screen(width, 900, scheme)
    browser.open(written[0])
    assert browser.console() == [] and browser.requests() == [written[0].absolute().as_uri()]
    assert browser.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert browser.run("return document.title") == "Report: run & <b>.json"
    tables = browser.run(
        """return Object.fromEntries([...document.querySelectorAll('table')].map((table) => [table.id,
             [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))]))"""
    )
    check_tables(tables, report)
    drawn = browser.run(
        """return [...document.querySelectorAll('figure svg')].map((svg) => { const box = svg.getBoundingClientRect();
             const ink = getComputedStyle(svg.querySelector('text')).fill;
             return [box.width > 300 && box.height > 100, ink, svg.textContent]; })"""
    )
    assert len(drawn) == len(PICTURES) and all(big for big, _, _ in drawn)
    assert {ink for _, ink, _ in drawn} == {"rgb(27, 31, 36)" if scheme == "light" else "rgb(230, 233, 236)"}
    packing = next(text for _, _, text in drawn if "best_fit_decreasing" in text)
    for each in report["packing"]["algorithms"]:
        assert f"{100 * (1 - each['padding_share']):.3f}%" in packing


def test_a_mixture_is_reported_source_by_source(mixture, tmp_path, capsys):
    out = tmp_path / "mixture.html"
    assert main(["report", str(mixture), "--output", str(out), "--seconds", "0", "--steps", "6"]) == 0
    report, pipeline = json.loads((tmp_path / "mixture.json").read_text()), load(mixture)
    names = report["sources"]["columns"]["source"]
    (web,) = (name for name in names if "web" in name)
    assert len(names) == 3
    for step, tokens in zip(report["sources"]["steps"], report["sources"]["tokens"][web], strict=True):
        rows = pipeline.sampler.rows(step)
        assert len(rows) == (6 if step < 2 else 3)
        assert tokens == 512 * sum(len(at) for name, at, _ in pipeline.source.layout.split(rows) if name == "web")
    parts = [part.corpus for part in pipeline.source.layout.parts.values()]
    assert report["lengths"]["documents"] == sum(len(part.documents) for part in parts)
    whats = [each["what"] for each in report["left_out"]]
    assert "chats: padding of rows" in whats and "web: ends of 1 files, shorter than a window" in whats
    assert "Not compared for a mixture" in out.read_text()


def test_sources_of_any_name_are_in_the_legend():
    tokens = {"_a": [1, 2], "a/b": [1, 2], "c/b": [3, 4], 'id="x #0b7a75': [3, 4]}
    sources = {"columns": {"source": []}, "tokens": tokens, "steps": [0, 1]}
    report = {"lengths": {}, "packing": {}, "left_out": [], "sources": sources, "throughput": []}
    svg = draw_pictures(report)["mixture"].svg
    assert ">_a<" in svg and ">a/b<" in svg and ">c/b<" in svg and '>id="x #0b7a75<' in svg
