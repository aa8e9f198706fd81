"""Lines that `grain-sft simulate` prints: figures, and answers whether bucket and hosts are fast enough."""

from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 24  # characters of the name of a line

FIGURES = {
    "requests": "requests",
    "received": "bytes of the bucket",
    "local": "bytes of local files",
    "start_up_s": "start-up",
    "peak_mb": "memory",
}
"""Printed name of each figure that `measure_processes` predicts and measures."""


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure of `simulate`, then an empty line, then a line for each answer."""
    for name, text in facts_of(figures):
        yield f"{name:{_WIDTH}}{text}"
    yield ""
    for answer in figures["answers"]:
        verdict = "enough" if answer["enough"] else "NOT ENOUGH"
        yield f"{answer['asked']:{_WIDTH}}{verdict}: {answer['answer']}"


def facts_of(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line of figures, such as ("shard cache", "93.1% of blocks are found, …")."""
    run, first, steady, waits = (figures[key] for key in ("run", "first_step", "steady", "waits"))
    start, stop = figures["steps"]
    hosts, rows = _count(figures["hosts"], "host"), _count(run["rows_per_host"], "row")
    yield "run", f"steps {start:,} to {stop - 1:,} on {hosts}, {rows} of each host in a step"
    yield "rows", _coverage(figures["coverage"], run["rows"])
    yield "first step of a host", _host(first)
    yield "all steps of a host", _host(figures["per_host"])
    files = figures["files"]
    remote = f"{files['files']:,}; a host reads {files['checked']['mean']:,.0f} of them from the bucket"
    yield "files", f"{remote}; a host opens at most {files['most_descriptors']:,} files and connections"
    sums = f"{steady['requests']:,.0f} requests, {_size_text(steady['received'])}"
    yield "a step of all hosts", f"{sums}; the slowest host takes {steady['slowest_batch_s']:.3f} s"
    peak = f"{steady['requests_peak_per_second']:,.0f} requests/s, {_size_text(steady['received_peak_per_second'])}/s"
    yield "peak step", f"{peak}, of all hosts together, if no step waits"
    first_batches = figures["first_batches"]
    asked = f"{first_batches['requests']:,.0f} requests of all hosts until each has {first_batches['batches']} batches"
    yield "start of the run", f"{asked}: {first_batches['bucket_s']:.1f} s at the bucket's speed"
    if (cache := figures["cache"]) is not None:
        hits, misses = cache["hits"]["mean"], cache["misses"]["mean"]
        hit_rate = hits / max(1.0, hits + misses)
        size, hosts = _size_text(cache["bytes"]["mean"]), _count(cache["hosts"], "host")
        yield "shard cache", f"{hit_rate:.1%} of blocks are found, {size} on a host ({hosts} simulated)"
    if (start_up := figures["start"]) is not None:
        opening = "without the requests that open the corpus, because its files are local"
        if not figures["as_bucket"]:  # "as_bucket": local files count as files of a bucket
            opening = f"{start_up['opening_requests']:,} requests of a host to open the corpus"
        yield "start-up", f"{start_up['seconds']:.1f} s until the first batch, {opening}"
        yield "memory", f"at most {start_up['memory_mb']:,.0f} MB in a process"
    later = f"{waits['later_s']:,.2f} s in all later steps; a step takes {steady['seconds_a_step']:,.3f} s"
    yield "waits", f"{waits['first_s']:.2f} s for the first step, {later}"
    if (restart := figures["restart"]) is not None:
        need = f"{restart['requests']['mean']:,.0f} requests of a host, first batch in {restart['first_batch_s']:.2f} s"
        recover = "" if restart["recover_s"] is None else f", {restart['recover_s']:.1f} s with start-up"
        yield "restart", f"at step {restart['step']:,} on {_count(restart['hosts'], 'host')}: {need}{recover}"
    if errors := figures["errors"]:
        shown = ", ".join(f"{FIGURES[name]} {error:.1%}" for name, error in errors.items())
        yield "largest error", f"{shown}, in {len(figures['predicted'])} processes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _coverage(coverage: Mapping[str, Any], rows: int) -> str:
    """Return the text of how many of the layout's `rows` rows are read, and how often."""
    read = f"{coverage['rows_read']:,} reads for {coverage['slots']:,} slots of batches"
    if coverage["distinct"] is None:  # the reads of each row were not counted
        return read
    return f"{read}; {coverage['distinct']:,} of {rows:,} rows are read, each at most {coverage['most_often']:,} times"


def spread_text(name: str, value: float) -> str:
    """Return the value of a figure as text: "1.50 MB" for "received" and "local", else a number."""
    return _size_text(value) if name in ("received", "local") else f"{value:,.3f}".removesuffix(".000")


def _host(figures: Mapping[str, Any]) -> str:
    """Return the text of what one host reads: means over the hosts, and the range of requests."""
    requests, received, local = (figures[name] for name in ("requests", "received", "local"))
    local_text = f", and {_size_text(local['mean'])} of local files" if local["mean"] else ""
    spread = f"{requests['mean']:,.1f} requests ({requests['least']:,.0f} to {requests['most']:,.0f})"
    return f"{spread}, {_size_text(received['mean'])}{local_text}"


def _size_text(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def answers(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an answer, with the keys `asked`, `enough` and `answer`, for each resource and for the waits of the trainer."""
    conditions, steady, waits = figures["conditions"], figures["steady"], figures["waits"]
    step_s = conditions["step_ms"] / 1e3
    # mean bytes per step of the host that receives the most
    received = figures["per_host"]["received"]["most"] / (figures["steps"][1] - figures["steps"][0])
    longest = f"the longest wait is {waits['longest_s']:.2f} s"
    wait = f"Steps of {conditions['step_ms']:g} ms wait {waits['share']:.2%} of the time; {longest}."
    return [
        _answer("bucket, requests", steady["requests"] / step_s, "requests/s", "bucket_requests", conditions),
        _answer("bucket, bytes", steady["received"] / step_s / 1e6, "MB/s", "bucket_mb", conditions),
        _answer("network of a host", received / step_s / 1e6, "MB/s", "host_mb", conditions),
        {"asked": "waits", "enough": waits["share"] <= 0.01, "answer": wait},  # waits of 1 % of the time are accepted
    ]


def _answer(asked: str, need: float, unit: str, limit_name: str, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to whether `need` is within the limit, the condition `limit_name`."""
    limit = conditions[limit_name]
    answer = f"{need:.2f} of {limit:,.12g} {unit}."
    if need >= 10:
        answer = f"{need:,.0f} of {limit:,.12g} {unit} ({need / limit:.1%})."
    if need > limit:
        answer += f" Give a cache, larger reads, a longer step, or the real limit with --{limit_name.replace('_', '-')}."
    return {"asked": asked, "enough": need <= limit, "answer": answer}
