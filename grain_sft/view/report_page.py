"""The page of a report: pictures and their numbers, section by section."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grain_sft.layout import algorithm_title
from grain_sft.view.page import make_page, part
from grain_sft.view.pictures import Pictures, top_sources
from grain_sft.view.visible import visible_line

Report = Mapping[str, Any]


def report_page(report: Report, pictures: Pictures) -> str:
    """Return the report as one page of HTML, with all figures as JSON in the element `data`."""
    sections = {
        "run": ("The run", _run(report)),
        "lengths": ("Lengths of documents", _lengths(report["lengths"], report["run"]["sequence_length"])),
        "packing": ("Packing, by algorithm", _packing(report["packing"])),
        "left_out": ("Truncated, dropped, padded", _left_out(report)),
        "sources": ("Sources, and what of them takes loss", _sources(report)),
        "mixture": ("The mixture over steps", _mixture(report["sources"])),
        "filter": ("Rows that the filter rejects", _filter(report["filter"])),
        "throughput": ("Speed, and the limit", _throughput(report)),
        "receipt": ("Receipt", _receipt(report)),
    }
    parts = [f"<h1>{_text(report['name'])}</h1>", "<nav aria-label='Sections'><ul>"]
    parts += [f'<li><a href="#{name}">{title}</a></li>' for name, (title, _) in sections.items()]
    parts += ["</ul></nav>", "<main>"]
    for name, (title, body) in sections.items():
        parts.append(f'<section id="{name}"><h2>{title}</h2>')
        if name in pictures:
            parts.append(f"<figure>{pictures.svg(name)}</figure>")
        parts += [body, "</section>"]
    parts.append("</main>")
    return make_page(
        f"Report: {visible_line(report['name'])}", "\n".join(parts), styles=part("report.css"), data=report
    )


def _run(report: Report) -> str:
    run, corpus = report["run"], report["corpus"]
    lines = [
        ("corpus", f"{corpus['tokens']:,} tokens in {corpus['shards']:,} files"),
        ("rows", f"{run['rows']:,} of {run['sequence_length']:,} tokens"),
        ("batch", f"{run['global_batch_size']:,} rows, {run['global_batch_size'] * run['sequence_length']:,} tokens"),
        ("steps", "never end" if run["steps"] is None else f"{run['steps']:,}"),
        *([] if run["steps_per_epoch"] is None else [("steps an epoch", f"{run['steps_per_epoch']:,}")]),
        *([] if run["epochs"] is None else [("epochs", f"{run['epochs']:,}")]),
        ("receipt", report["receipt"]),
    ]
    return _table("run-table", ("", ""), lines, words=2)


def _lengths(found: Report, length: int) -> str:
    if "error" in found:
        return _note(found["error"])
    facts = [("documents", found["documents"]), ("tokens in them", found["tokens"]), ("mean", round(found["mean"], 1))]
    facts += [(name, round(value, 1)) for name, value in found["percentiles"].items()]
    facts += [("longest", found["longest"]), (f"longer than a row ({length:,})", found["longer_than_a_row"])]
    bins = [(each["first"], each["last"], each["documents"], each["tokens"]) for each in found["bins"]]
    head = ("from", "to", "documents", "tokens")
    return (
        _note(found["sampled"])
        + _table("length-facts", ("", "tokens or count"), facts)
        + _table("length-bins", head, bins)
    )


def _packing(found: Report) -> str:
    if "error" in found:
        return _note(found["error"])
    head = (
        "algorithm",
        "rows",
        "padding",
        "no padding",
        "truncated",
        "dropped",
        "split",
        "segments",
        "median",
        "max",
        "s",
    )
    lines: list[Sequence[object]] = []
    for each in found["algorithms"]:
        if "error" in each:
            lines.append((each["algorithm"], each["error"]))
            continue
        segments = each["segments_a_row"]
        shares = (f"{each['padding_share']:.4%}", f"{1 - each['padding_share']:.4%}")
        cut = (each["truncated_tokens"], each["dropped_tokens"], each["split_documents"])
        counts = (round(segments["mean"], 2), segments["median"], segments["max"])
        lines.append((algorithm_title(each), each["rows"], *shares, *cut, *counts, round(each["seconds"], 2)))
    used = "" if found["used"] is None else f" This config packs by {found['used']}."
    note = f"Truncated and dropped in tokens, split in documents, segments a row. One epoch of each, packed anew here.{used}"
    return _note(found["sampled"]) + _note(note) + _table("packing-table", head, lines, used=found["used"])


def _left_out(report: Report) -> str:
    total = report["corpus"]["tokens"]
    lines = [
        (each["what"], _or_dash(each["documents"]), _or_dash(each["tokens"]), f"{(each['tokens'] or 0) / total:.4%}")
        for each in report["left_out"]
    ]
    if not lines:
        return _note("Nothing is: every token of the corpus is in a row.")
    return _table("left-out-table", ("what", "documents", "tokens", "of the corpus"), lines)


def _sources(report: Report) -> str:
    columns = report["sources"]["columns"]
    head = ("source", "documents", "segments", "tokens", "share", "take loss", "of its tokens")
    lines = [
        (name, documents, segments, tokens, f"{share:.4%}", trainable, f"{trainable / max(1, tokens):.4%}")
        for name, documents, segments, tokens, share, trainable in zip(*columns.values(), strict=True)
    ]
    return _note(_sampled(report["sampled"])) + _table("sources-table", head, lines)


def _mixture(found: Report) -> str:
    tokens = top_sources(found["tokens"])
    lines = []
    for step, *counts in zip(found["steps"], *tokens.values(), strict=True):
        total = max(1, sum(counts))
        lines.append((step, *(f"{count / total:.3%}" for count in counts)))
    names = [visible_line(name) for name in tokens]
    return _note("Of each sampled step's tokens.") + _table("mixture-table", ("step", *names), lines)


def _filter(found: Report) -> str:
    owner = "of this config" if found["used"] else "with defaults, which this config does not have"
    lines = [
        ("rows checked", found["rows"]),
        ("rejected", found["rejected"]),
        ("of these for their padding alone", found["rejected_for_padding"]),
    ]
    body = _note(f"{found['filter']}, {owner}; in the sampled steps.") + _table("filter-table", ("", "rows"), lines)
    if not found["examples"]:
        return body + _note("No row of these is rejected for its text.")
    head = ("step", "row of the layout", "from token", "period", "times", "the repeated text")
    keys = ("step", "instance", "at", "period", "times", "text")
    examples = [tuple(each[key] for key in keys) for each in found["examples"]]
    return body + _table("filter-examples", head, examples, code=True)


def _throughput(report: Report) -> str:
    found = report["throughput"]
    if found is None:
        return _note("Not measured.")
    lines = [
        (each["name"], round(each["mtok_per_s"], 1), round(each["ms_per_batch"], 3), round(each["of_limit"], 3))
        for each in found["rows"]
    ]
    note = (
        f"Batches of {found['tokens']:,} tokens, some {found['seconds']:g} s each, on the machine that made this page."
    )
    return _note(note) + _table("throughput-table", ("", "Mtok/s", "ms a batch", "of the limit"), lines)


def _receipt(report: Report) -> str:
    lines = [("code", report["receipt"]), *report["parts"].items()]
    return _note("Two runs with this receipt have the same batches.") + _table(
        "receipt-table", ("", ""), lines, words=2
    )


def _sampled(sampled: Report) -> str:
    if sampled["steps"] == sampled["of"] and sampled["ends"]:
        return f"All {sampled['of']:,} steps."
    of = f"{sampled['of']:,} steps" + (
        "" if sampled["ends"] else ", which see as many rows as there are (the run never ends)"
    )
    return f"Of {sampled['steps']:,} steps at equal distances, out of {of}."


def _table(
    name: str,
    head: Sequence[str],
    lines: Iterable[Sequence[object]],
    *,
    words: int = 1,
    used: str | None = None,
    code: bool = False,
) -> str:
    """Return a table. Its first `words` columns are text; the row with `used` in its first cell is marked; with `code` the
    last column is text of tokens."""
    count = len(head)

    def cell(tag: str, at: int, value: object) -> str:
        is_text = at < words or (code and at == count - 1)
        shown = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else _text(str(value))
        inside = f"<code>{shown}</code>" if code and tag == "td" and at == count - 1 else shown
        return f"<{tag}{' class=text' if is_text else ''}>{inside}</{tag}>"

    titles = "".join(cell("th", at, value) for at, value in enumerate(head))
    rows = []
    for line in lines:
        cells = "".join(cell("td", at, value) for at, value in enumerate(line[:-1]))
        last = cell("td", len(line) - 1, line[-1])
        cells += (
            last if len(line) == count else last.replace("<td", f'<td class=text colspan="{count - len(line) + 1}"', 1)
        )
        rows.append(f"<tr{' class=used' if used is not None and line[0] == used else ''}>{cells}</tr>")
    titled = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    body = "".join(rows)
    opened = f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table id="{name}">'
    return f"{opened}{titled}<tbody>{body}</tbody></table></div>\n"


def _note(text: str | None) -> str:
    return "" if not text else f'<p class="quiet">{_text(text)}</p>\n'


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _text(text: str) -> str:
    return html.escape(visible_line(text))
