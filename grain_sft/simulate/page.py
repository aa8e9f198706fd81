"""HTML page of a simulated run: answers, figures and curves."""

import html
from collections.abc import Mapping
from functools import partial
from typing import Any

from grain_sft.html_table import html_columns, html_facts
from grain_sft.simulate.lines import FIGURES, facts_of, spread_text
from grain_sft.view import COLOURS, Pictures, draw_bars, draw_pictures, make_page, part

Figures = Mapping[str, Any]
"""Result of `simulate`."""

_QUESTION = "Can this bucket, this cache and these hosts feed this run?"
_TITLES = {
    "requests": "Requests of all hosts, if no step waits",
    "received": "Bytes of the bucket to all hosts, if no step waits",
    "batch": "Time that the slowest host takes to read its batch, if the bucket answers at once",
    "waited": "Waits of the trainer",
    "errors": "Largest error of the model's predictions for real processes",
}


def simulation_page(figures: Figures, name: str) -> str:
    """Return a page of HTML that shows the figures of `simulate`. The page's element `data` has all figures as JSON.

    Args:
      figures: Result of `simulate`.
      name: Name of the run, for the title.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    pictures = draw_pictures(figures, _PICTURES)
    enough = all(answer["enough"] for answer in figures["answers"])
    answers = "\n".join(_answer(answer) for answer in figures["answers"])
    assumed = {f"--{option.replace('_', '-')}": f"{value:,.10g}" for option, value in figures["conditions"].items()}
    drawn = {key: (_TITLES[key], f"<figure>{picture.svg}</figure>") for key, picture in pictures.items()}
    sections = {
        "answers": (f"{_QUESTION} {'Yes.' if enough else 'No.'}", f"<ul>{answers}</ul>"),
        "figures": ("Figures", html_facts("", dict(facts_of(figures)))),
        **drawn,
        "hosts": ("Hosts", _hosts(figures)),
        "conditions": ("Assumed", html_facts("", assumed)),
    }
    parts = [f'<section id="{key}"><h2>{title}</h2>\n{body}</section>' for key, (title, body) in sections.items()]
    body = "\n".join([f"<h1>{html.escape(name)} on {figures['hosts']:,} hosts</h1>", "<main>", *parts, "</main>"])
    return make_page(f"Simulation: {name}", body, styles=part("report.css"), data=figures)


def _answer(answer: Mapping[str, Any]) -> str:
    verdict = "enough" if answer["enough"] else "<strong>not enough</strong>"
    return f"<li>{html.escape(answer['asked'])}: {verdict}. {html.escape(answer['answer'])}</li>"


def _hosts(figures: Figures) -> str:
    """Return a table of the spread of each figure over the hosts."""
    names = FIGURES | {"seconds": "seconds to read the batch", "checks": "requests that check files"}
    spreads = [(key, "all steps", spread) for key, spread in figures["per_host"].items()]
    spreads += [(key, "first step", spread) for key, spread in figures["first_step"].items()]
    spreads.append(("checks", "all steps", figures["checks"]))
    columns = {"": [f"{names[key]}, {steps}" for key, steps, _ in spreads]}
    for statistic in ("mean", "least", "most"):
        columns[statistic] = [spread_text(key, spread[statistic]) for key, _, spread in spreads]
    return html_columns("", columns)


def _rates(name: str, unit: float, label: str, option: str, figure: Any, figures: Figures) -> None:
    """Draw the curve `name` as a rate per second, in multiples of `unit`, and the limit of `--option` as a line."""
    axes, curves, conditions = figure.subplots(), figures["curves"], figures["conditions"]
    seconds = conditions["step_ms"] / 1e3
    axes.plot(curves["step"], [value / seconds / unit for value in curves[name]], color=COLOURS[0])
    axes.axhline(conditions[option], color=COLOURS[5], linestyle="--", label=f"--{option.replace('_', '-')}")
    figure.legend(loc="outside right upper", frameon=False)
    axes.set(xlabel="step", ylabel=label)
    if any(curves[name]):
        axes.set_yscale("log", subs=[2, 5])
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(lambda value, _: f"{value:,.10g}")


def _curve(name: str, label: str, figure: Any, figures: Figures) -> None:
    """Draw the curve `name`. A `label` such as "s in {:,.0f} steps" gets the number of steps of each point."""
    axes, curves = figure.subplots(), figures["curves"]
    axes.plot(curves["step"], curves[name], color=COLOURS[4])
    axes.set(xlabel="step", ylabel=label.format(len(range(*figures["steps"])) / len(curves["step"])))
    axes.set_ylim(bottom=0)


def _errors(figure: Any, figures: Figures) -> None:
    """Draw the largest error of each predicted figure."""
    axes, errors = figure.subplots(), figures["errors"]
    labels = [f"{error:.1%}" for error in errors.values()]
    draw_bars(axes, [FIGURES[name] for name in errors], [100 * error for error in errors.values()], labels, COLOURS[1])
    axes.set(xlabel="% of the measured figure")


_PICTURES: Pictures = {
    "requests": (lambda figures: True, partial(_rates, "requests", 1, "requests/s", "bucket_requests")),
    "received": (lambda figures: True, partial(_rates, "received", 1e6, "MB/s", "bucket_mb")),
    "batch": (lambda figures: True, partial(_curve, "seconds", "s")),
    "waited": (lambda figures: True, partial(_curve, "waited", "s in {:,.0f} steps")),
    "errors": (lambda figures: figures["errors"], _errors),
}
