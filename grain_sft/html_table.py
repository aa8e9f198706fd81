"""Short HTML tables that show objects in notebooks."""

import html
from collections.abc import Iterable, Mapping

from grain_sft.errors import shortened

_MAX_CHARACTERS = 120
_LEFT = ' style="text-align: left"'


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return a table of names and values. A fact whose value is None is left out."""
    cells = ((_cell(name), _cell(value)) for name, value in facts.items() if value is not None)
    return _table(title, (f"<tr><th{_LEFT}>{name}</th><td{_LEFT}>{value}</td></tr>" for name, value in cells))


def html_columns(title: str, columns: Mapping[str, Iterable[object]]) -> str:
    """Return a table with a column for each name."""
    head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
    rows = ("".join(f"<td>{_cell(value)}</td>" for value in row) for row in zip(*columns.values(), strict=True))
    return _table(title, (f"<tr>{cells}</tr>" for cells in (head, *rows)))


def _table(title: str, lines: Iterable[str]) -> str:
    return f"<div><strong>{html.escape(title)}</strong><table>{''.join(lines)}</table></div>"


def _cell(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)  # not isinstance: a bool stays "True"
    return html.escape(shortened(text, _MAX_CHARACTERS))
