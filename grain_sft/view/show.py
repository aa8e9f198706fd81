"""`Pipeline.show`: rows of a step, token by token, printed in a terminal or a notebook."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from grain_sft.arguments import as_integer
from grain_sft.corpus import Corpus
from grain_sft.errors import MissingExtraError, PipelineError
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.text import find_tokenizer, tokenizer_of
from grain_sft.view.rows import view_rows
from grain_sft.view.terminal import row_lines
from grain_sft.view.token_text import TokenTexts


def show(pipeline: Pipeline, step: int, rows: int | Sequence[int], tokenizer: str | os.PathLike[str] | None) -> None:
    """Print rows of a step; see `Pipeline.show`."""
    texts = _texts(pipeline.source.layout.corpus, None if tokenizer is None else os.fspath(tokenizer))
    if not isinstance(rows, Sequence):
        in_batch = len(pipeline.sampler.rows(step))
        rows = range(min(as_integer("rows", rows, 1, PipelineError), in_batch))
    colour, width = _has_colour(), shutil.get_terminal_size().columns
    for view in view_rows(pipeline, step, rows):
        for line in row_lines(view, texts, colour=colour, width=width):
            print(line)
        print()


def _texts(corpus: Corpus, path: str | None) -> TokenTexts:
    """Return the texts of the corpus's tokens, or none with a line that says why ids are shown."""
    if path is None and (path := find_tokenizer(corpus)) is None:
        print("No folder 'tokenizer' is beside the corpus, so ids are shown. Give tokenizer=PATH.")
        return TokenTexts(None)
    try:
        return TokenTexts(tokenizer_of(corpus, path))
    except MissingExtraError as error:
        print(f"Ids are shown: {error}")
        return TokenTexts(None)


def _has_colour() -> bool:
    """Return whether the output is a terminal or a notebook that is wanted in colour (https://no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or "ipykernel" in type(sys.stdout).__module__
