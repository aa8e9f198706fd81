"""HTML page of `grain-sft report`, with tables of numbers and pictures."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grain_sft.layout import algorithm_title
from grain_sft.view.page import make_page, part
from grain_sft.view.pictures import Picture, top_sources
from grain_sft.view.text import visible_line

Report = Mapping[str, Any]
Lines = Iterable[Sequence[object]]
"""Cells of each line of a table."""


def report_page(report: Report, pictures: Mapping[str, Picture]) -> str:
    """Return the report as one page of HTML. Its element `data` has the report as JSON."""
    receipt_lines = [("code", report["receipt"]), *report["parts"].items()]
    receipt = _table("receipt-table", ("", ""), receipt_lines, text_columns=(0, 1))
    # heading and HTML of each section, by the id of its element
    sections = {
        "run": ("The run", _run(report)),
        "lengths": ("Lengths of documents", _lengths(report["lengths"], report["run"]["sequence_length"])),
        "packing": ("Packing, by algorithm", _packing(report["packing"])),
        "attention": ("Attention, over the devices of a step", _attention(report["attention"])),
        "left_out": ("Truncated, dropped, padded", _left_out(report)),
        "sources": ("Sources, and how many of their tokens take loss", _sources(report)),
        "mixture": ("The mixture over steps", _mixture(report["sources"])),
        "filter": ("Rows that the filter rejects", _filter(report["filter"])),
        "throughput": ("Speed, and the limit", _throughput(report["throughput"])),
        "receipt": ("Receipt", _note("Two runs with this receipt have the same batches.") + receipt),
    }
    links = "\n".join(f'<li><a href="#{name}">{title}</a></li>' for name, (title, _) in sections.items())
    parts = [f"<h1>{_text(report['name'])}</h1>\n<nav aria-label='Sections'><ul>\n{links}\n</ul></nav>\n<main>"]
    for name, (title, body) in sections.items():
        figure = f"<figure>{pictures[name].svg}</figure>\n" if name in pictures else ""
        parts.append(f'<section id="{name}"><h2>{title}</h2>\n{figure}{body}\n</section>')
    body = "\n".join([*parts, "</main>"])
    return make_page(f"Report: {visible_line(report['name'])}", body, styles=part("report.css"), data=report)


def _run(report: Report) -> str:
    run, corpus = report["run"], report["corpus"]
    # if rows have several lengths, `global_batch_size` counts the longest rows; all batches have the same number of tokens
    longest = run["sequence_length"]
    lines = [("corpus", f"{corpus['tokens']:,} tokens in {corpus['shards']:,} files")]
    for length, rows in (run["rows_of_lengths"] or {longest: run["rows"]}).items():
        lines.append(("rows", f"{rows:,} of {length:,} tokens"))
    lines.append(("batch", f"{run['global_batch_size']:,} rows, {run['global_batch_size'] * longest:,} tokens"))
    lines.append(("steps", "never end" if run["steps"] is None else f"{run['steps']:,}"))
    counts = {"steps an epoch": run["steps_per_epoch"], "epochs": run["epochs"]}
    lines += [(name, f"{count:,}") for name, count in counts.items() if count is not None]
    lines.append(("receipt", report["receipt"]))
    return _table("run-table", ("", ""), lines, text_columns=(0, 1))


def _lengths(lengths: Report, row_length: int) -> str:
    if "error" in lengths:
        return _note(lengths["error"])
    facts = [
        ("documents", lengths["documents"]),
        ("tokens in them", lengths["tokens"]),
        ("mean", round(lengths["mean"], 1)),
        *((name, round(value, 1)) for name, value in lengths["percentiles"].items()),
        ("longest", lengths["longest"]),
        (f"longer than a row ({row_length:,})", lengths["longer_than_a_row"]),
    ]
    head = ("first", "last", "documents", "tokens")
    bins = [tuple(length_bin[key] for key in head) for length_bin in lengths["bins"]]
    facts_table = _table("length-facts", ("", "tokens or count"), facts)
    return _note(lengths["sampled"]) + facts_table + _table("length-bins", ("from", "to", *head[2:]), bins)


def _packing(comparison: Report) -> str:
    if "error" in comparison:
        return _note(comparison["error"])
    head = ["algorithm", "rows", "padding", "no padding", "truncated", "dropped", "split"]
    head += ["mean segments", "median", "max", "attention", "seconds"]
    used_title = ""
    lines: list[Sequence[object]] = []
    for packing in comparison["algorithms"]:
        title = algorithm_title(packing)
        if packing["algorithm"] == comparison["used"]:
            used_title = title
        if "error" in packing:
            lines.append((title, packing["error"]))
            continue
        segments = packing["segments_a_row"]
        cells = [title, packing["rows"], f"{packing['padding_share']:.4%}", f"{1 - packing['padding_share']:.4%}"]
        cells += [packing[key] for key in ("truncated_tokens", "dropped_tokens", "split_documents")]
        cells += [round(segments["mean"], 2), segments["median"], segments["max"]]
        lines.append([*cells, round(packing["attention"][0]["shuffled"], 2), round(packing["seconds"], 2)])
    note = "One epoch. Truncated and dropped count tokens; split counts documents. Segments are counted per row. "
    note += "Attention is the highest cost of a device divided by the mean cost, with one random row per device."
    if comparison["used"] is not None:
        note += f" This config packs by {comparison['used']}."
    return _note(comparison["sampled"]) + _note(note) + _table("packing-table", head, lines, used=used_title)


def _attention(spreads: Sequence[Report]) -> str:
    note = "The highest cost of a device divided by the mean cost, in the sampled steps. A row costs the sum of the "
    note += "squares of its segments' lengths. For a dense kernel, which skips nothing, every row costs the same."
    lines = [(each["rows_a_device"], f"{each['mean']:.3f}", f"{each['worst']:.3f}", each["step"]) for each in spreads]
    return _note(note) + _table("attention-table", ("rows a device", "mean", "worst", "in step"), lines)


def _left_out(report: Report) -> str:
    lines = []
    for entry in report["left_out"]:
        counts = ("-" if entry[key] is None else f"{entry[key]:,}" for key in ("documents", "tokens"))
        share = (entry["tokens"] or 0) / report["corpus"]["tokens"]
        lines.append((entry["what"], *counts, f"{share:.4%}"))
    if not lines:
        return _note("Nothing is left out: every token of the corpus is in a row.")
    return _table("left-out-table", ("what", "documents", "tokens", "of the corpus"), lines)


def _sources(report: Report) -> str:
    head = ("source", "documents", "segments", "tokens", "share", "take loss", "of its tokens")
    lines = []
    # the columns of `summarize`, in its order: source, documents, segments, tokens, share, trainable
    for *counts, tokens, share, trainable in zip(*report["sources"]["columns"].values(), strict=True):
        lines.append((*counts, tokens, f"{share:.4%}", trainable, f"{trainable / max(1, tokens):.4%}"))
    sampled = report["sampled"]
    note = f"{sampled['steps']:,} evenly spaced steps of {sampled['of']:,} steps."
    if not sampled["ends"]:
        note += f" The run never ends; its first {sampled['of']:,} steps read as many rows as the layout has."
    elif sampled["steps"] == sampled["of"]:
        note = f"All {sampled['of']:,} steps."
    return _note(note) + _table("sources-table", head, lines)


def _mixture(sources: Report) -> str:
    tokens = top_sources(sources["tokens"])
    lines = []
    for step, *counts in zip(sources["steps"], *tokens.values(), strict=True):
        total = max(1, sum(counts))
        lines.append((step, *(f"{count / total:.3%}" for count in counts)))
    names = [visible_line(name) for name in tokens]
    return _note("Shares of the tokens of each sampled step.") + _table("mixture-table", ("step", *names), lines)


def _filter(rejected: Report) -> str:
    owner = "of this config" if rejected["used"] else "with defaults, since this config has no filter"
    names = {"rows": "rows checked", "rejected": "rejected", "rejected_for_padding": "rejected for their padding alone"}
    lines = [(name, rejected[key]) for key, name in names.items()]
    body = _note(f"{rejected['filter']}, {owner}; in the sampled steps.") + _table("filter-table", ("", "rows"), lines)
    if not rejected["examples"]:
        return body + _note("No row is rejected for its text.")
    head = ("step", "row of the layout", "from token", "period", "times", "the repeated text")
    keys = ("step", "instance", "at", "period", "times", "text")
    examples = [tuple(example[key] for key in keys) for example in rejected["examples"]]
    return body + _table("filter-examples", head, examples, text_columns=(0, 5))


def _throughput(speed: Report | None) -> str:
    if speed is None:
        return _note("Not measured.")
    digits = {"mtok_per_s": 1, "ms_per_batch": 3, "of_limit": 3}
    lines = [(row["name"], *(round(row[key], count) for key, count in digits.items())) for row in speed["rows"]]
    note = f"Batches of {speed['tokens']:,} tokens, about {speed['seconds']:g} s per line, on the machine that made this page."
    note += " The limit is the speed of copying the rows of a batch in memory."
    return _note(note) + _table("throughput-table", ("", "Mtok/s", "ms a batch", "of the limit"), lines)


def _table(name: str, head: Sequence[str], lines: Lines, *, text_columns: Sequence[int] = (0,), used: str = "") -> str:
    """Return an HTML table with the id `name`.

    The last cell of a line with fewer cells than `head` is text, and spans the remaining columns. Columns other than
    `text_columns` have numbers. The line that begins with the cell `used` is highlighted.
    """

    def row(tag: str, line: Sequence[object]) -> str:
        """Return a line of the table. `tag` is the element of its cells: th or td."""
        cells = []
        for column, value in enumerate(line):
            num_spanned = len(head) - column if column == len(line) - 1 else 1
            shown = f"{value:,}" if isinstance(value, int | float) else _text(str(value))
            kind = " class=text" if column in text_columns or num_spanned > 1 else ""
            width = f' colspan="{num_spanned}"' if num_spanned > 1 else ""
            cells.append(f"<{tag}{kind}{width}>{shown}</{tag}>")
        highlight = " class=used" if used and line[0] == used else ""
        return f"<tr{highlight}>{''.join(cells)}</tr>"

    opening = f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table id="{name}">'
    table_head = f"<thead>{row('th', head)}</thead>" if any(head) else ""
    return f"{opening}{table_head}<tbody>{''.join(row('td', line) for line in lines)}</tbody></table></div>\n"


def _note(text: str | None) -> str:
    """Return an HTML paragraph in a quiet colour; "" without a text."""
    return "" if not text else f'<p class="quiet">{_text(text)}</p>\n'


def _text(text: str) -> str:
    """Return HTML that shows a text on one line, with signs for invisible characters."""
    return html.escape(visible_line(text))
