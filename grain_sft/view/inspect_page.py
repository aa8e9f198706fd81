"""Rows of a step, and of the steps before and after it, as one page that needs no network."""

import base64
import dataclasses
import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.pipeline import Pipeline
from grain_sft.view.page import make_page, part
from grain_sft.view.rows import RowView, describe_origin, segment_runs, view_rows
from grain_sft.view.text import TokenTexts, split_characters, visible, visible_line

MOST_TOKENS = 1 << 22
"""Maximum number of tokens of a page: about 20 MB, which a browser opens."""


def inspect_page(
    pipeline: Pipeline, step: int, texts: TokenTexts, *, rows: Sequence[int] | None = None, title: str = "pipeline"
) -> str:
    """Return the page of a step: its rows, and the same rows of the steps before and after it.

    `rows` are rows of this host's batch, at least one. None means all of them, up to `MOST_TOKENS`. Errors are those of
    `view_rows`.
    """
    if rows is not None and not len(rows):
        raise RowIndexError("rows is empty; expected at least one row. Name a row, or give None for all.")
    room = max(1, MOST_TOKENS // (3 * pipeline.at(step).source.layout.sequence_length))
    steps = []
    for number in (step - 1, step, step + 1):
        if pipeline.first_step <= number < pipeline.end_step or number == step:
            count = len(pipeline.sampler.rows(number))  # differs between the steps of a schedule
            chosen = range(min(count, room)) if rows is None else [row for row in rows if row < count or number == step]
            if len(chosen):
                steps.append((number, count, view_rows(pipeline, number, chosen)))
    views = [view for _, _, of_step in steps for view in of_step]
    ids = np.unique(np.concatenate([view.tokens for view in views])).tolist()
    shown = [None if (text := texts.text(each)) is None else visible(text) for each in ids]
    data = {
        "title": visible_line(title),
        "receipt": pipeline.receipt.code,
        "host": [pipeline.sampler.host.index, pipeline.sampler.host.count],
        "at": [number for number, *_ in steps].index(step),
        "steps": [
            {"step": number, "rows_of_batch": count, "rows": [_row(view, texts) for view in of_step]}
            for number, count, of_step in steps
        ],
        "pieces": {"ids": ids, "shown": shown, "special": [each for each in ids if texts.is_special(each)]},
    }
    heading = f"Step {step}: {visible_line(title)}"
    body = part("inspect.html").replace("HEADING", html.escape(heading))
    return make_page(heading, body, styles=part("inspect.css"), script=part("inspect.js"), data=data)


def _row(view: RowView, texts: TokenTexts) -> dict[str, Any]:
    """Return a row in the form that the page's script reads."""
    least, most = view.tokens.min(initial=0), view.tokens.max(initial=0)
    if most > np.iinfo(np.int32).max:
        raise RowIndexError(f"step {view.step}, row {view.row}: a token id is above {np.iinfo(np.int32).max}.")
    dtype = "<u2" if least >= 0 and most < 1 << 16 else "<i4"
    runs = segment_runs(view)
    split = []
    for _, first, stop in runs:
        found = split_characters([texts.text(number) for number in view.tokens[first:stop].tolist()])
        split += [[first + begin, first + end, visible(whole)] for begin, end, whole in found]
    jumps = np.flatnonzero(np.diff(view.positions, prepend=view.positions[:1] - 2) != 1)
    pieces = []
    for piece in view.pieces:
        shown = {"source": piece.source_record, "file": visible_line(piece.file)}
        pieces.append({**dataclasses.asdict(piece), **shown, "words": describe_origin(piece)})
    return {
        **{name: getattr(view, name) for name in ("epoch", "row", "slot", "instance")},
        **{"length": len(view.tokens), "width": np.dtype(dtype).itemsize, "segments": runs, "split": split},
        "names": list(view.names),
        "ids": encode_array(view.tokens.astype(dtype)),
        "positions": np.stack([jumps, view.positions[jumps]], axis=1).tolist(),
        "loss": encode_array(np.packbits(view.loss, bitorder="little")),
        "weights": None if view.weights is None else encode_array(view.weights.astype("<f4")),
        "pieces": pieces,
        "notes": list(map(visible_line, view.notes)),
    }


def encode_array(array: npt.NDArray[Any]) -> str:
    """Return the little-endian bytes of an array in base64."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
