"""Helpers that read the data and the tables of a page, and check that the tables show the figures of a report."""

import html
import json
import re

import numpy as np

from grain_sft.layout.report import algorithm_title


def data_of(page):
    """Return the JSON data of a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    return json.loads(text)


def tables_of(page):
    """Return the tables of a page, by id. A table is a list of lines, and a line is a list of the texts of its cells."""

    def cells(line):
        return [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall("<t[dh].*?>(.*?)</t[dh]>", line)]

    found = re.findall(r'<table id="([^"]*)">(.*?)</table>', page, flags=re.S)
    return {name: [cells(line) for line in re.findall("<tr.*?>(.*?)</tr>", rows)] for name, rows in found}


def check_tables(tables, report):
    """Assert that the tables show each figure of the report in the form that a reader sees, such as "1,234"."""

    def column(name, at):
        return [line[at] for line in tables[f"{name}-table"][1:]]

    def counts(values):
        return ["-" if value is None else f"{value:,}" for value in values]

    columns, left_out = report["sources"]["columns"], report["left_out"]
    assert tables["length-bins"][1:] == [counts(each.values()) for each in report["lengths"]["bins"]]
    packing = [
        [algorithm_title(each), f"{each['rows']:,}", f"{each['padding_share']:.4%}", f"{each['truncated_tokens']:,}"]
        for each in report["packing"]["algorithms"]
    ]
    assert [[*line[:3], line[4]] for line in tables["packing-table"][1:]] == packing
    assert column("sources", 0) == columns["source"]
    assert [column("sources", at) for at in (3, 5)] == [counts(columns[name]) for name in ("tokens", "trainable")]
    assert column("mixture", 0) == counts(report["sources"]["steps"])
    tokens = np.array([report["sources"]["tokens"][name] for name in tables["mixture-table"][0][1:]])
    shares = [[f"{share:.3%}" for share in step] for step in (tokens / tokens.sum(0)).T]
    assert [line[1:] for line in tables["mixture-table"][1:]] == shares
    assert column("left-out", 0) == [each["what"] for each in left_out]
    assert column("left-out", 2) == counts(each["tokens"] for each in left_out)
    rejected = report["filter"]
    assert column("filter", 1) == counts(rejected[key] for key in ("rows", "rejected", "rejected_for_padding"))
    assert [line[5] for line in tables["filter-examples"][1:]] == [each["text"] for each in rejected["examples"]]
    assert column("throughput", 1) == counts(round(each["mtok_per_s"], 1) for each in report["throughput"]["rows"])
    assert tables["receipt-table"] == [["code", report["receipt"]], *map(list, report["parts"].items())]
