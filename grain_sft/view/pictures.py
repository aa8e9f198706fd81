"""Pictures of a report, drawn by matplotlib as PNG files, and as SVG elements for the report's page."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grain_sft.errors import import_extra
from grain_sft.layout import algorithm_title

Report = Mapping[str, Any]

Pictures = Mapping[str, tuple[Callable[[Report], Any], Callable[[Any, Report], None]]]
"""By name of the picture: function that returns whether a report has the picture's numbers, and function that draws them."""

COLOURS = ("#0b7a75", "#b8690f", "#8e3ba8", "#3f7d23", "#2456c5", "#b3263d", "#6b7280", "#8a6d00")
"""Colours of the lines, bars or areas of a picture, in order."""
_INK, _QUIET, _PAPER = "#1b1f24", "#5a626c", "#ffffff"
# variables of the page's style sheet that replace the colours in an SVG element
_VARIABLES = {_INK: "ink", _QUIET: "quiet", _PAPER: "paper"}
_VARIABLES |= {colour: f"c{index}" for index, colour in enumerate(COLOURS)}
_MAX_SOURCES = 8  # sources that a picture shows
_MAX_CHARACTERS = 28  # characters of a label
_SIZE = (8.0, 3.2)  # inches

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "grain_sft",  # ids in an SVG file do not change from run to run
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.parse_math": False,  # a $ in a label does not begin a formula
    "axes.edgecolor": _QUIET,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


class Picture(NamedTuple):
    """A picture as a PNG file on white, and as an SVG element in the colours of its page, which may be dark."""

    png: bytes
    svg: str


def draw_pictures(report: Report, pictures: Pictures | None = None) -> dict[str, Picture]:
    """Return pictures of a report, by name. A picture is left out if the report lacks its numbers.

    `pictures` defaults to the pictures of this module.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    drawn = {}
    with matplotlib.rc_context(_STYLE):
        for name, (has_numbers, draw) in (_PICTURES if pictures is None else pictures).items():
            if has_numbers(report):
                figure = Figure(figsize=_SIZE, layout="constrained", facecolor=_PAPER)
                draw(figure, report)
                png, svg = io.BytesIO(), io.StringIO()
                figure.savefig(png, format="png", dpi=150)
                figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
                drawn[name] = Picture(png.getvalue(), _element(name, svg.getvalue()))
    return drawn


def _element(name: str, svg: str) -> str:
    """Return a picture as an HTML element."""
    # without the XML declaration, which comes before the element
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # the page decides the size
    element = re.sub(r' width="[^"]*pt"| height="[^"]*pt"', "", element, count=2)
    # only tags change: texts, such as the names of sources, may look like colours or ids
    element = re.sub("<[^>]+>", lambda tag: _html_tag(name, tag[0]), element)
    return element.replace("<svg", f'<svg role="img" aria-label="{name}: the numbers are below"', 1).strip()


def _html_tag(name: str, tag: str) -> str:
    """Return a tag of an SVG file for a page: its ids begin with the picture's `name`, and its colours are variables."""
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{name}-", tag)
    tag = re.sub(r' xmlns:?\w*="[^"]*"', "", tag).replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag


def require_matplotlib() -> None:
    """Raise MissingExtraError unless matplotlib is installed."""
    import_extra("matplotlib.figure", "drawing pictures", "matplotlib", "report")


def top_sources(tokens: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return the tokens of each source in each step, the largest source first.

    If there are more than 8 sources, all but the 7 largest are summed as one source, such as "5 others".
    """
    by_size = sorted(tokens, key=lambda name: -sum(tokens[name]))
    largest, others = by_size[: _MAX_SOURCES - 1], by_size[_MAX_SOURCES - 1 :]
    if len(others) <= 1:
        return {name: tokens[name] for name in by_size}
    sums = np.sum([tokens[name] for name in others], axis=0).tolist()
    return {name: tokens[name] for name in largest} | {f"{len(others)} others": sums}


def _short(name: str) -> str:
    """Return a label: the name, or "…" and the end of a long name."""
    return name if len(name) <= _MAX_CHARACTERS else f"…{name[1 - _MAX_CHARACTERS :]}"


def _lengths(figure: Any, report: Report) -> None:
    """Draw how many documents have each length, and how many tokens they have together."""
    bins = report["lengths"]["bins"]
    names = [f"{length_bin['first']:,}" for length_bin in bins]
    series = (("documents", "documents", COLOURS[0]), ("tokens", "tokens in them", COLOURS[1]))
    for axes, (key, label, colour) in zip(figure.subplots(1, 2), series, strict=True):
        axes.bar(names, [length_bin[key] for length_bin in bins], color=colour, width=0.9)
        axes.set(xlabel="length from, in tokens", ylabel=label)
        axes.tick_params("x", rotation=60)
        _show_millions(axes.yaxis)


def _packing(figure: Any, report: Report) -> None:
    """Draw the padding and the mean number of segments of each packing algorithm."""
    used = report["packing"]["used"]
    packings = [packing for packing in report["packing"]["algorithms"] if "error" not in packing]
    # ◂ marks the config's own algorithm
    names = [algorithm_title(packing) + (" ◂" if packing["algorithm"] == used else "") for packing in packings]
    left, right = figure.subplots(1, 2, sharey=True)
    full = [100 * (1 - packing["padding_share"]) for packing in packings]
    draw_bars(left, names, full, [f"{share:.3f}%" for share in full], COLOURS[0])
    left.set(xlabel="tokens of rows that are not padding, %", xlim=(0, 140), xticks=[0, 25, 50, 75, 100])
    segments = [packing["segments_a_row"]["mean"] for packing in packings]
    draw_bars(right, names, segments, [f"{mean:,.1f}" for mean in segments], COLOURS[1])
    right.set(xlabel="mean segments per row")


def _left_out(figure: Any, report: Report) -> None:
    """Draw the share of the tokens that are left out for each reason, such as truncation."""
    entries = [entry for entry in report["left_out"] if entry["tokens"]]
    names = [entry["what"].split(", ")[0] for entry in entries]
    shares = [100 * entry["tokens"] / report["corpus"]["tokens"] for entry in entries]
    axes = figure.subplots()
    draw_bars(axes, names, shares, [f"{share:.3g}%" for share in shares], COLOURS[5])
    axes.set(xlabel="tokens, in % of the corpus")


def _sources(figure: Any, report: Report) -> None:
    """Draw the tokens of each source, and within them those that take loss."""
    columns = report["sources"]["columns"]
    by_size = sorted(zip(columns["tokens"], columns["trainable"], columns["source"], strict=True), reverse=True)
    tokens, trainable, names = zip(*by_size[:_MAX_SOURCES], strict=True)
    labels = [f"{with_loss / max(1, count):.1%} take loss" for with_loss, count in zip(trainable, tokens, strict=True)]
    axes = figure.subplots()
    draw_bars(axes, list(map(_short, names)), tokens, labels, COLOURS[6])
    axes.barh(range(len(names)), trainable, color=COLOURS[0], height=0.4)
    omitted = f"; the largest {len(names)} of {len(by_size)} sources" if len(by_size) > len(names) else ""
    axes.set(xlabel=f"tokens of the sampled steps (narrow bars: tokens with loss){omitted}")
    _show_millions(axes.xaxis)


def _mixture(figure: Any, report: Report) -> None:
    """Draw the share of each source in the tokens of each sampled step."""
    sources = top_sources(report["sources"]["tokens"])
    tokens = np.array(list(sources.values()))  # [sources, steps]
    shares = 100 * tokens / np.maximum(1, tokens.sum(axis=0))
    axes = figure.subplots()
    areas = axes.stackplot(report["sources"]["steps"], shares, colors=COLOURS)
    axes.set(xlabel="step", ylabel="share of the step's tokens, %", ylim=(0, 100))
    axes.margins(x=0)
    _show_millions(axes.xaxis)
    # matplotlib leaves out areas whose own label begins with "_"
    figure.legend(areas, list(map(_short, sources)), loc="outside right upper", frameon=False)


def _throughput(figure: Any, report: Report) -> None:
    """Draw the speed of each measured loader."""
    rows = report["throughput"]["rows"]
    labels = [f"{row['mtok_per_s']:,.0f} ({row['of_limit']:.2f} of the limit)" for row in rows]
    axes = figure.subplots()
    draw_bars(axes, [row["name"] for row in rows], [row["mtok_per_s"] for row in rows], labels, COLOURS[4])
    axes.set(xlabel="million tokens a second")


def draw_bars(axes: Any, names: list[str], values: Sequence[float], labels: list[str], colour: str) -> None:
    """Draw horizontal bars from top to bottom, each followed by its label."""
    bars = axes.barh(range(len(names)), values, color=colour, height=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.yaxis.set_inverted(True)
    axes.bar_label(bars, labels, padding=4)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)


def _show_millions(axis: Any) -> None:
    """Write large numbers on an axis with a unit: 1,500,000 as 1.5 M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter())


_PICTURES: Pictures = {
    "lengths": (lambda report: "bins" in report["lengths"], _lengths),
    "packing": (lambda report: any("rows" in each for each in report["packing"].get("algorithms", ())), _packing),
    "left_out": (lambda report: any(each["tokens"] for each in report["left_out"]), _left_out),
    "sources": (lambda report: report["sources"]["columns"]["source"], _sources),
    "mixture": (lambda report: len(report["sources"]["tokens"]) > 1 and len(report["sources"]["steps"]) > 1, _mixture),
    "throughput": (lambda report: report["throughput"], _throughput),
}
