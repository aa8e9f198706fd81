"""Rows of a step as text for a terminal or a notebook."""

import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import MissingExtraError, PipelineError
from grain_sft.pipeline import Pipeline
from grain_sft.progress import is_terminal
from grain_sft.view.rows import RowView, describe_origin, segment_runs, view_rows
from grain_sft.view.text import TokenTexts, columns, shown_texts, texts_of

_COLOURS = (36, 33, 35, 32, 34, 31)
"""ANSI codes of the segments' colours: cyan, yellow, magenta, green, blue, red."""

_BOLD, _DIM, _INVERSE = "1", "2", "7"  # ANSI codes
_RESET = "\x1b[0m"
_GUTTER = 9  # columns of the position and the bar at the left of a line
_BETWEEN = " ║ "  # between the two responses of a preference pair
_LEAST_SIDE_BY_SIDE = 72  # columns of the narrowest terminal that shows responses side by side
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class Cell(NamedTuple):
    """A token to print, or a part of a token that is wider than a line. `position` is the token's position in its segment."""

    text: str
    takes_loss: bool
    is_special: bool
    position: int


def wants_colour() -> bool:
    """Return whether to print in colour. Terminals and notebooks get colour, unless NO_COLOR or TERM=dumb is set.

    NO_COLOR: https://no-color.org.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return is_terminal(sys.stdout) or "ipykernel" in type(sys.stdout).__module__


def show(pipeline: Pipeline, step: int, rows: int | Sequence[int], tokenizer: str | os.PathLike[str] | None) -> None:
    """Print rows of a step, as `Pipeline.show` describes."""
    try:
        texts = texts_of(pipeline.at(step).source.layout.corpus, tokenizer, print, "tokenizer=PATH")
    except MissingExtraError as error:
        print(f"Ids are shown: {error}")
        texts = TokenTexts(None)
    if not isinstance(rows, Sequence):
        rows = range(min(as_integer("rows", rows, 1, PipelineError), len(pipeline.sampler.rows(step))))
    colour, width = wants_colour(), shutil.get_terminal_size().columns
    for view in view_rows(pipeline, step, rows):
        print(*row_lines(view, texts, colour=colour, width=width), "", sep="\n")


def row_lines(view: RowView, texts: TokenTexts, *, colour: bool, width: int) -> Iterator[str]:
    """Yield the lines of a row: a heading and notes, then for each segment a heading, the tokens' origins, and the tokens.

    With colour, each segment has its own colour, tokens that take no loss are dim, and special tokens are inverse.
    Without colour, ⟦ ⟧ enclose each run of tokens that take loss. Lines of tokens have at most `width` columns, or
    16 columns of tokens if `width` is small. The responses of a preference pair are side by side if `width` has room for them.
    """
    content = ", of padding alone" if view.instance < 0 else f", instance {view.instance:,} of the layout"
    epoch = f", epoch {view.epoch}" if view.epoch >= 0 else ""
    yield _styled(f"step {view.step:,}{epoch}, row {view.row}{content}", _BOLD, colour)
    yield f"{len(view.tokens):,} tokens, {int(view.loss.sum()):,} take loss"
    yield from view.notes
    runs = segment_runs(view)
    groups = [[run] for run in runs]  # the runs of a group are printed side by side
    if view.names and width >= _LEAST_SIDE_BY_SIDE:
        responses = [run for run in runs if run[0] > 1]  # segment 1 is the prompt, 0 is padding
        others = [[run] for run in runs if run not in responses]
        # the prompt, the responses, the padding
        groups = [*others[:1], responses, *others[1:]] if responses else others
    for group in groups:
        yield ""
        for run in group:
            yield from _heading(view, run, colour)
        side = width if len(group) == 1 else width // len(group) - len(_BETWEEN)
        yield from _side_by_side([list(_token_lines(view, run, texts, colour, side)) for run in group], side)


def _heading(view: RowView, run: tuple[int, int, int], colour: bool) -> Iterator[str]:
    """Yield the title of a run of `segment_runs`, then a line for the origin of each of its pieces."""
    segment, first, stop = run
    if not segment:
        ids = ", ".join(map(str, np.unique(view.tokens[first:stop])[:3].tolist()))
        yield f"padding: {stop - first:,} tokens of id {ids}"
        return
    tokens = "empty"
    if first < stop:
        tokens = f"tokens {first:,} to {stop - 1:,}, {view.loss[first:stop].sum():,} of {stop - first:,} take loss"
    name = f", {view.names[segment - 1]}" if view.names else ""
    yield _styled(f"segment {segment}{name}: {tokens}", f"{_BOLD};{_colour_of(segment)}", colour)
    for piece in view.pieces:
        # padding in place of withdrawn documents divides a segment into several runs
        if piece.segment == segment and piece.column < stop and first < piece.column + piece.stop - piece.start:
            yield f"  {describe_origin(piece)}"


def _token_lines(view: RowView, run: tuple[int, int, int], texts: TokenTexts, colour: bool, width: int) -> Iterator[str]:
    """Yield the wrapped tokens of a segment; nothing for padding."""
    segment, first, stop = run
    if segment:
        tokens = view.tokens[first:stop].tolist()
        loss, positions = view.loss[first:stop].tolist(), view.positions[first:stop].tolist()
        cells = map(Cell, shown_texts(tokens, texts), loss, map(texts.is_special, tokens), positions)
        gutter = max(_GUTTER, len(f"{max(positions, default=0):,}") + 3)
        yield from _wrapped(cells, colour, _colour_of(segment), max(width - gutter, 16))


def _colour_of(segment: int) -> int:
    return _COLOURS[(segment - 1) % len(_COLOURS)]


def _side_by_side(sides: list[list[str]], width: int) -> Iterator[str]:
    """Yield the lines of texts next to each other. All but the last text are padded to `width` columns."""
    for lines in itertools.zip_longest(*sides, fillvalue=""):
        padded = [line + " " * (width - columns(_ESCAPE.sub("", line))) for line in lines[:-1]]
        yield _BETWEEN.join([*padded, lines[-1]])


def _wrapped(cells: Iterator[Cell], colour: bool, code: int, width: int) -> Iterator[str]:
    """Yield lines, each a position and tokens of at most `width` columns. A line ends early after a newline (⏎)."""
    line: list[Cell] = []
    used = 0  # columns of `line`, without the brackets of a run at its start
    most = width - (0 if colour else 2)  # without colour, 2 columns are kept for these brackets
    for cell in cells:
        # a token wider than a line is cut into parts of `size` characters; a character takes at most two columns
        size = max(1, len(cell.text) if columns(cell.text) <= most else most // 2)
        for start in range(0, max(1, len(cell.text)), size):  # a token may have an empty text
            part = cell._replace(text=cell.text[start : start + size])
            opens_run = not colour and bool(line) and part.takes_loss and not line[-1].takes_loss
            needed = columns(part.text) + 2 * opens_run  # a run of tokens that take loss is in brackets
            if line and used + needed > most:
                yield _line(line, colour, code)
                line, used = [], 0
            line.append(part)
            used += needed
            if part.text.endswith("⏎"):
                yield _line(line, colour, code)
                line, used = [], 0
    if line:
        yield _line(line, colour, code)


def _line(line: list[Cell], colour: bool, code: int) -> str:
    """Return a line of tokens, which begins with the position of the first token. `code` is the ANSI code of the colour."""
    parts: list[str] = []
    for takes_loss, cells in itertools.groupby(line, key=lambda cell: cell.takes_loss):
        if colour:
            style = f"{code}" if takes_loss else f"{_DIM};{code}"
            parts += [_styled(cell.text, f"{style};{_INVERSE}" if cell.is_special else style, True) for cell in cells]
        else:
            text = "".join(cell.text for cell in cells)
            parts.append(f"⟦{text}⟧" if takes_loss else text)
    return f"{line[0].position:>{_GUTTER - 3},} │ {''.join(parts)}"


def _styled(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}{_RESET}" if colour else text
