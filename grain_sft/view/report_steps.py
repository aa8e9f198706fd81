"""Figures of a report about steps at equal distances: sources, the mixture over time, and what the filter rejects."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import GrainSftError
from grain_sft.layout import FILL_ROW, Layout
from grain_sft.pipeline import Pipeline
from grain_sft.provenance import summarize, trace
from grain_sft.transforms import NgramFilter, trait
from grain_sft.view.token_text import TokenTexts
from grain_sft.view.visible import visible

MOST_TOKENS = 1 << 25
"""Most tokens that are read of all sampled steps together."""
_EXAMPLES = 5
_SHOWN = 48  # tokens of an example

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A repeat in a row: `times` times the same `period` tokens, from token `at` on."""

    at: int
    period: int
    times: int


def sampled_steps(pipeline: Pipeline, most: int) -> list[int]:
    """Return at most `most` steps at equal distances, of `steps_in_all`; fewer where steps are large."""
    sampler, total = pipeline.sampler, steps_in_all(pipeline)
    tokens = sampler.rows_per_host * pipeline.source.layout.sequence_length
    count = max(1, min(most, total, MOST_TOKENS // tokens))
    chosen: list[int] = np.unique(np.linspace(0, total - 1, count).astype(np.int64)).tolist()
    return chosen


def steps_in_all(pipeline: Pipeline) -> int:
    """Return the steps of the run; of one that never ends, as many as read as many rows as the layout has."""
    sampler = pipeline.sampler
    if sampler.num_steps is not None:
        return sampler.num_steps
    return max(1, sampler.num_instances // sampler.global_batch_size)


def sources(pipeline: Pipeline, steps: list[int]) -> dict[str, Any]:
    """Return the tokens of the steps by source, as the `columns` of `summarize`; and of each of `steps`, the `tokens` by the
    name of the source, in the order of the columns."""
    for layout in pipeline.source.layout.parts.values():
        _read_sources(layout)
    parts = [trace(pipeline, range(step, step + 1)) for step in steps]
    columns = summarize(parts)
    tokens: dict[str, list[int]] = {name: [] for name in columns["source"]}
    for part in parts:
        found = summarize(part)
        held = dict(zip(found["source"], found["tokens"], strict=True))
        for name, column in tokens.items():
            column.append(held.get(name, 0))
    return {"columns": columns, "steps": steps, "tokens": tokens}


def filtered(pipeline: Pipeline, steps: list[int], texts: TokenTexts) -> dict[str, Any]:
    """Return the rows of the steps that the pipeline's NgramFilter rejects; without one, that a default one would reject.

    Returns:
      filter: its repr; used: whether the config has it; rows, rejected, and rejected_for_padding: of these, how many would
      not be rejected without the padding at their ends; examples.
    """
    own = next((each for each in pipeline.transforms if trait(each, "filters_repetition")), None)
    chosen = own or NgramFilter()
    counts = {"rows": 0, "rejected": 0, "rejected_for_padding": 0}
    examples: list[dict[str, Any]] = []
    for step in steps:
        rows = pipeline.sampler.rows(step)
        rows = rows[rows != FILL_ROW]
        element = pipeline.source.read(rows)
        failing = np.flatnonzero(chosen.fails(element["tokens"], element["segment_ids"]))
        counts["rows"] += len(rows)
        counts["rejected"] += len(failing)
        for at in failing.tolist():
            tokens = element["tokens"][at].astype(np.int64)
            padding = element["segment_ids"][at] == 0
            tokens[padding] = -1 - np.arange(np.count_nonzero(padding))  # all different
            if not chosen.fails(tokens):
                counts["rejected_for_padding"] += 1
            elif len(examples) < _EXAMPLES:
                examples.append({"step": step, "instance": int(rows[at])} | _example(tokens, chosen, texts))
    return {"filter": repr(chosen), "used": own is not None, **counts, "examples": examples}


def longest_repeat(tokens: Ints, chosen: NgramFilter) -> Repeat:
    """Return the repeat that fills most tokens of a row, of the periods that the filter looks for."""
    best = Repeat(0, 1, 1)
    for period in range(chosen.min_period, min(chosen.max_period, len(tokens) // 3) + 1):
        equal = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
        edges = np.flatnonzero(np.diff(equal))
        runs = edges[1::2] - edges[::2]
        if len(runs):
            at = int(runs.argmax())
            found = Repeat(int(edges[2 * at]), period, (int(runs[at]) + period) // period)
            if found.times * period > best.times * best.period:
                best = found
    return best


def _example(tokens: Ints, chosen: NgramFilter, texts: TokenTexts) -> dict[str, Any]:
    found = longest_repeat(tokens, chosen)
    ids = tokens[found.at : found.at + max(_SHOWN, found.period)].tolist()
    known = [texts.text(number) for number in ids]
    joined = "".join(f" ⟨{number}⟩" if text is None else text for number, text in zip(ids, known, strict=True))
    whole = joined.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return {**dataclasses.asdict(found), "text": visible(whole.strip())}


def _read_sources(layout: Layout) -> None:
    """Read the corpus's file of sources once for all traces."""
    if layout.follows_documents and layout.corpus.sources_file is not None:
        with contextlib.suppress(GrainSftError):  # the trace reports what is wrong
            _ = layout.corpus.sources
