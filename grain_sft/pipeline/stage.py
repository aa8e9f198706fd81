"""Stage: consecutive steps of a run with data of their own. `placed` computes where each stage begins."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from grain_sft.arguments import as_integer, as_objects, check_type
from grain_sft.errors import PipelineError, SamplerError
from grain_sft.pipeline.amendments import Amendment, reweights_of
from grain_sft.pipeline.check_rows import check_rows
from grain_sft.pipeline.receipt import described
from grain_sft.sampling import ORDERS, EpochStream, MappedSampler, Sampler
from grain_sft.source import MixtureSource, NpyDataSource
from grain_sft.transforms import check_maps

Progress = tuple[int, int, str]
"""How far a stream has been read: epoch, number of tokens read in this epoch, and `EpochStream.batching` of the last stage that
read the stream. A stream has the rows of one source, epoch after epoch. `batching` is the text of a rule that cuts its epochs
into batches, or "". A later stage can continue inside the epoch only with the same rule."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Consecutive steps of a run, with a source, a sampler and transforms of their own.

    Args:
      source, sampler, transforms: As in `Pipeline`. The sampler counts steps from the start of the stage.
      steps: Number of steps. A stage with neither `steps` nor `tokens` ends with its sampler.
      tokens: Number of tokens, padding included, in place of `steps`. It is rounded up to whole steps.
      amendments: Amendments of the run, in order. Each `withdraw` lists documents by their numbers in this stage. An item is
        None if the stage has none of the documents that the amendment withdraws. If `amendments` is None, documents have the
        same numbers in all stages.

    Raises:
      PipelineError: Both `steps` and `tokens` are given, one of them is below 1, the sampler is for another number of rows, or
        a transform is not a `Map`.
    """

    source: NpyDataSource | MixtureSource
    sampler: Sampler
    transforms: Sequence[grain.transforms.Map] = ()
    steps: int | None = None
    tokens: int | None = None
    amendments: Sequence[Amendment | None] | None = None
    described: Sequence[str] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_rows(self.source, self.sampler)
        check_maps(self.transforms)
        # describe the transforms now, because calls of `map` may change their attributes
        object.__setattr__(self, "described", tuple(map(described, self.transforms)))
        if self.steps is not None and self.tokens is not None:
            raise PipelineError(f"stage: steps={self.steps} and tokens={self.tokens}. Give one of them.")
        check_type("stage: amendments", self.amendments, Sequence | None, "a list of amendments")
        as_objects("stage: amendments", (item for item in self.amendments or () if item is not None), Amendment)
        for name in ("steps", "tokens"):
            if getattr(self, name) is not None:
                as_integer(f"stage: {name}", getattr(self, name), 1, PipelineError)

    def amendments_of(self, run: Sequence[Amendment]) -> list[Amendment]:
        """Return the amendments `run` with the document numbers of this stage. `run` may be only the first ones of the run."""
        if self.amendments is None:
            return list(run)
        if len(self.amendments) < len(run):
            problem = f"stage: amendments has {len(self.amendments)} items, but the run has {len(run)} amendments"
            raise PipelineError(f"{problem}. Give an item for each: the amendment, or None if it withdraws no document here.")
        return [amendment for amendment in self.amendments[: len(run)] if amendment is not None]

    @property
    def num_steps(self) -> int | None:
        """Number of steps; None if the stage ends with its sampler."""
        if self.tokens is None:
            return self.steps
        length = self.sampler.row_length(0)
        if length is not None:  # only in a curriculum; there, all batches have the same number of tokens
            return -(-self.tokens // (length * self.sampler.batch_sizes.at(0)))
        rows = -(-self.tokens // self.source.layout.sequence_length)
        return self.sampler.batch_sizes.step_of(rows - 1) + 1


def placed(stages: Sequence[Stage], amendments: Sequence[Amendment]) -> tuple[list[MappedSampler], tuple[int, ...]]:
    """Return the sampler of each stage, and the number of tokens that each stage leaves out to begin at a whole row.

    The samplers apply the weights of `amendments`, but not the skips. So the samplers count data steps: with 3
    steps skipped at step 5, step 10 of the run is step 13 of the samplers.
    """
    progress: dict[Any, dict[str, Progress]] = {}  # by the stream's key, as in `_streams`, and the stream's name
    samplers: list[MappedSampler] = []
    gaps = []
    first_step = 0
    reweights = reweights_of(amendments)
    applied = set[Amendment]()
    for number, stage in enumerate(stages, 1):
        starts, gap = _starts(stage, number, progress)
        gaps.append(gap)
        own_sampler = stage.sampler.continued(starts) if starts else stage.sampler
        steps = stage.num_steps
        if own_sampler.num_steps is not None and steps is not None and own_sampler.num_steps < steps:
            problem = f"stage {number} has {steps} steps, but its epochs have only {own_sampler.num_steps} left"
            raise PipelineError(f"{problem}. Give it fewer steps (an amendment `replace` also ends a stage), or more epochs.")
        end = None if steps is None else first_step + steps
        sampler = MappedSampler(own_sampler, origin=first_step, end=end)
        sources = {stream.name.partition("/")[0] for stream in sampler.streams}
        # amendments that begin before the stage ends, and name only its sources
        own = [(step, each) for step, each in reweights if each.reweight.keys() <= sources and (end is None or step < end)]
        if own:
            sampler = sampler.reweighted([(step, amendment.reweight) for step, amendment in own])
        applied.update(amendment for _, amendment in own)
        samplers.append(sampler)
        if sampler.num_steps is None:
            if number < len(stages):
                raise PipelineError(f"stage {number} of {len(stages)} never ends. Give it steps, tokens or epochs.")
            break
        first_step = sampler.num_steps  # a `MappedSampler` counts the steps of the run
        # Put the streams of this stage first, in the order of its sources: `_starts` continues the first one that is left.
        # They are in reverse, because each is put in front of the others.
        for key, length, stream in reversed(list(_streams(stage, sampler))):
            progress[key] = {stream.name: _progress(sampler, stream, length)} | progress.get(key, {})
    for _, amendment in reweights:
        if amendment not in applied:
            change = f"reweight {', '.join(amendment.reweight)} from step {amendment.step}"
            problem = "no stage from that step on is a mixture of these sources"
            raise SamplerError(f"{change}: {problem}. Fix the names or the step.")
    return samplers, tuple(gaps)


def _starts(stage: Stage, number: int, progress: Mapping[Any, dict[str, Progress]]) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the argument `starts` of `Sampler.continued` for stage `number`, and the number of tokens that are left out.

    Tokens are left out if an earlier stage with shorter rows ended inside a row of this stage.

    Two sources of a mixture may have equal keys. So a stream continues the stream of its own name or, if there is none, the
    first that is left. A stream that is continued is removed from `progress`.
    """
    starts, gap = {}, 0
    streams = _streams(stage, stage.sampler)
    # first the streams that find their own name, so that no other stream continues it
    for key, length, stream in sorted(streams, key=lambda each: each[2].name not in progress.get(each[0], {})):
        left = progress.get(key, {})
        name = stream.name if stream.name in left else next(iter(left), "")
        epoch, tokens, batching = left.pop(name, (0, 0, ""))
        if tokens and batching != stream.batching:
            earlier = f"an earlier stage ended inside an epoch of the same rows, in batches of {batching}"
            problem = f"stage {number}: {earlier}; this stage has batches of {stream.batching}"
            raise PipelineError(f"{problem}. End that stage at the end of an epoch, or keep its batches and sequence length.")
        index = -(-tokens // length)
        gap += index * length - tokens
        start = (epoch, index) if index < stream.source.num_instances else (epoch + 1, 0)
        if start != (0, 0):
            starts[stream.name] = start
    return starts, gap


def _progress(sampler: MappedSampler, stream: EpochStream, length: int) -> Progress:
    """Return how far a stage has read `stream` after the last step of `sampler`. The rows of `stream` have `length` tokens."""
    end = sampler.end_step
    # In these orders, an epoch has whole batches. Rows at its end that fill no batch are not read by a later stage, either.
    whole_epochs = ORDERS[stream.source.order].by_cost or (stream.batching and stream.num_blocks == 1)
    if sampler.runs_on or whole_epochs:
        epoch, index = stream.begin(end)
    else:
        # `stream.begin(end)` may be in the next epoch while rows of this epoch are left. The next stage may use these rows in
        # smaller batches.
        epoch, index = stream.begin(end - 1)
        index = min(index + sampler.batch_sizes.at(end - 1), stream.source.num_instances)
    return epoch, index * length, stream.batching


def _streams(stage: Stage, sampler: Sampler) -> Iterator[tuple[Any, int, EpochStream]]:
    """Yield (key, tokens of a row, stream) for each stream of `sampler`, a sampler of `stage`.

    A stage continues a stream of an earlier stage if their keys are equal: the shards, the kind of rows and their order.
    """
    for stream in sampler.streams:
        layout, order = stage.source.layout.parts[stream.name], stream.source
        key = layout.corpus.ranges, layout.stream_key, order.order, order.shuffle, order.seed
        yield key, layout.sequence_length, stream
