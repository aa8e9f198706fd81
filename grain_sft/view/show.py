"""`Pipeline.show`: rows of a step, token by token, printed in a terminal or a notebook."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from grain_sft.arguments import as_integer
from grain_sft.errors import MissingExtraError, PipelineError
from grain_sft.pipeline import Pipeline
from grain_sft.view.rows import view_rows
from grain_sft.view.terminal import row_lines, wants_colour
from grain_sft.view.token_text import TokenTexts, texts_of


def show(pipeline: Pipeline, step: int, rows: int | Sequence[int], tokenizer: str | os.PathLike[str] | None) -> None:
    """Print rows of a step; see `Pipeline.show`."""
    try:
        texts = texts_of(pipeline.source.layout.corpus, tokenizer, print, "tokenizer=PATH")
    except MissingExtraError as error:
        print(f"Ids are shown: {error}")
        texts = TokenTexts(None)
    if not isinstance(rows, Sequence):
        in_batch = len(pipeline.sampler.rows(step))
        rows = range(min(as_integer("rows", rows, 1, PipelineError), in_batch))
    colour, width = wants_colour(), shutil.get_terminal_size().columns
    for view in view_rows(pipeline, step, rows):
        for line in row_lines(view, texts, colour=colour, width=width):
            print(line)
        print()
