"""What `grain_sft.bench.config_bench` measured, as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from grain_sft.bench.advice import Setting

_NAME, _WIDTH = 44, 102


def lines(figures: Mapping[str, Any], name: str) -> Iterator[str]:
    """Of the config that is called `name`."""
    yield from _head(figures, name)
    yield ""
    yield f"{'stages, read before':{_NAME}}{'ms/batch':>10}{'Mtok/s':>10}{'of limit':>10}{'of a step':>14}"
    for row in figures["stages"]:
        yield f"{row['name']:{_NAME}}{_rate(row)}{row['of_step']:14.2f}"
    yield ""
    steps = [wait["step_ms"] for wait in figures["recommended"]["waits"]]
    beside = "".join(f"{f'wait/{step:g} ms':>14}" for step in steps)
    yield f"{'delivered, step after step':{_NAME}}{'ms/batch':>10}{'Mtok/s':>10}{'of limit':>10}{beside}"
    for row in figures["delivered"]:
        yield _setting(row)
    for setting in figures["left_out"]:
        yield f"{setting:{_NAME}} left out: the time was up"
    yield ""
    recommended = figures["recommended"]
    yield "recommended"
    yield _setting(recommended)
    kept = f"The batches that are kept ready take {_size(recommended['buffer_bytes'])} of memory."
    yield from textwrap.wrap(f"{recommended['reason']}. {kept}", _WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield from _accelerators(figures)


def _head(figures: Mapping[str, Any], name: str) -> Iterator[str]:
    layout, batch, host, first = (figures[key] for key in ("layout", "batch", "host", "first_reading"))
    held = "" if batch["padding_share"] is None else f", padding {batch['padding_share']:.3%}"
    sizes = f"{batch['rows']:,} rows, {batch['tokens']:,.0f} tokens{held}"
    read = f"{first['ms_per_batch']:.3f} ms a batch, {first['mtok_per_s']:.1f} Mtok/s; the slowest {first['slowest_ms']:.3f} ms"
    yield f"config         {name}: {layout['rows']:,} rows of {layout['sequence_length']:,} tokens, {layout['kind']}"
    yield f"batch          of host {host['index']} of {host['count']}: {sizes}"
    yield f"               {batch['arrays']} arrays, {_size(batch['bytes'])}"
    yield f"machine        {figures['cores']} cores"
    yield f"first reading  {first['first_ms']:.1f} ms for the first batch, which opens files; then {read}"
    yield f"taken          {figures['seconds']:.0f} s; {figures['rows_read']:,.2f} times as many rows were read as there are"


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['ms_per_batch']:10.3f}{row['mtok_per_s']:10.1f}{row['of_limit']:10.2f}"


def _setting(row: Mapping[str, Any]) -> str:
    setting = Setting(row["threads"], row["prefetch"], row["worker_count"])
    waits = "".join(f"{wait['median_ms']:14.3f}" for wait in row["waits"])
    return f"{setting!s:{_NAME}}{_rate(row)}{waits}"


def _accelerators(figures: Mapping[str, Any]) -> Iterator[str]:
    count = figures["host"]["count"]
    every = "" if count == 1 else f"{f'on {count} such hosts':>20}"
    yield f"{'it feeds accelerators of':>26}{'on this host':>16}{every}"
    for row in figures["accelerators"]:
        every = "" if count == 1 else f"{row['all_hosts']:20,}"
        yield f"{row['tokens_per_second']:17,.0f} tokens/s{row['this_host']:16,}{every}"


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
