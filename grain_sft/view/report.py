"""The report of a config: all its figures, ready for JSON. Pictures and the page are made from them alone."""

from __future__ import annotations

from typing import Any

from grain_sft.pipeline import Pipeline
from grain_sft.version import __version__
from grain_sft.view import report_corpus, report_steps
from grain_sft.view.token_text import TokenTexts


def make_report(
    pipeline: Pipeline, texts: TokenTexts, *, name: str = "pipeline", steps: int = 64, throughput: Any = None
) -> dict[str, Any]:
    """Return what a run is made of, in bounded time: steps are a sample, and of a very large corpus the files too. The report
    states so.

    Args:
      pipeline: Pipeline of the config.
      texts: Texts of its tokens.
      name: Name of the pipeline, for the title.
      steps: Number of steps that are sampled, at most.
      throughput: Measured speed, as `grain_sft.bench.report_speed` returns it; None: not measured.

    Returns:
      name, version, receipt, parts, corpus, run; lengths, packing, left_out (see `report_corpus`); sampled (steps, of how
      many), sources, filter (see `report_steps`), throughput.

    Raises:
      CorpusFileError, CorpusError: files cannot be read.
    """
    source, sampler = pipeline.source, pipeline.sampler
    chosen = report_steps.sampled_steps(pipeline, steps)
    return {
        "name": name,
        "version": __version__,
        **pipeline.receipt.as_dict(),
        "corpus": {
            "tokens": source.layout.corpus.num_tokens,
            "shards": len(source.layout.corpus.shards),
            "fingerprint": source.layout.corpus.ends_fingerprint,
        },
        "run": {
            "rows": len(source),
            "sequence_length": source.layout.sequence_length,
            "global_batch_size": sampler.global_batch_size,
            "steps": sampler.num_steps,
            "steps_per_epoch": sampler.steps_per_epoch,
            "epochs": sampler.epochs,
        },
        "lengths": report_corpus.lengths(source.layout),
        "packing": report_corpus.packing(pipeline),
        "left_out": report_corpus.left_out(pipeline),
        "sampled": {
            "steps": len(chosen),
            "of": report_steps.steps_in_all(pipeline),
            "ends": sampler.num_steps is not None,
        },
        "sources": report_steps.sources(pipeline, chosen),
        "filter": report_steps.filtered(pipeline, chosen, texts),
        "throughput": throughput,
    }
