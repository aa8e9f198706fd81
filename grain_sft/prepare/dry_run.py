"""dry_run: what a preparation would make of the first records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from grain_sft.errors import RecordError
from grain_sft.prepare import inputs
from grain_sft.prepare.render import Renderer, Work
from grain_sft.prepare.request import Request
from grain_sft.prepare.templates import Rendered
from grain_sft.prepare.tokenizers import Tokenizer


def dry_run(request: Request, records: int) -> str:
    """Render the first `records` of the inputs and write nothing.

    Returns:
      Text for a person: counts, the records that would be rejected, and the first document piece by piece, with what
      takes loss.

    Raises:
      GrainSftError: an input or the tokenizer can't be read.
    """
    entries = inputs.list_inputs([dataset.paths for dataset in request.datasets])
    work = Work(request, tuple(entries), "")
    renderer = Renderer(work)
    lengths, trainable, bad = [], [], []
    first: Rendered | None = None
    for entry, line, raw in itertools.islice(inputs.all_records(entries), records):
        try:
            conversation = renderer.read(raw)
            [result] = renderer.render([conversation])
            if isinstance(result, RecordError):
                raise result
        except RecordError as error:
            bad.append(f"  {entry.path}:{line}: {error}")
            continue
        first = first or result
        lengths.append(len(result.tokens))
        trainable.append(int(np.count_nonzero(result.loss)))
    total = max(1, sum(lengths))
    lines = [f"{len(lengths):,} of the first {len(lengths) + len(bad):,} records can be prepared; nothing was written."]
    if lengths:
        lines.append(f"tokens     {sum(lengths):,}: {min(lengths):,} to {max(lengths):,} a document")
        lines.append(f"trainable  {sum(trainable):,} ({sum(trainable) / total:.1%})")
    if request.max_length is not None:
        over = sum(length > request.max_length for length in lengths)
        lines.append(f"cut        {over:,} documents are longer than {request.max_length:,} tokens")
    if bad:
        lines += [f"rejected   {len(bad):,}", *bad[:20]]
    if first is not None:
        lines += ["the first document (| takes loss, . does not):", *_pieces(first, work.tokenizer)]
    return "\n".join(lines)


def _pieces(rendered: Rendered, tokenizer: Tokenizer) -> Iterator[str]:
    """The document's text, cut where loss begins and ends, with ⏎ for a newline as in `grain-sft inspect`."""
    borders = np.flatnonzero(np.diff(rendered.loss != 0)) + 1
    for part in np.split(np.arange(len(rendered.tokens)), borders)[:40]:
        text = tokenizer.decode(rendered.tokens[part].tolist())
        mark = "|" if rendered.loss[part[0]] else "."
        shown = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
        yield from (f"{mark} {line}" for line in shown.replace("\n", "⏎\n").removesuffix("\n").split("\n"))
