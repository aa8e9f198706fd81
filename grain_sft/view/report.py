"""The report of a config: all its figures, ready for JSON. Pictures and the page are made from them alone."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import GrainSftError
from grain_sft.layout import FILL_ROW
from grain_sft.pipeline import Pipeline
from grain_sft.provenance import summarize, trace
from grain_sft.transforms import NgramFilter, trait
from grain_sft.version import __version__
from grain_sft.view import report_corpus
from grain_sft.view.text import TokenTexts, visible

MOST_TOKENS = 1 << 25
"""Most tokens that are read of all sampled steps together."""
_EXAMPLES = 5
_SHOWN = 48  # tokens of an example


def make_report(
    pipeline: Pipeline, texts: TokenTexts, *, name: str = "pipeline", steps: int = 64, throughput: Any = None
) -> dict[str, Any]:
    """Return what a run is made of, in bounded time: steps are a sample, and of a very large corpus the files too.

    Args:
      pipeline: Pipeline of the config.
      texts: Texts of its tokens.
      name: Name of the pipeline, for the title.
      steps: Number of steps that are sampled, at most.
      throughput: Measured speed, as `grain_sft.bench.config.report_speed` returns it; None: not measured.

    Returns:
      name, version, receipt, parts, corpus, run; lengths, packing, left_out (see `report_corpus`); sampled (steps, of how
      many), sources, filter, throughput.

    Raises:
      CorpusFileError, CorpusError: files cannot be read.
    """
    source, sampler = pipeline.source, pipeline.sampler
    layout, corpus, total = source.layout, source.layout.corpus, sampler.num_steps
    if total is None:  # the steps that read as many rows as the layout has
        total = max(1, sampler.num_instances // sampler.global_batch_size)
    most = max(1, min(steps, total, MOST_TOKENS // (sampler.rows_per_host * layout.sequence_length)))
    chosen: list[int] = np.unique(np.linspace(0, total - 1, most).astype(np.int64)).tolist()
    return {
        "name": name,
        "version": __version__,
        **pipeline.receipt.as_dict(),
        "corpus": {"tokens": corpus.num_tokens, "shards": len(corpus.shards), "fingerprint": corpus.ends_fingerprint},
        "run": {
            **{"rows": len(source), "sequence_length": layout.sequence_length, "steps": sampler.num_steps},
            **{name: getattr(sampler, name) for name in ("global_batch_size", "steps_per_epoch", "epochs")},
        },
        "lengths": report_corpus.lengths(layout),
        "packing": report_corpus.packing(pipeline),
        "left_out": report_corpus.left_out(pipeline),
        "sampled": {"steps": len(chosen), "of": total, "ends": sampler.num_steps is not None},
        "sources": _sources(pipeline, chosen),
        "filter": _filtered(pipeline, chosen, texts),
        "throughput": throughput,
    }


def _sources(pipeline: Pipeline, steps: list[int]) -> dict[str, Any]:
    """Return the tokens of the steps by source, as the `columns` of `summarize`; and of each of `steps`, the `tokens` by the
    name of the source, in the order of the columns."""
    for layout in pipeline.source.layout.parts.values():
        if layout.follows_documents and layout.corpus.sources_file is not None:
            with contextlib.suppress(GrainSftError):  # the trace reports what is wrong
                _ = layout.corpus.sources  # read once for all traces
    parts = [trace(pipeline, range(step, step + 1)) for step in steps]
    columns = summarize(parts)
    counts = [dict(zip(found["source"], found["tokens"], strict=True)) for found in map(summarize, parts)]
    tokens = {name: [count.get(name, 0) for count in counts] for name in columns["source"]}
    return {"columns": columns, "steps": steps, "tokens": tokens}


def _filtered(pipeline: Pipeline, steps: list[int], texts: TokenTexts) -> dict[str, Any]:
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


def _example(tokens: npt.NDArray[np.int64], chosen: NgramFilter, texts: TokenTexts) -> dict[str, Any]:
    """Return the repeat that fills most tokens of a row, of the periods that the filter looks for: `times` times the same
    `period` tokens, from token `at` on."""
    first, period, times = 0, 1, 1
    for length in range(chosen.min_period, min(chosen.max_period, len(tokens) // 3) + 1):
        equal = np.concatenate(([False], tokens[length:] == tokens[:-length], [False]))
        starts, ends = np.flatnonzero(np.diff(equal)).reshape(-1, 2).T
        if len(starts):
            longest = int((ends - starts).argmax())
            found = (int(ends[longest] - starts[longest]) + length) // length
            if found * length > times * period:
                first, period, times = int(starts[longest]), length, found
    ids = tokens[first : first + max(_SHOWN, period)].tolist()
    shown = [f" ⟨{number}⟩" if (text := texts.text(number)) is None else text for number in ids]
    whole = "".join(shown).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return {"at": first, "period": period, "times": times, "text": visible(whole.strip())}
