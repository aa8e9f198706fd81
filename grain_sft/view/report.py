"""The numbers of `grain-sft report`."""

import dataclasses
import json
from typing import Any

import numpy as np

from grain_sft.corpus import Corpus, prepare_manifest
from grain_sft.errors import GrainSftError
from grain_sft.layout import FILL_ROW, ROWS_A_DEVICE, Layout, LeftOut, compare_algorithms, over_devices
from grain_sft.pipeline import Pipeline
from grain_sft.provenance import summarize, trace
from grain_sft.storage import files
from grain_sft.version import __version__
from grain_sft.view.rejected_rows import rejected_rows
from grain_sft.view.text import TokenTexts

MOST_TOKENS = 1 << 25
"""Maximum number of tokens of all sampled steps together."""
MOST_SCANNED = 1 << 28
"""If a corpus has more tokens than this, a search for its documents reads only some of its shards, but at least one."""
MOST_PACKED = 3_000_000
"""Maximum number of documents on which packing algorithms are compared. `multipack` takes 2 to 10 s for a million."""

_PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
_PACKING_OPTIONS = ("long_documents", "source_group_size", "ties", "max_segments", "boundaries", "bos_token_id", "seed")


def make_report(pipeline: Pipeline, texts: TokenTexts, *, name: str = "pipeline", steps: int = 64) -> dict[str, Any]:
    """Return the numbers of a run. Only some steps are read, and only some files of a very large corpus.

    Args:
      texts: Texts of the tokens, for examples.
      name: Name of the pipeline, for the title.
      steps: Maximum number of sampled steps.

    Returns:
      Dict of JSON values:
      - name, version, corpus, run, and the receipt with its parts;
      - lengths, packing, attention, left_out: results of the functions of these names;
      - sampled: `steps`, the number of sampled steps; `of`, the number of steps that could be sampled; `ends`, whether the run
        ends;
      - sources: tokens of each source in the sampled steps;
      - filter: rows of the sampled steps that `NgramFilter`s reject;
      - throughput: None; the caller may set it to a result of `grain_sft.bench.config.report_speed`.

    Raises:
      CorpusFileError, CorpusError: Files cannot be read.
    """
    source, sampler = pipeline.source, pipeline.sampler
    layout, corpus = source.layout, source.layout.corpus
    first, end = sampler.first_step, sampler.num_steps
    # of a run that never ends, as many steps as read each row once
    num_steps = sampler.num_instances // sampler.global_batch_size if end is None else end - first
    total = max(1, min(num_steps, sampler.end_of_batches - first))  # number of steps that may be sampled
    count = max(1, min(steps, total, MOST_TOKENS // (sampler.rows_per_host * layout.sequence_length)))
    evenly_spaced = np.unique(np.linspace(0, total - 1, count).astype(np.int64))
    sampled_steps: list[int] = (first + evenly_spaced).tolist()
    return {
        "name": name,
        "version": __version__,
        **pipeline.receipt.as_dict(),
        "corpus": {"tokens": corpus.num_tokens, "shards": len(corpus.shards), "fingerprint": corpus.ends_fingerprint},
        "run": {
            "rows": len(source),
            "sequence_length": layout.sequence_length,
            "rows_of_lengths": dict(zip(layout.row_lengths, layout.row_counts, strict=True)),
            "steps": None if end is None else num_steps,
            "global_batch_size": sampler.global_batch_size,
            "steps_per_epoch": sampler.steps_per_epoch,
            "epochs": sampler.epochs,
        },
        "lengths": lengths(layout),
        "packing": packing(pipeline),
        "attention": attention(pipeline, sampled_steps),
        "left_out": left_out(pipeline),
        "sampled": {"steps": len(sampled_steps), "of": total, "ends": end is not None},
        "sources": _sources(pipeline, sampled_steps),
        "filter": rejected_rows(pipeline, sampled_steps, texts),
        "throughput": None,
    }


def _sources(pipeline: Pipeline, steps: list[int]) -> dict[str, Any]:
    """Return the result of `summarize` for all `steps`, and the tokens of each source in each step."""
    # while these arrays are in use, the traces do not read the files of sources again
    _sources_of_parts = [part.sources for part in pipeline.source.layout.parts.values()]
    traces = [trace(pipeline, range(step, step + 1)) for step in steps]
    columns = summarize(traces)
    counts = [dict(zip(each["source"], each["tokens"], strict=True)) for each in map(summarize, traces)]
    tokens = {name: [counts_of_step.get(name, 0) for counts_of_step in counts] for name in columns["source"]}
    return {"columns": columns, "steps": steps, "tokens": tokens}


def lengths(layout: Layout) -> dict[str, Any]:
    """Return statistics of the lengths of documents in tokens, or only a sentence, `error`, if documents cannot be found.

    `sampled` is a sentence if only some files were scanned for documents, else None.
    """
    try:
        scanned = [_scanned(part) for part in layout.parts.values()]
        length = np.concatenate([corpus.documents.length for corpus, _ in scanned])
    except GrainSftError as error:
        return {"error": str(error)}
    if not len(length):
        return {"error": "the corpus has no document."}
    # bin b has the lengths 2^(b - 1) to 2^b - 1, and length 0 is in bin 1
    bins = np.frexp(np.maximum(length, 1).astype(np.float64))[1]
    counts, tokens = np.bincount(bins), np.bincount(bins, weights=length)
    percentiles = zip(_PERCENTILES, np.percentile(length, _PERCENTILES), strict=True)
    return {
        "sampled": " ".join(sampled for _, sampled in scanned if sampled) or None,
        "documents": len(length),
        "tokens": int(length.sum()),
        "mean": float(length.mean()),
        "longest": int(length.max()),
        "longer_than_a_row": int(np.count_nonzero(length > layout.sequence_length)),
        "percentiles": {f"{percent}%": float(value) for percent, value in percentiles},
        "bins": [
            {"first": 1 << (b - 1), "last": (1 << b) - 1, "documents": int(counts[b]), "tokens": int(tokens[b])}
            for b in range(int(bins.min()), len(counts))
        ],
    }


def _scanned(layout: Layout) -> tuple[Corpus, str | None]:
    """Return (corpus, None). If a search of all shards for documents would take too long, return `_some_shards` instead."""
    corpus = layout.corpus
    is_searched = "documents" in vars(corpus)  # whether the cached property has its value, so that no search is needed
    if is_searched or corpus.has_boundary_files or layout.follows_documents or corpus.num_tokens <= MOST_SCANNED:
        return corpus, None
    return _some_shards(corpus, MOST_SCANNED / corpus.num_tokens, "so that not all files are searched for EOS tokens")


def packing(pipeline: Pipeline) -> dict[str, Any]:
    """Return the results of `compare_algorithms` with the config's options, or only a sentence, `error`, if it can't run.

    `used` is the config's algorithm, or None for a layout without one. `sampled` is a sentence if only some documents were
    packed, else None.
    """
    layout = pipeline.source.layout
    if "" not in layout.parts:
        return {"error": "Not compared for a mixture: its sources are packed separately. Run `grain-sft pack` on each."}
    if layout.of_pairs:
        return {"error": "Preference pairs are not packed: a row holds one pair."}
    options: dict[str, Any] = {"algorithm": None, "batch_rows": pipeline.sampler.global_batch_size}
    if layout.packing is not None:
        options |= {name: getattr(layout.packing, name) for name in ("algorithm", *_PACKING_OPTIONS)}
    try:
        corpus, sampled = _scanned(layout)
        count = len(corpus.documents)
        if count > MOST_PACKED:
            # a sample of all shards, even if `corpus` is a sample already
            share = MOST_PACKED / count * len(corpus.shards) / len(layout.corpus.shards)
            corpus, sampled = _some_shards(layout.corpus, share, f"so that about {MOST_PACKED:,} documents are packed")
        algorithms = list(compare_algorithms(corpus, layout.sequence_length, options))
    except GrainSftError as error:
        return {"error": str(error)}
    return {"sampled": sampled, "used": options["algorithm"], "algorithms": algorithms}


def attention(pipeline: Pipeline, steps: list[int]) -> list[dict[str, Any]]:
    """Return how unevenly the cost of attention is spread over devices.

    The result has an entry for each number of rows a device in `ROWS_A_DEVICE`. If a batch of `steps` has 6 rows, the entry
    for 4 rows a device is left out, because 4 does not divide 6.

    The spread of a step is the highest cost of a device divided by the mean cost of all devices. `mean` and `worst` are the
    mean and the highest spread of the steps. `step` is the step of `worst`.
    """
    layout = pipeline.source.layout
    costs = []
    for step in steps:
        rows = pipeline.sampler.slots(range(step, step + 1)).row
        # a row that only fills a batch costs nothing; the layout is asked for row 0 in its place
        costs.append(np.where(rows == FILL_ROW, 0, layout.row_costs(np.maximum(rows, 0))))
    entries = []
    for count in ROWS_A_DEVICE:
        if any(len(cost) % count for cost in costs):
            continue
        spread = np.array([over_devices(cost[np.newaxis], count)[0] for cost in costs])
        figures = {"mean": float(spread.mean()), "worst": float(spread.max()), "step": steps[int(spread.argmax())]}
        entries.append({"rows_a_device": count, **figures})
    return entries


def left_out(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return what an epoch leaves out, and the padding of its last step: dicts of `what`, `documents` and `tokens`.

    `documents` and `tokens` are None where they are not counted.
    """
    layout = pipeline.source.layout
    entries: list[LeftOut] = []
    for name, part in layout.parts.items():
        for what, documents, tokens in [*part.left_out(), *_left_out_by_prepare(part.corpus)]:
            entries.append((f"{name}: {what}" if name else what, documents, tokens))
    sampler = pipeline.sampler
    steps = sampler.steps_per_epoch  # None if each source of a mixture has epochs of its own
    # Rows without a step are reported only if their number is the same in every epoch. It is not if batch sizes change, or if
    # a step may have rows of two epochs (`runs_on`).
    if steps is not None and not sampler.batch_sizes.schedule and not sampler.runs_on:
        # rows of the layout that no step reads; if below 0, padding rows of the last step
        num_rows = len(pipeline.source) - sampler.batch_sizes.before(steps)
        num_tokens = num_rows * layout.sequence_length
        if layout.row_lengths:  # all steps have the same number of tokens: if rows are shorter, a step has more rows
            num_tokens = layout.statistics["tokens"] - steps * sampler.global_batch_size * layout.sequence_length
        what = "of padding, which fill the last step of an epoch"
        if num_rows > 0:
            what = "that no step of an epoch reads; a shuffled order omits different rows in each epoch"
        if num_rows:
            entries.append((f"{abs(num_rows):,} rows {what}", None, abs(num_tokens)))
    return [{"what": what, "documents": documents, "tokens": tokens} for what, documents, tokens in entries]


def _left_out_by_prepare(corpus: Corpus) -> list[LeftOut]:
    """Return what `grain-sft prepare` cut and left out, from the corpus's prepare.json, if any."""
    path = prepare_manifest(corpus.shards[0].path)
    if path is None:
        return []
    try:
        manifest = json.loads(files.read_bytes(path))
        entries: list[LeftOut] = []
        for split, counts in manifest["splits"].items():
            entries.append((f"preparing: truncated, split {split}", counts["truncated"], counts["cut_tokens"]))
        entries += [(f"preparing: dropped, {reason}", count, None) for reason, count in manifest["dropped"].items()]
        entries.append(("preparing: rejected", manifest["rejected"], None))
        return [entry for entry in entries if entry[1]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [(f"preparing: {path} can't be read", None, None)]


def _some_shards(corpus: Corpus, share: float, why: str) -> tuple[Corpus, str]:
    """Return a corpus of a `share` of the shards, and a sentence about this sample that ends with `why`."""
    total = len(corpus.shards)
    count = max(1, int(total * share))
    numbers = np.linspace(0, total - 1, count).astype(int).tolist()
    some = dataclasses.replace(corpus, shards=tuple(corpus.shards[number] for number in numbers), sources_file=None)
    tokens = sum(shard.num_tokens for shard in some.shards) / corpus.num_tokens
    return some, f"From {count:,} of the {total:,} files, evenly spaced, with {tokens:.1%} of the tokens, {why}."
