"""The report: its figures are those of the arrays, and its page says its figures."""

import importlib
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from grain_sft import Host, PackedLayout, load
from grain_sft.cli.main import main
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.report import algorithm_title, packing_report
from grain_sft.transforms import NgramFilter
from grain_sft.view import report as report_module
from grain_sft.view import report_corpus
from grain_sft.view.report import make_report
from grain_sft.view.text import TokenTexts

pytest.importorskip("matplotlib", reason="needs the extra 'report'")

LENGTH = 300
PICTURES = ["lengths", "packing", "left_out", "sources", "mixture", "throughput"]


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    """The folder of a report of the config, with the filter; and that config."""
    folder = tmp_path_factory.mktemp("report")
    sections = json.loads(run.read_text()) | {
        "transforms": [{"ngram_filter": {"count_padding": True}}, "shift_targets"]
    }
    sections["layout"]["sequence_length"] = LENGTH
    config = folder / "run & <b>.json"
    config.write_text(json.dumps(sections))
    out = folder / "out" / "report.html"
    assert main(["report", str(config), "--output", str(out), "--seconds", "0.02", "--steps", "7"]) == 0
    return out, config


@pytest.fixture(scope="module")
def report(written):
    return json.loads(written[0].with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def pipeline(written):
    return load(written[1], host=Host(0, 1))


class Tables(HTMLParser):
    """The tables of a page: lines of cells by the table's id."""

    def __init__(self, page):
        super().__init__()
        self.found = {}
        self._cell = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self._lines = self.found[dict(attributes)["id"]] = []
        elif tag == "tr":
            self._lines.append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._lines[-1].append("".join(self._cell))
            self._cell = None


def test_page_json_and_pictures_stand_beside_each_other(written, report):
    out, _ = written
    names = sorted(path.name for path in out.parent.iterdir())
    assert names == sorted(["report.html", "report.json", *(f"report.{name}.png" for name in PICTURES)])
    for name in PICTURES:
        assert (out.parent / f"report.{name}.png").read_bytes().startswith(b"\x89PNG")
    page = out.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data) == report
    assert page.count("<svg") == len(PICTURES)
    assert not re.findall(r"https?://|@import|src=|<b>|\$", re.sub("<style>.*?</style>", "", page, flags=re.S))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_lengths_are_those_of_the_documents(report, pipeline):
    lengths = pipeline.source.layout.corpus.documents.length
    found = report["lengths"]
    assert (found["documents"], found["tokens"], found["longest"]) == (len(lengths), lengths.sum(), lengths.max())
    assert found["percentiles"]["50%"] == np.median(lengths)
    for each in found["bins"]:
        inside = lengths[(lengths >= each["first"]) & (lengths <= each["last"])]
        assert (each["documents"], each["tokens"]) == (len(inside), inside.sum())
    assert sum(each["documents"] for each in found["bins"]) == len(lengths)


def test_packing_is_what_each_algorithm_makes(report, pipeline, tmp_path):
    layout = pipeline.source.layout
    assert [each["algorithm"] for each in report["packing"]["algorithms"]] == list(ALGORITHMS)
    assert report["packing"]["used"] == "best_fit_decreasing"
    for each in report["packing"]["algorithms"]:
        packed = PackedLayout(layout.corpus, LENGTH, algorithm=each["algorithm"], batch_rows=4, cache_dir=tmp_path)
        assert {name: each[name] for name in each if name != "seconds"} == packing_report(packed)
        row = packed.spans(0)
        assert each["segments_a_row"]["max"] >= len({span.document for span in row})


def test_sources_are_counted_in_the_batches_themselves(report, pipeline):
    steps = report["sources"]["steps"]
    assert len(steps) == 7 and (steps[0], steps[-1]) == (0, len(pipeline) - 1)
    corpus = pipeline.source.layout.corpus
    tokens, trainable = np.zeros(2, int), np.zeros(2, int)
    for number, step in enumerate(steps):
        batch, of_step = pipeline[step], np.zeros(2, int)
        for row, instance in enumerate(pipeline.sampler.rows(step).tolist()):
            spans = pipeline.source.layout.spans(instance)
            for segment, span in enumerate(spans, 1):
                source = corpus.sources[span.document][0]
                of_step[source] += (batch["inputs_segmentation"][row] == segment).sum()
                trainable[source] += (batch["targets_segmentation"][row] == segment).sum()
        names = corpus.source_names
        assert [report["sources"]["tokens"][name][number] for name in names] == of_step.tolist()
        tokens += of_step
    columns = report["sources"]["columns"]
    assert columns["source"] == list(names)
    assert (columns["tokens"], columns["trainable"]) == (tokens.tolist(), trainable.tolist())
    assert 0 < sum(trainable) < sum(tokens)


def test_rejected_rows_and_their_examples_are_real(report, pipeline):
    found = report["filter"]
    steps = report["sources"]["steps"]
    rows = np.concatenate([pipeline.sampler.rows(step) for step in steps])
    element = pipeline.source.read(rows)
    fails = NgramFilter(count_padding=True).fails(element["tokens"])
    assert (found["used"], found["rows"], found["rejected"]) == (True, len(rows), fails.sum())
    assert 0 < found["rejected_for_padding"] < found["rejected"]
    taken = sum(int((pipeline[step]["targets_segmentation"] != 0).any(axis=1).sum()) for step in steps)
    assert taken == len(rows) - found["rejected"]
    assert found["examples"]
    for example in found["examples"]:
        tokens = pipeline.source[example["instance"]]["tokens"].tolist()
        at, period, times = example["at"], example["period"], example["times"]
        repeated = tokens[at : at + period] * times
        assert tokens[at : at + period * times] == repeated and times >= 32
        assert example["instance"] in pipeline.sampler.rows(example["step"]) and "again" in example["text"]


def test_left_out_tokens_add_up(report, pipeline):
    lines = {each["what"]: each for each in report["left_out"]}
    layout = pipeline.source.layout
    held = int(layout.pieces(np.arange(len(layout))).length.sum())
    cut, dropped = lines[f"truncated to {LENGTH} tokens"], lines["dropped"]
    assert held + cut["tokens"] + dropped["tokens"] + lines["in no document"]["tokens"] == layout.corpus.num_tokens
    assert lines["padding of rows"]["tokens"] == len(layout) * LENGTH - held
    rest = len(layout) % 4
    assert (
        rest and lines[f"{rest} rows of each epoch, other ones each time, that fill no step"]["tokens"] == rest * LENGTH
    )


@pytest.fixture
def made(config):
    """`made(layout)`: the pipeline of one epoch over the chats, in another layout."""

    def make(layout):
        path = config(layout=None, sampler={"epochs": 1, "last_batch": "fill"})
        path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": layout}))
        return load(path, host=Host(0, 1))

    return make


def test_windows_leave_out_the_ends_of_files(made):
    pipeline = made({"kind": "windows", "sequence_length": 64})
    shards = pipeline.source.layout.corpus.shards
    lines = report_corpus.left_out(pipeline)
    assert lines[0]["what"].startswith("ends of")
    assert lines[0]["tokens"] == sum(shard.num_tokens % 64 for shard in shards) > 0
    report = make_report(pipeline, TokenTexts(None), steps=3)
    assert report["throughput"] is None and report["filter"]["used"] is False
    assert report["lengths"]["documents"] == len(pipeline.source.layout.corpus.documents)


def test_padded_rows_leave_out_what_is_longer_and_what_is_short(made):
    pipeline = made({"kind": "padded", "sequence_length": 50, "min_tokens": 40})
    lengths = pipeline.source.layout.corpus.documents.length
    lines = {each["what"]: (each["documents"], each["tokens"]) for each in report_corpus.left_out(pipeline)}
    kept = lengths[lengths >= 40]
    assert lines["truncated to the last 50 tokens"] == ((kept > 50).sum(), np.maximum(kept - 50, 0).sum())
    dropped = lengths[lengths < 40]
    assert lines["dropped, shorter than 40 tokens"] == (len(dropped), dropped.sum())
    assert lines["padding of rows"] == (None, np.maximum(50 - kept, 0).sum())
    filling = -len(kept) % 4
    assert not filling or lines[f"{filling} rows of padding, which fill the last step of an epoch"] == (
        None,
        filling * 50,
    )


def test_what_prepare_cut_is_in_the_report(config, tmp_path):
    chats = tmp_path / "chats"
    source = json.loads(config().read_text())["corpus"]["path"]
    shutil.copytree(source, chats)
    manifest = json.loads((chats / "prepare.json").read_text())
    manifest["splits"]["train"] |= {"truncated": 3, "cut_tokens": 77}
    manifest |= {"dropped": {"empty": 4}, "rejected": 2}
    (chats / "prepare.json").write_text(json.dumps(manifest))
    made = load(config(corpus={"path": str(chats)}), host=Host(0, 1))
    lines = {each["what"]: (each["documents"], each["tokens"]) for each in report_corpus.left_out(made)}
    assert lines["preparing: truncated, split train"] == (3, 77)
    assert lines["preparing: dropped, empty"] == (4, None) and lines["preparing: rejected"] == (2, None)
    (chats / "prepare.json").write_text("[]")
    assert any("can't be read" in each["what"] for each in report_corpus.left_out(made))


def test_very_much_is_sampled_and_said(write_tokens, tmp_path, monkeypatch, config):
    for number in range(8):
        tokens = np.arange(1000) % 50
        write_tokens(f"many/{number}.npy", tokens, "uint16")
    corpus = {"path": str(tmp_path / "many"), "dtype": "uint16", "eos_token_id": 7}
    sections = {"corpus": corpus, "layout": {"kind": "windows", "sequence_length": 100}}
    sections["sampler"] = {"seed": 0, "global_batch_size": 2}
    path = tmp_path / "many.json"
    path.write_text(json.dumps(sections))
    monkeypatch.setattr(report_corpus, "MOST_SCANNED", 4000)
    monkeypatch.setattr(report_corpus, "MOST_PACKED", 60)
    monkeypatch.setattr(report_module, "MOST_TOKENS", 1000)
    report = make_report(load(path, host=Host(0, 1)), TokenTexts(None), steps=64)
    assert report["lengths"]["documents"] == 4 * 20
    assert report["lengths"]["sampled"].startswith("Of 4 of the 8 files at equal distances, 50.0% of the tokens")
    assert report["packing"]["sampled"].startswith("Of 3 of the 4 files")
    assert report["sampled"] == {"steps": 5, "of": 40, "ends": False}
    monkeypatch.setattr(report_corpus, "MOST_SLOWLY_PACKED", 59)
    *tried, multipack = report_corpus.packing(load(path, host=Host(0, 1)))["algorithms"]
    assert len(tried) == len(ALGORITHMS) - 1 and not any("error" in each for each in tried)
    assert multipack["algorithm"] == "multipack" and "Not tried" in multipack["error"]
    few = make_report(load(config(), host=Host(0, 1)), TokenTexts(None), steps=1)
    assert few["sampled"]["steps"] == 1


def test_a_corpus_without_documents_is_reported_without_lengths(write_tokens, tmp_path, capsys):
    path = tmp_path / "plain.json"
    corpus = {"path": str(write_tokens("a.npy", np.arange(1000) % 9, "uint16")), "dtype": "uint16"}
    layout = {"kind": "windows", "sequence_length": 100}
    path.write_text(json.dumps({"corpus": corpus, "layout": layout, "sampler": {"seed": 0, "global_batch_size": 2}}))
    out = tmp_path / "out.html"
    assert main(["report", str(path), "--output", str(out), "--seconds", "0"]) == 0
    assert "lengths" not in capsys.readouterr().out
    assert "eos_token_id" in json.loads((tmp_path / "out.json").read_text())["lengths"]["error"]
    assert "Not measured." in out.read_text() and "eos_token_id" in out.read_text()


def test_a_report_does_not_write_over_its_config(config, capsys):
    path = config()
    before = path.read_bytes()
    for name in (path, path.with_suffix(".html")):
        assert main(["report", str(path), "--output", str(name)]) == 1
        assert "would be written over" in capsys.readouterr().err
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_without_matplotlib_the_extra_is_named(run, tmp_path, monkeypatch, capsys):
    real = importlib.import_module

    def without(name, package=None):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main(["report", str(run), "--output", str(tmp_path / "x.html")]) == 1
    assert "pip install '.[report]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_figures(written, report):
    tables = Tables(written[0].read_text()).found
    check_tables(tables, report)


def check_tables(tables, report):
    """Every figure stands in its table, as the page's reader sees it."""
    bins = [
        [f"{each[key]:,}" for key in ("first", "last", "documents", "tokens")] for each in report["lengths"]["bins"]
    ]
    assert tables["length-bins"][1:] == bins
    for line, each in zip(tables["packing-table"][1:], report["packing"]["algorithms"], strict=True):
        assert line[0] == algorithm_title(each) and line[1] == f"{each['rows']:,}"
        assert line[2] == f"{each['padding_share']:.4%}" and line[4] == f"{each['truncated_tokens']:,}"
    columns = report["sources"]["columns"]
    assert [line[0] for line in tables["sources-table"][1:]] == columns["source"]
    assert [line[3] for line in tables["sources-table"][1:]] == [f"{each:,}" for each in columns["tokens"]]
    assert [line[5] for line in tables["sources-table"][1:]] == [f"{each:,}" for each in columns["trainable"]]
    steps = report["sources"]["steps"]
    assert [line[0] for line in tables["mixture-table"][1:]] == [f"{step:,}" for step in steps]
    names = tables["mixture-table"][0][1:]
    for at, line in enumerate(tables["mixture-table"][1:]):
        total = sum(report["sources"]["tokens"][name][at] for name in names)
        assert line[1:] == [f"{report['sources']['tokens'][name][at] / total:.3%}" for name in names]
    left = [[each["what"], f"{each['tokens']:,}" if each["tokens"] is not None else "-"] for each in report["left_out"]]
    assert [[line[0], line[2]] for line in tables["left-out-table"][1:]] == left
    assert [line[1] for line in tables["filter-table"][1:]] == [
        str(report["filter"][key]) for key in ("rows", "rejected", "rejected_for_padding")
    ]
    assert [line[5] for line in tables["filter-examples"][1:]] == [
        each["text"] for each in report["filter"]["examples"]
    ]
    assert [line[1] for line in tables["throughput-table"][1:]] == [
        f"{round(each['mtok_per_s'], 1):,}" for each in report["throughput"]["rows"]
    ]
    assert tables["receipt-table"] == [["code", report["receipt"]], *map(list, report["parts"].items())]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_a_browser_opens_the_report(written, report, browser, scheme, width):
    out, _ = written
    browser.look(width, 900, scheme)
    browser.open(out)
    assert browser.console() == []
    assert browser.requests() == [out.absolute().as_uri()]
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
    report, pipeline = json.loads((tmp_path / "mixture.json").read_text()), load(mixture, host=Host(0, 1))
    names = report["sources"]["columns"]["source"]
    assert len(names) == 3 and sum("web" in name for name in names) == 1
    web = next(name for name in names if "web" in name)
    for step, tokens in zip(report["sources"]["steps"], report["sources"]["tokens"][web], strict=True):
        rows = pipeline.sampler.rows(step)
        assert len(rows) == (6 if step < 2 else 3)
        assert tokens == 512 * sum(len(at) for name, at, _ in pipeline.source.layout.split(rows) if name == "web")
    parts = [part.corpus for part in pipeline.source.layout.parts.values()]
    assert report["lengths"]["documents"] == sum(len(part.documents) for part in parts)
    whats = [each["what"] for each in report["left_out"]]
    assert "chats: padding of rows" in whats and "web: ends of 1 files that fill no row" in whats
    assert "Not compared for a mixture" in out.read_text()
