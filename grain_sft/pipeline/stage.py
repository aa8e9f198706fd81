"""Stage: consecutive steps of a run; and where each stage begins in the streams of rows that stages share."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, SamplerError
from grain_sft.pipeline.amendments import Amendment
from grain_sft.sampling import EpochStream, MappedSampler, Sampler, StepMap
from grain_sft.source import MixtureSource, NpyDataSource

Progress = tuple[int, int, str]
"""Epoch of a stream, number of its tokens that were read, and `EpochStream.batching` of the stage that read them."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Consecutive steps of a run, with a source, a sampler and transforms of their own.

    Args:
      source, sampler, transforms: As in `Pipeline`. The sampler counts steps from the start of the stage.
      steps: Number of steps. The last stage may have neither `steps` nor `tokens`; it then ends with its sampler.
      tokens: Number of tokens, padding included, instead of `steps`; rounded up to whole steps.
      amendments: Amendments of the run, in the document numbers of this stage. An entry is None if the stage does not have
        its documents. By default, those of the run.

    Raises:
      PipelineError: Both `steps` and `tokens` are given, or one is below 1.
    """

    source: NpyDataSource | MixtureSource
    sampler: Sampler
    transforms: Sequence[grain.transforms.Map] = ()
    steps: int | None = None
    tokens: int | None = None
    amendments: Sequence[Amendment | None] | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise PipelineError(f"stage: steps={self.steps} and tokens={self.tokens}. Give one of them.")
        for name in ("steps", "tokens"):
            if getattr(self, name) is not None:
                as_integer(f"stage: {name}", getattr(self, name), 1, PipelineError)

    def amendments_of(self, run: Sequence[Amendment]) -> list[Amendment]:
        """Return this stage's versions of `run`, the first amendments of the run."""
        return list(run if self.amendments is None else filter(None, self.amendments[: len(run)]))

    @property
    def num_steps(self) -> int | None:
        """Number of steps; None for all steps of the sampler."""
        if self.tokens is None:
            return self.steps
        length = self.sampler.row_length(0)
        if length is not None:  # lengths differ, but every step has the same number of tokens
            return -(-self.tokens // (length * self.sampler.batch_sizes.at(0)))
        rows = -(-self.tokens // self.source.layout.sequence_length)
        return self.sampler.batch_sizes.step_of(rows - 1) + 1


def placed(stages: Sequence[Stage], amendments: Sequence[Amendment]) -> tuple[list[MappedSampler], tuple[int, ...]]:
    """Return the sampler of each stage, in steps of the run and with the weights of `amendments`, and the number of tokens
    that each stage leaves out to begin at a whole row."""
    progress: dict[Any, Progress] = {}
    samplers: list[MappedSampler] = []
    gaps = []
    first, changes, applied = 0, _reweights(amendments), set[Amendment]()
    for number, stage in enumerate(stages, 1):
        starts, gap = _starts(stage, number, progress)
        gaps.append(gap)
        inner, steps = stage.sampler.continued(starts) if starts else stage.sampler, stage.num_steps
        if inner.num_steps is not None and steps is not None and inner.num_steps < steps:
            found = f"stage {number} has {steps} steps, but its epochs have only {inner.num_steps} left"
            raise PipelineError(f"{found}. Give it fewer steps, or more epochs.")
        end = None if steps is None else first + steps
        sampler = MappedSampler(inner, origin=first, end=end)
        sources = {stream.name.partition("/")[0] for stream in sampler.streams}
        for step, change in changes:
            if change.reweight.keys() <= sources and (end is None or step < end):
                sampler = sampler.reweighted(step, change.reweight)
                applied.add(change)
        samplers.append(sampler)
        if sampler.num_steps is None:
            if number < len(stages):
                raise PipelineError(f"stage {number} of {len(stages)} never ends. Give it steps, tokens or epochs.")
            break
        first = sampler.num_steps
        progress |= {key: _progress(sampler, stream, length) for key, length, stream in _streams(stage, sampler)}
    for _, change in changes:
        if change not in applied:
            named = f"reweight {', '.join(change.reweight)} from step {change.step}"
            raise SamplerError(f"{named}: no stage from that step on is a mixture of these sources. Fix names or step.")
    return samplers, tuple(gaps)


def _reweights(amendments: Sequence[Amendment]) -> list[tuple[int, Amendment]]:
    """Return the amendments with weights, each with its data step, sorted by step."""
    skips = StepMap([(each.step, each.skip) for each in amendments if each.skip])
    found = ((skips.data_step(each.step), each) for each in amendments if each.reweight)
    return sorted(found, key=lambda pair: pair[0])


def _starts(stage: Stage, number: int, progress: Mapping[Any, Progress]) -> tuple[dict[str, tuple[int, int]], int]:
    """Return where streams of a stage begin, each an epoch and an index, and the number of tokens left out before."""
    starts, gap = {}, 0
    for key, length, stream in _streams(stage, stage.sampler):
        epoch, tokens, batching = progress.get(key, (0, 0, ""))
        if tokens and batching != stream.batching:
            raise PipelineError(
                f"stage {number}: an earlier stage ended inside an epoch of the same rows, in batches of {batching}; this "
                f"stage has batches of {stream.batching}. End that stage with an epoch, or keep its batches."
            )
        index = -(-tokens // length)
        gap += index * length - tokens
        start = (epoch, index) if index < stream.source.num_instances else (epoch + 1, 0)
        if start != (0, 0):
            starts[stream.name] = start
    return starts, gap


def _progress(sampler: MappedSampler, stream: EpochStream, length: int) -> Progress:
    """Return the progress of a stream of rows of `length` tokens after the last step of a stage."""
    end = sampler.end_step
    if sampler.runs_on or stream.batching:
        epoch, index = stream.begin(end)
    else:  # an epoch may end with too few rows for a batch of this stage, and enough for one of the next stage
        epoch, index = stream.begin(end - 1)
        index = min(index + sampler.batch_sizes.at(end - 1), stream.source.num_instances)
    return epoch, index * length, stream.batching


def _streams(stage: Stage, sampler: Sampler) -> Iterator[tuple[Any, int, EpochStream]]:
    """Yield (key, length, stream) of each stream of a stage's `sampler`. Equal keys in two stages mean the same stream.
    `length` is the number of tokens of a row."""
    seen: dict[Any, int] = {}
    for stream in sampler.streams:
        layout, order = stage.source.layout.parts[stream.name], stream.source
        shards = tuple(shard.path for shard in layout.corpus.shards)
        key: Any = shards, layout.stream_key, order.order, order.shuffle, order.seed
        seen[key] = number = seen.get(key, -1) + 1  # a mixture may name a corpus twice
        yield (key, number), layout.sequence_length, stream
