"""Figures of a report about the corpus and its rows: lengths, what rows leave out, and how algorithms would pack it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from grain_sft.corpus import PREPARE, Corpus
from grain_sft.errors import GrainSftError
from grain_sft.layout import ALGORITHMS, Layout, LeftOut, compare_algorithms
from grain_sft.pipeline import Pipeline
from grain_sft.storage import files

MOST_SCANNED = 1 << 28
"""Most tokens that are searched for EOS, where nothing else needs the documents."""
MOST_PACKED = 3_000_000
"""Most documents that are packed to compare algorithms: each takes some seconds."""
MOST_SLOWLY_PACKED = 100_000
"""Most documents for which slow algorithms other than the config's own are tried."""

_PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
_OPTIONS = ("long_documents", "source_group_size", "ties", "max_segments", "boundaries", "bos_token_id", "seed")


def lengths(layout: Layout) -> dict[str, Any]:
    """Return documents by length: counts and tokens by powers of two, and percentiles.

    Returns:
      documents, tokens, mean, longest, longer_than_a_row, percentiles {name: tokens}; bins: first and last length,
      documents and tokens of each; `sampled`, a sentence, where not all files were scanned for documents, else None. Or
      `error`, where documents cannot be found.
    """
    found, notes = [], []
    try:
        for part in layout.parts.values():
            corpus, sampled = _scanned(part)
            found.append(corpus.documents.length)
            notes += [sampled] if sampled else []
    except GrainSftError as error:
        return {"error": str(error)}
    length = np.concatenate(found)
    if not len(length):
        return {"error": "the corpus has no document."}
    bins = np.frexp(np.maximum(length, 1).astype(np.float64))[1]  # of 2^(bin - 1) to 2^bin - 1 tokens; empty ones too
    counts, tokens = np.bincount(bins), np.bincount(bins, weights=length)
    named = zip(_PERCENTILES, np.percentile(length, _PERCENTILES), strict=True)
    return {
        "sampled": " ".join(notes) or None,
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
    """Return a layout's corpus; or as many of its shards as may be scanned for documents, with a sentence that states so."""
    corpus = layout.corpus
    has_documents = "documents" in vars(corpus) or any(shard.boundaries is not None for shard in corpus.shards)
    if has_documents or layout.follows_documents or corpus.num_tokens <= MOST_SCANNED:
        return corpus, None
    return _some_shards(corpus, MOST_SCANNED / corpus.num_tokens, "so that not all tokens are read for their EOS")


def packing(pipeline: Pipeline) -> dict[str, Any]:
    """Return `compare_algorithms` with the config's options: `algorithms`, and `sampled`, a sentence, where not all documents
    are packed; or `error`."""
    layout = pipeline.source.layout
    if "" not in layout.parts:
        why = "Not compared for a mixture, whose sources are packed by themselves: see `grain-sft pack` of each."
        return {"error": why}
    used = None if layout.packing is None else layout.packing.algorithm
    options: dict[str, Any] = {"batch_rows": pipeline.sampler.global_batch_size}
    if layout.packing is not None:
        options |= {name: getattr(layout.packing, name) for name in _OPTIONS}
    try:
        corpus, sampled = _scanned(layout)
        count = len(corpus.documents)
        if count > MOST_PACKED:
            corpus, sampled = _some_shards(corpus, MOST_PACKED / count, f"since there are {count:,} documents")
        many = len(corpus.documents) > MOST_SLOWLY_PACKED
        left = [name for name in ALGORITHMS if many and ALGORITHMS[name].slow and name != used]
        tried = [name for name in ALGORITHMS if name not in left]
        found = list(compare_algorithms(corpus, layout.sequence_length, options, tried))
    except GrainSftError as error:
        return {"error": str(error)}
    why = f"Not tried, since there are more than {MOST_SLOWLY_PACKED:,} documents: `grain-sft pack` tries it."
    found += [{"algorithm": name, "error": why} for name in left]
    return {"sampled": sampled, "used": used, "algorithms": found}


def left_out(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return what no batch of an epoch holds, and padding: lines of `what`, `documents` and `tokens` (None: not counted)."""
    layout = pipeline.source.layout
    found = [
        (f"{name}: {what}" if name else what, documents, tokens)
        for name, part in layout.parts.items()
        for what, documents, tokens in [*part.left_out(), *_of_preparation(part.corpus)]
    ]
    found += _of_sampler(pipeline)
    return [{"what": what, "documents": documents, "tokens": tokens} for what, documents, tokens in found]


def _of_sampler(pipeline: Pipeline) -> list[LeftOut]:
    sampler, length = pipeline.sampler, pipeline.source.layout.sequence_length
    if sampler.steps_per_epoch is None or sampler.batch_sizes.schedule or sampler.runs_on:
        return []  # epochs of each source, or steps of several sizes, do not fit into a line
    rest = len(pipeline.source) - sampler.steps_per_epoch * sampler.global_batch_size
    if not rest:
        return []
    unused, filling = (
        "each epoch, other ones each time, that fill no step",
        "padding, which fill the last step of an epoch",
    )
    what = f"rows of {unused if rest > 0 else filling}"
    return [(f"{abs(rest):,} {what}", None, abs(rest) * length)]


def _of_preparation(corpus: Corpus) -> list[LeftOut]:
    """Return what `grain-sft prepare` cut and left out, by the manifest beside the corpus; nothing without one."""
    path = files.sidecar(corpus.shards[0].path, PREPARE)
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
    """Return shards at equal distances, about `share` of the corpus, and a sentence that states so."""
    total = len(corpus.shards)
    count = max(1, int(total * share))
    chosen = np.linspace(0, total - 1, count).astype(int).tolist()
    some = dataclasses.replace(corpus, shards=tuple(corpus.shards[at] for at in chosen), sources_file=None)
    tokens = sum(shard.num_tokens for shard in some.shards) / corpus.num_tokens
    return some, f"Of {count:,} of the {total:,} files at equal distances, {tokens:.1%} of the tokens, {why}."
