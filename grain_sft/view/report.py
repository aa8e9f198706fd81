"""Figures of the report of a config, ready for JSON: the only input of its pictures and its page."""

import contextlib
import dataclasses
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, prepare_manifest
from grain_sft.errors import GrainSftError
from grain_sft.layout import FILL_ROW, ROWS_A_DEVICE, Layout, LeftOut, compare_algorithms, over_devices
from grain_sft.pipeline import Pipeline
from grain_sft.provenance import summarize, trace
from grain_sft.storage import files
from grain_sft.transforms import NgramFilter, trait
from grain_sft.version import __version__
from grain_sft.view.text import TokenTexts, visible

MOST_TOKENS = 1 << 25
"""Maximum number of tokens of all sampled steps together."""
MOST_SCANNED = 1 << 28
"""Maximum number of tokens that are searched for EOS for the report alone."""
MOST_PACKED = 3_000_000
"""Maximum number of documents that each algorithm packs, for comparison: this takes 2 to 10 s a million with `multipack`."""

_PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
_OPTIONS = ("long_documents", "source_group_size", "ties", "max_segments", "boundaries", "bos_token_id", "seed")
_EXAMPLES = 5
_SHOWN = 48  # tokens of an example, or one period if that is longer


def make_report(pipeline: Pipeline, texts: TokenTexts, *, name: str = "pipeline", steps: int = 64) -> dict[str, Any]:
    """Return the figures of a run, in bounded time: from a sample of its steps and of the files of a very large corpus.

    Args:
      name: Name of the pipeline, for the title.
      steps: Maximum number of sampled steps.

    Returns:
      name, version, receipt, parts, corpus, run; lengths, packing, attention and left_out, from the functions of these names;
      sampled: number of `steps` `of` how many, and whether the run `ends`; sources, filter; throughput, None until the caller
      sets it to a result of `grain_sft.bench.config.report_speed`.

    Raises:
      CorpusFileError, CorpusError: files cannot be read.
    """
    source, sampler = pipeline.source, pipeline.sampler
    layout, corpus = source.layout, source.layout.corpus
    if sampler.num_steps is None:  # an endless run: the steps that read as many rows as the layout has
        total = max(1, sampler.num_instances // sampler.global_batch_size)
    else:
        total = sampler.num_steps - sampler.first_step
    most = max(1, min(steps, total, MOST_TOKENS // (sampler.rows_per_host * layout.sequence_length)))
    chosen: list[int] = (sampler.first_step + np.unique(np.linspace(0, total - 1, most).astype(np.int64))).tolist()
    return {
        "name": name,
        "version": __version__,
        **pipeline.receipt.as_dict(),
        "corpus": {"tokens": corpus.num_tokens, "shards": len(corpus.shards), "fingerprint": corpus.ends_fingerprint},
        "run": {
            "rows": len(source),
            "sequence_length": layout.sequence_length,
            "rows_of_lengths": dict(zip(layout.row_lengths, layout.row_counts, strict=True)),
            "steps": None if sampler.num_steps is None else total,
            **{name: getattr(sampler, name) for name in ("global_batch_size", "steps_per_epoch", "epochs")},
        },
        "lengths": lengths(layout),
        "packing": packing(pipeline),
        "attention": attention(pipeline, chosen),
        "left_out": left_out(pipeline),
        "sampled": {"steps": len(chosen), "of": total, "ends": sampler.num_steps is not None},
        "sources": _sources(pipeline, chosen),
        "filter": _filtered(pipeline, chosen, texts),
        "throughput": None,
    }


def _sources(pipeline: Pipeline, steps: list[int]) -> dict[str, Any]:
    """Return `columns`, the result of `summarize` for all steps together; `steps`; and `tokens`, which maps each source, in
    the order of `columns`, to its number of tokens in each step."""
    for layout in pipeline.source.layout.parts.values():
        if layout.follows_documents and layout.corpus.sources_file is not None:
            with contextlib.suppress(GrainSftError):  # `trace` raises it again
                _ = layout.corpus.sources  # cached here, so that not every step's trace reads the file
    parts = [trace(pipeline, range(step, step + 1)) for step in steps]
    columns = summarize(parts)
    counts = [dict(zip(found["source"], found["tokens"], strict=True)) for found in map(summarize, parts)]
    tokens = {name: [count.get(name, 0) for count in counts] for name in columns["source"]}
    return {"columns": columns, "steps": steps, "tokens": tokens}


def _filtered(pipeline: Pipeline, steps: list[int], texts: TokenTexts) -> dict[str, Any]:
    """Return counts and examples of the rows of `steps` that the pipeline's NgramFilter, or else a default one, rejects.

    Returns:
      filter: repr of the filter; used: whether the pipeline has it; rows, rejected: numbers of rows;
      rejected_for_padding: number of rejected rows that would pass without their padding; examples.
    """
    own = next((each for each in pipeline.transforms if trait(each, "filters_repetition")), None)
    chosen = own or NgramFilter()
    counts = {"rows": 0, "rejected": 0, "rejected_for_padding": 0}
    examples: list[dict[str, Any]] = []
    for step in steps:
        rows = pipeline.sampler.rows(step)
        rows = rows[rows != FILL_ROW]
        element = pipeline.source_at(step).read(rows)
        failing = np.flatnonzero(chosen.fails(element["tokens"], element["segment_ids"]))
        counts["rows"] += len(rows)
        counts["rejected"] += len(failing)
        for at in failing.tolist():
            tokens = element["tokens"][at].astype(np.int64)
            padding = element["segment_ids"][at] == 0
            tokens[padding] = -1 - np.arange(np.count_nonzero(padding))  # distinct numbers, which never repeat
            if not chosen.fails(tokens):
                counts["rejected_for_padding"] += 1
            elif len(examples) < _EXAMPLES:
                examples.append({"step": step, "instance": int(rows[at])} | _example(tokens, chosen, texts))
    return {"filter": repr(chosen), "used": own is not None, **counts, "examples": examples}


def _example(tokens: npt.NDArray[np.int64], chosen: NgramFilter, texts: TokenTexts) -> dict[str, Any]:
    """Return the longest repetition in a row that has one of the filter's periods: from token `at`, the same `period` tokens
    `times` times, and their `text`."""
    shortest, longest = (getattr(chosen, name, getattr(NgramFilter(), name)) for name in ("min_period", "max_period"))
    repetitions = [(0, 1, 1)]  # first token, period, times
    for period in range(shortest, min(longest, len(tokens) // 3) + 1):
        equal = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
        starts, ends = np.flatnonzero(np.diff(equal)).reshape(-1, 2).T
        if len(starts):
            at = int((ends - starts).argmax())
            repetitions.append((int(starts[at]), period, int(ends[at] - starts[at]) // period + 1))
    first, period, times = max(repetitions, key=lambda each: each[1] * each[2])
    ids = tokens[first : first + min(period * times, max(_SHOWN, period))].tolist()
    shown = [f" ⟨{number}⟩" if (text := texts.text(number)) is None else text for number in ids]
    # Tokens may hold parts of a UTF-8 character, as surrogates: encode and decode the whole text to join them.
    whole = "".join(shown).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return {"at": first, "period": period, "times": times, "text": visible(whole.strip())}


def lengths(layout: Layout) -> dict[str, Any]:
    """Return statistics of the lengths of documents.

    Returns:
      documents, tokens, mean, longest, longer_than_a_row, percentiles {name: tokens}; bins, by powers of two: first and
      last length, documents and tokens of each; sampled: a sentence if only some files were scanned for documents, else
      None. If documents cannot be found, only `error`.
    """
    try:
        scanned = [_scanned(part) for part in layout.parts.values()]
        length = np.concatenate([corpus.documents.length for corpus, _ in scanned])
    except GrainSftError as error:
        return {"error": str(error)}
    if not len(length):
        return {"error": "the corpus has no document."}
    # Bin b has the lengths 2^(b - 1) to 2^b - 1. Length 0 is in bin 1.
    bins = np.frexp(np.maximum(length, 1).astype(np.float64))[1]
    counts, tokens = np.bincount(bins), np.bincount(bins, weights=length)
    named = zip(_PERCENTILES, np.percentile(length, _PERCENTILES), strict=True)
    return {
        "sampled": " ".join(sampled for _, sampled in scanned if sampled) or None,
        "documents": len(length),
        "tokens": int(length.sum()),
        "mean": float(length.mean()),
        "longest": int(length.max()),
        "longer_than_a_row": int(np.count_nonzero(length > layout.sequence_length)),
        "percentiles": {f"{name}%": float(value) for name, value in named},
        "bins": [
            {"first": 1 << (at - 1), "last": (1 << at) - 1, "documents": int(counts[at]), "tokens": int(tokens[at])}
            for at in range(int(bins.min()), len(counts))
        ],
    }


def _scanned(layout: Layout) -> tuple[Corpus, str | None]:
    """Return the corpus of `layout` and None or, if scanning it for documents takes too long, some shards and a sentence."""
    corpus = layout.corpus
    has_documents = "documents" in vars(corpus) or corpus.has_boundary_files
    if has_documents or layout.follows_documents or corpus.num_tokens <= MOST_SCANNED:
        return corpus, None
    return _some_shards(corpus, MOST_SCANNED / corpus.num_tokens, "so that not all tokens are read for their EOS")


def packing(pipeline: Pipeline) -> dict[str, Any]:
    """Return the results of `compare_algorithms` with the config's options as `algorithms`; the algorithm `used` by the
    config; and `sampled`, a sentence if only some documents were packed, else None. On failure, return only `error`."""
    layout = pipeline.source.layout
    if "" not in layout.parts:
        return {"error": "Not compared for a mixture: its sources are packed separately. Run `grain-sft pack` on each."}
    if layout.of_pairs:
        return {"error": "Preference pairs are not packed: a row holds one."}
    used = None if layout.packing is None else layout.packing.algorithm
    options: dict[str, Any] = {"batch_rows": pipeline.sampler.global_batch_size}
    if layout.packing is not None:
        options |= {name: getattr(layout.packing, name) for name in _OPTIONS}
    try:
        corpus, sampled = _scanned(layout)
        count = len(corpus.documents)
        if count > MOST_PACKED:
            share = MOST_PACKED / count * len(corpus.shards) / len(layout.corpus.shards)
            corpus, sampled = _some_shards(layout.corpus, share, f"so that about {MOST_PACKED:,} documents are packed")
        found = list(compare_algorithms(corpus, layout.sequence_length, options))
    except GrainSftError as error:
        return {"error": str(error)}
    return {"sampled": sampled, "used": used, "algorithms": found}


def attention(pipeline: Pipeline, steps: list[int]) -> list[dict[str, Any]]:
    """Return how unevenly the cost of attention is spread over devices, for each number of rows a device that divides the
    batches of all `steps`.

    Returns:
      Dicts of rows_a_device; mean and worst, over the steps, of the highest cost of a device divided by the mean of all
      devices; step: the step of the worst.
    """
    layout, found = pipeline.source.layout, []
    rows = [pipeline.sampler.slots(range(step, step + 1)).row for step in steps]
    costs = [np.where(each == FILL_ROW, 0, layout.row_costs(np.maximum(each, 0))) for each in rows]
    for each in ROWS_A_DEVICE:
        if not any(len(cost) % each for cost in costs):
            spread = np.array([over_devices(cost[np.newaxis], each)[0] for cost in costs])
            worst = int(spread.argmax())
            figures = {"mean": float(spread.mean()), "worst": float(spread[worst]), "step": steps[worst]}
            found.append({"rows_a_device": each, **figures})
    return found


def left_out(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return what an epoch leaves out, and its padding: dicts of `what`, `documents` and `tokens` (None if not counted)."""
    layout = pipeline.source.layout
    found = [
        (f"{name}: {what}" if name else what, documents, tokens)
        for name, part in layout.parts.items()
        for what, documents, tokens in [*part.left_out(), *_left_out_by_prepare(part.corpus)]
    ]
    sampler = pipeline.sampler
    # The rest differs between epochs, and is not reported, if sources have their own epochs, batch sizes vary, or batches
    # straddle epochs.
    if sampler.steps_per_epoch is not None and not sampler.batch_sizes.schedule and not sampler.runs_on:
        steps, length = sampler.steps_per_epoch, layout.sequence_length
        rest = len(pipeline.source) - sampler.batch_sizes.before(steps)
        tokens = rest * length
        if layout.row_lengths:
            tokens = layout.statistics["tokens"] - steps * sampler.global_batch_size * length
        unused = "that fill no step of their epoch; a shuffled order leaves out others in each epoch"
        what = unused if rest > 0 else "of padding, which fill the last step of an epoch"
        found += [(f"{abs(rest):,} rows {what}", None, abs(tokens))] if rest else []
    return [{"what": what, "documents": documents, "tokens": tokens} for what, documents, tokens in found]


def _left_out_by_prepare(corpus: Corpus) -> list[LeftOut]:
    """Return what `grain-sft prepare` cut and left out, from the prepare.json of the corpus; [] without one."""
    path = prepare_manifest(corpus.shards[0].path)
    if path is None:
        return []
    try:
        manifest = json.loads(files.read_bytes(path))
        found: list[LeftOut] = [
            (f"preparing: truncated, split {split}", each["truncated"], each["cut_tokens"])
            for split, each in manifest["splits"].items()
        ]
        found += [(f"preparing: dropped, {reason}", count, None) for reason, count in manifest["dropped"].items()]
        found.append(("preparing: rejected", manifest["rejected"], None))
        return [line for line in found if line[1]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [(f"preparing: {path} can't be read", None, None)]


def _some_shards(corpus: Corpus, share: float, why: str) -> tuple[Corpus, str]:
    """Return evenly spaced shards, about `share` of the corpus, and a sentence that says so and gives the reason `why`."""
    total = len(corpus.shards)
    count = max(1, int(total * share))
    chosen = np.linspace(0, total - 1, count).astype(int).tolist()
    some = dataclasses.replace(corpus, shards=tuple(corpus.shards[at] for at in chosen), sources_file=None)
    tokens = sum(shard.num_tokens for shard in some.shards) / corpus.num_tokens
    return some, f"From {count:,} of the {total:,} files, evenly spaced, with {tokens:.1%} of the tokens, {why}."
