"""`StagedPipeline`, a run of consecutive stages with different sequence lengths, batch sizes, mixtures or layouts."""

import dataclasses
import functools
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Self

from grain_sft.arguments import as_objects
from grain_sft.errors import PipelineError
from grain_sft.html_table import html_facts
from grain_sft.layout import RunDocuments
from grain_sft.pipeline.amendments import Amendment, skips_of
from grain_sft.pipeline.pipeline import Pipeline
from grain_sft.pipeline.receipt import Receipt, amendment_parts, data_key_of, parts_of
from grain_sft.pipeline.run import Observer
from grain_sft.pipeline.stage import Stage, placed
from grain_sft.sampling import Host, StagedSampler, StepMap
from grain_sft.source import Element
from grain_sft.types import Ints


class StagedPipeline(Pipeline):
    """Pipeline of a run in stages. The shapes of batches may change where a stage begins.

    A stream of rows is a corpus with its layout, order and seed. A stage begins each stream at the first row that the earlier
    stages did not read. `WindowLayout`s with the same `max_target_sequence_length` share one stream, whatever their sequence
    lengths. Example: a stage has read 3 rows of 4 tokens, tokens 0 to 11. The next stage has rows of 8 tokens. It begins at
    its row 2, which is token 16, and leaves out 4 tokens. In each stage, the shares of a mixture's sources are counted from the
    stage's first row.

    Args:
      stages: Stages in order.
      audit, observers: As in `Pipeline`.
      amendments: Changes of the run. `Amendment.step` counts from the start of the run. Skipped steps make later stages begin
        earlier.

    Attributes:
      stages: `Pipeline` of each stage. A stage is left out if all its steps are skipped.
      gaps: Number of tokens that each stage leaves out to begin at a whole row.

    Raises:
      PipelineError: There are no stages, a stage before the last has no end, or a stage has more steps than its epochs have
        left.
      RowIndexError, SamplerError: As in `Pipeline`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        audit: str | os.PathLike[str] | None = None,
        observers: Sequence[Observer] = (),
        amendments: Sequence[Amendment] = (),
    ) -> None:
        # "planned" means without amendments
        self._planned_stages = as_objects("stages", stages, Stage)
        self.amendments = as_objects("amendments", amendments, Amendment)
        if not self._planned_stages:
            raise PipelineError("stages: none; expected one or more. Give a stage.")
        self._planned_samplers, self.gaps = placed(self._planned_stages, ())
        # `samplers` apply the weights of the amendments. Each `Pipeline` below applies the skips.
        samplers, _ = placed(self._planned_stages, self.amendments)
        # maps steps to data steps, which count the skipped steps too, and back
        self._skips = StepMap(skips_of(self.amendments))
        pipelines = []
        for stage, sampler in zip(self._planned_stages, samplers, strict=True):
            first_step = self._skips.step_of(sampler.first_step)
            if sampler.num_steps is not None and first_step >= self._skips.step_of(sampler.num_steps):
                continue  # all steps of the stage are skipped
            # the sampler has the weights, and `replace` is only a text, so amendments with nothing else are left out
            changes = (each for each in stage.amendments_of(self.amendments) if each.skip or len(each.withdraw))
            own_amendments = [dataclasses.replace(each, reweight={}) for each in changes]
            pipelines.append(Pipeline(stage.source, sampler, stage.transforms, amendments=own_amendments))
        if not pipelines:
            raise PipelineError(f"skip: all {samplers[-1].num_steps} steps are skipped. Skip fewer.")
        self._stages = tuple(pipelines)
        self._first_steps = [stage.first_step for stage in self._stages]
        self.planned_sampler = StagedSampler(self._planned_samplers)
        self.sampler: StagedSampler = StagedSampler([stage.sampler for stage in self._stages])
        self._begin(audit, observers)

    @property
    def stages(self) -> tuple[Pipeline, ...]:
        return self._stages

    @property
    def documents(self) -> RunDocuments:
        return RunDocuments([stage.source.layout for stage in self._planned_stages])

    def at(self, step: int) -> Pipeline:
        return self._stages[max(0, bisect_right(self._first_steps, step) - 1)]

    def read(self, step: int, slots: Ints, *, columns: tuple[int, int] | None = None) -> Element:
        self.sampler.at(step)  # for a step outside the run, the error names the steps of all stages
        return self.at(step).read(step, slots, columns=columns)

    def replace(self, *, host: Host | None = None, num_amendments: int | None = None) -> Self:
        stages = self._planned_stages
        if host is not None:
            stages = tuple(dataclasses.replace(stage, sampler=stage.sampler.with_host(host)) for stage in stages)
        return type(self)(stages, amendments=self.amendments[:num_amendments])

    def with_first_stages(self, count: int, last_step: int) -> list[Pipeline]:
        """Return possible versions of this run from a time when its config had only the first `count` stages.

        An audit log does not record where stage `count` then ended. So in one version it has no end, and in one its present
        end. If it begins at `last_step` or earlier, it ends directly after `last_step` in a third version. With `count` 1, the
        first item is a pipeline without stages.

        Args:
          count: Number of stages.
          last_step: Highest step that the audit log states for that time; -1 if it states none.
        """
        *before, last = self._planned_stages[:count]
        steps = self._skips.data_step(last_step) + 1 - self._planned_samplers[count - 1].first_step
        last_stages = [dataclasses.replace(last, steps=None, tokens=None), last]
        if steps > 0:
            last_stages.append(dataclasses.replace(last, steps=steps, tokens=None))
        runs: list[Pipeline] = []
        if not before:
            runs.append(Pipeline(last.source, last.sampler, last.transforms, amendments=last.amendments_of(self.amendments)))
        runs += [type(self)([*before, stage], amendments=self.amendments) for stage in last_stages]
        return runs

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "transforms", "withdrawals"):
            raise PipelineError(f"{name}: each stage of a run has its own. Take pipeline.at(step).{name}.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def data_key(self) -> str:
        """The `data_key` of a run that has only the first stage."""
        first = self._planned_stages[0]
        return data_key_of(first.source, first.sampler, first.described)

    @property
    def later_stages(self) -> list[str]:
        """The first step and the `data_key` of each stage after the first, as texts."""
        texts = []
        for stage, sampler in zip(self._planned_stages[1:], self._planned_samplers[1:], strict=True):
            # `sampler.sampler` is the stage's sampler, continued after the earlier stages, with steps from 0
            step = self._skips.step_of(sampler.first_step)
            # after skipped steps, the trainer's step alone does not state which batches of the stage are read
            data_step = f"data step {sampler.first_step}: " if step < sampler.first_step else ""
            texts.append(f"from step {step}: {data_step}{data_key_of(stage.source, sampler.sampler, stage.described)}")
        return texts

    @functools.cached_property
    def receipt(self) -> Receipt:
        """Receipt of the global batches: parts of the first stage, then of each later stage, with its first data step."""
        first, *later = self._planned_stages
        parts = parts_of(first.source, first.sampler, first.described)
        for number, (stage, sampler) in enumerate(zip(later, self._planned_samplers[1:], strict=True), 2):
            own_parts = parts_of(stage.source, sampler.sampler, stage.described)
            since = f"from step {sampler.first_step}: "
            parts[f"stage {number}"] = since + Receipt(own_parts).code
            parts |= {f"stage {number}: {name}": since + part for name, part in own_parts.items()}
        for number, stage in enumerate(self._planned_stages, 1):
            own_parts = amendment_parts(stage.amendments_of(self.amendments))
            # They differ if a withdrawn document has another number in this stage, or none.
            if own_parts != amendment_parts(self.amendments):
                parts |= {f"stage {number}: {name}": part for name, part in own_parts.items()}
        return Receipt(parts | amendment_parts(self.amendments), self._skips.data_step)

    def _repr_html_(self) -> str:
        facts: dict[str, Any] = {}
        for stage in self._stages:
            last = "no end" if stage.num_steps is None else stage.num_steps - 1
            rows, length = stage.sampler.batch_sizes.at(stage.first_step), stage.source.layout.sequence_length
            facts[f"steps {stage.first_step} to {last}"] = f"{rows:,} rows of {length:,} tokens"
        return html_facts("Pipeline", facts)

    def __repr__(self) -> str:
        return f"StagedPipeline([{', '.join(map(repr, self._stages))}])"
