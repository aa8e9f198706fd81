"""HTML page that shows the rows of a step, and of the steps before and after it."""

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
"""Maximum number of tokens on a page: about 20 MB, which a browser still opens."""


def inspect_page(
    pipeline: Pipeline, step: int, texts: TokenTexts, *, rows: Sequence[int] | None = None, title: str = "pipeline"
) -> str:
    """Return the page of a step: its rows, and the same rows of the steps before and after it.

    Args:
      rows: Indices of rows of this host's batch, at least one. None means all rows, as far as `MOST_TOKENS` allows.

    Raises:
      GrainSftError: As in `view_rows`.
    """
    if rows is not None and not len(rows):
        raise RowIndexError("rows is empty; expected at least one row. Name a row, or give None for all.")
    sampler = pipeline.sampler
    neighbours = [other for other in (step - 1, step + 1) if sampler.first_step <= other < sampler.end_of_batches]
    # the number of hosts may change with the batch size, so it need not divide the batch of a neighbour
    neighbours = [other for other in neighbours if sampler.batch_sizes.at(other) % sampler.host.count == 0]
    steps: list[dict[str, Any]] = []
    views: list[RowView] = []
    for number in (step, *neighbours):  # `step` first, so that errors are about it
        count = len(sampler.rows(number))
        length = pipeline.at(number).source.layout.sequence_length
        most_rows = max(1, MOST_TOKENS // (3 * length))  # a page has up to 3 steps
        chosen = range(min(count, most_rows)) if rows is None else rows
        if number != step:
            # a row that a neighbour lacks is left out; a row that `step` lacks is an error
            chosen = [row for row in chosen if row < count]
        if len(chosen):
            views_of_step = view_rows(pipeline, number, chosen)
            views += views_of_step
            rows_of_step = [_row(view, texts) for view in views_of_step]
            steps.append({"step": number, "rows_of_batch": count, "rows": rows_of_step})
    steps.sort(key=lambda entry: entry["step"])
    ids = np.unique(np.concatenate([view.tokens for view in views])).tolist()
    data = {
        "title": visible_line(title),
        "receipt": pipeline.receipt.code,
        "host": [sampler.host.index, sampler.host.count],
        # index in `steps` of the step to show first
        "at": [entry["step"] for entry in steps].index(step),
        "steps": steps,
        # the token ids of the page and their texts; the `pieces` of a row, in `_row`, are parts of token files
        "pieces": {
            "ids": ids,
            "shown": [None if text is None else visible(text) for text in map(texts.text, ids)],
            "special": [token for token in ids if texts.is_special(token)],
        },
    }
    heading = f"Step {step}: {visible_line(title)}"
    body = part("inspect.html").replace("HEADING", html.escape(heading))
    return make_page(heading, body, styles=part("inspect.css"), script=part("inspect.js"), data=data)


def _row(view: RowView, texts: TokenTexts) -> dict[str, Any]:
    """Return a row as JSON values for inspect.js. Arrays are base64 of their little-endian bytes."""
    lowest, highest = view.tokens.min(initial=0), view.tokens.max(initial=0)
    if highest > np.iinfo(np.int32).max:
        raise RowIndexError(f"step {view.step}, row {view.row}: token id {highest} exceeds int32. Check the corpus's dtype.")
    # token ids take 2 bytes if they fit, else 4
    dtype = "<u2" if lowest >= 0 and highest < 1 << 16 else "<i4"
    runs = segment_runs(view)
    split = []  # (first token, last token + 1, character) where several tokens share a character
    for _, first, stop in runs:
        for begin, end, whole in split_characters([texts.text(token) for token in view.tokens[first:stop].tolist()]):
            split.append([first + begin, first + end, visible(whole)])
    # indices of tokens whose position is not 1 more than the previous token's; `prepend` includes index 0
    jumps = np.flatnonzero(np.diff(view.positions, prepend=view.positions[:1] - 2) != 1)
    pieces = []
    for piece in view.pieces:
        shown = {"source": piece.source_record, "file": visible_line(piece.file), "words": describe_origin(piece)}
        pieces.append(dataclasses.asdict(piece) | shown)
    return {
        "epoch": view.epoch,
        "row": view.row,
        "slot": view.slot,
        "instance": view.instance,
        "length": len(view.tokens),
        "width": np.dtype(dtype).itemsize,
        "segments": runs,
        "split": split,
        "names": list(view.names),
        "ids": _encoded(view.tokens.astype(dtype)),
        "positions": np.stack([jumps, view.positions[jumps]], axis=1).tolist(),
        "loss": _encoded(np.packbits(view.loss, bitorder="little")),
        "weights": None if view.weights is None else _encoded(view.weights.astype("<f4")),
        "pieces": pieces,
        "notes": list(map(visible_line, view.notes)),
    }


def _encoded(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
