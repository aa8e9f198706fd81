"""HTML page of a report. Each section has a table of figures, and most have a picture."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grain_sft.layout import algorithm_title
from grain_sft.view.page import make_page, part
from grain_sft.view.pictures import Picture, top_sources
from grain_sft.view.text import visible_line

Report = Mapping[str, Any]


def report_page(report: Report, pictures: Mapping[str, Picture]) -> str:
    """Return the report as one page of HTML, with all figures as JSON in the element `data`."""
    receipt = _table("receipt-table", ("", ""), [("code", report["receipt"]), *report["parts"].items()], words=(0, 1))
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
    longest = run["sequence_length"]  # a batch of shorter rows has more rows and as many tokens
    of_lengths = run["rows_of_lengths"] or {longest: run["rows"]}
    lines = [
        ("corpus", f"{corpus['tokens']:,} tokens in {corpus['shards']:,} files"),
        *(("rows", f"{rows:,} of {length:,} tokens") for length, rows in of_lengths.items()),
        ("batch", f"{run['global_batch_size']:,} rows, {run['global_batch_size'] * longest:,} tokens"),
        ("steps", "never end" if run["steps"] is None else f"{run['steps']:,}"),
    ]
    counts = {"steps an epoch": run["steps_per_epoch"], "epochs": run["epochs"]}
    lines += [(name, f"{count:,}") for name, count in counts.items() if count is not None]
    return _table("run-table", ("", ""), [*lines, ("receipt", report["receipt"])], words=(0, 1))


def _lengths(found: Report, length: int) -> str:
    if "error" in found:
        return _note(found["error"])
    facts = [("documents", found["documents"]), ("tokens in them", found["tokens"]), ("mean", round(found["mean"], 1))]
    facts += [(name, round(value, 1)) for name, value in found["percentiles"].items()]
    facts += [("longest", found["longest"]), (f"longer than a row ({length:,})", found["longer_than_a_row"])]
    bins = [(each["first"], each["last"], each["documents"], each["tokens"]) for each in found["bins"]]
    tables = _table("length-facts", ("", "tokens or count"), facts)
    return _note(found["sampled"]) + tables + _table("length-bins", ("from", "to", "documents", "tokens"), bins)


def _packing(found: Report) -> str:
    if "error" in found:
        return _note(found["error"])
    head = ["algorithm", "rows", "padding", "no padding", "truncated", "dropped", "split"]
    head += ["segments", "median", "max", "attention", "s"]
    used, lines = "", list[Sequence[object]]()
    for each in found["algorithms"]:
        title = algorithm_title(each)
        used = title if each["algorithm"] == found["used"] else used
        if "error" in each:
            lines.append((title, each["error"]))
            continue
        segments = each["segments_a_row"]
        shares = (f"{each['padding_share']:.4%}", f"{1 - each['padding_share']:.4%}")
        cut = (each["truncated_tokens"], each["dropped_tokens"], each["split_documents"])
        counts = (round(segments["mean"], 2), segments["median"], segments["max"])
        measured = (round(each["attention"][0]["shuffled"], 2), round(each["seconds"], 2))
        lines.append((title, each["rows"], *shares, *cut, *counts, *measured))
    note = "One epoch, packed for this report by each algorithm. Truncated and dropped: tokens. Split: documents. Segments: "
    note += "mean, median and most of a row. Attention: the highest cost of a device over the mean, one random row a device."
    note += "" if found["used"] is None else f" This config packs by {found['used']}."
    return _note(found["sampled"]) + _note(note) + _table("packing-table", head, lines, used=used)


def _attention(found: Sequence[Report]) -> str:
    note = "The highest cost of a device over the mean of the devices, in the sampled steps. A row costs the sum of "
    note += "the squares of its segments' lengths. For a dense kernel, which skips nothing, every row costs the same."
    lines = [(each["rows_a_device"], f"{each['mean']:.3f}", f"{each['worst']:.3f}", each["step"]) for each in found]
    return _note(note) + _table("attention-table", ("rows a device", "mean", "worst", "in step"), lines)


def _left_out(report: Report) -> str:
    lines = []
    for each in report["left_out"]:
        counts = ("-" if each[key] is None else f"{each[key]:,}" for key in ("documents", "tokens"))
        lines.append((each["what"], *counts, f"{(each['tokens'] or 0) / report['corpus']['tokens']:.4%}"))
    if not lines:
        return _note("Nothing is left out: every token of the corpus is in a row.")
    return _table("left-out-table", ("what", "documents", "tokens", "of the corpus"), lines)


def _sources(report: Report) -> str:
    head = ("source", "documents", "segments", "tokens", "share", "take loss", "of its tokens")
    lines = []
    for name, documents, segments, tokens, share, trainable in zip(*report["sources"]["columns"].values(), strict=True):
        shares = (f"{share:.4%}", trainable, f"{trainable / max(1, tokens):.4%}")
        lines.append((name, documents, segments, tokens, *shares))
    sampled = report["sampled"]
    if sampled["steps"] == sampled["of"] and sampled["ends"]:
        note = f"All {sampled['of']:,} steps."
    else:
        endless = "" if sampled["ends"] else ", which read as many rows as the layout has (the run never ends)"
        note = f"{sampled['steps']:,} steps at equal distances, of {sampled['of']:,} steps{endless}."
    return _note(note) + _table("sources-table", head, lines)


def _mixture(found: Report) -> str:
    tokens = top_sources(found["tokens"])
    lines = []
    for step, *counts in zip(found["steps"], *tokens.values(), strict=True):
        total = max(1, sum(counts))
        lines.append((step, *(f"{count / total:.3%}" for count in counts)))
    names = [visible_line(name) for name in tokens]
    return _note("Shares of the tokens of each sampled step.") + _table("mixture-table", ("step", *names), lines)


def _filter(found: Report) -> str:
    owner = "of this config" if found["used"] else "with defaults, which this config does not have"
    names = {"rows": "rows checked", "rejected": "rejected", "rejected_for_padding": "of these for their padding alone"}
    lines = [(name, found[key]) for key, name in names.items()]
    body = _note(f"{found['filter']}, {owner}; in the sampled steps.") + _table("filter-table", ("", "rows"), lines)
    if not found["examples"]:
        return body + _note("None of these rows is rejected for its text.")
    head = ("step", "row of the layout", "from token", "period", "times", "the repeated text")
    keys = ("step", "instance", "at", "period", "times", "text")
    examples = [tuple(each[key] for key in keys) for each in found["examples"]]
    return body + _table("filter-examples", head, examples, words=(0, 5))


def _throughput(found: Report | None) -> str:
    if found is None:
        return _note("Not measured.")
    digits = {"mtok_per_s": 1, "ms_per_batch": 3, "of_limit": 3}
    lines = [(each["name"], *(round(each[key], count) for key, count in digits.items())) for each in found["rows"]]
    size, seconds = f"{found['tokens']:,}", f"{found['seconds']:g}"
    note = _note(f"Batches of {size} tokens, about {seconds} s per line, on the machine that made this page.")
    return note + _table("throughput-table", ("", "Mtok/s", "ms a batch", "of the limit"), lines)


def _table(
    name: str, head: Sequence[str], lines: Iterable[Sequence[object]], *, words: Sequence[int] = (0,), used: str = ""
) -> str:
    """Return an HTML table. Its columns `words` are text, the others numbers. The line whose first cell is `used` is
    highlighted. In a line shorter than `head`, the last cell is text that spans the rest."""

    def row(tag: str, line: Sequence[object]) -> str:
        cells = []
        for at, value in enumerate(line):
            spanned = len(head) - at if at == len(line) - 1 else 1
            shown = f"{value:,}" if isinstance(value, int | float) else _text(str(value))
            kind = " class=text" if at in words or spanned > 1 else ""
            width = f' colspan="{spanned}"' if spanned > 1 else ""
            cells.append(f"<{tag}{kind}{width}>{shown}</{tag}>")
        return f"<tr{' class=used' if used and line[0] == used else ''}>{''.join(cells)}</tr>"

    opened = f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table id="{name}">'
    titled = f"<thead>{row('th', head)}</thead>" if any(head) else ""
    return f"{opened}{titled}<tbody>{''.join(row('td', line) for line in lines)}</tbody></table></div>\n"


def _note(text: str | None) -> str:
    return "" if not text else f'<p class="quiet">{_text(text)}</p>\n'


def _text(text: str) -> str:
    return html.escape(visible_line(text))
