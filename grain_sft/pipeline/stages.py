"""StagedPipeline: consecutive parts of a run, each with its own sequence length, batch size, mixture or layout."""

from __future__ import annotations

import dataclasses
import functools
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.layout import RunDocuments
from grain_sft.pipeline.amendments import Amendment
from grain_sft.pipeline.observer import Observer
from grain_sft.pipeline.pipeline import Pipeline
from grain_sft.pipeline.receipt import Receipt, amendment_parts, data_key_of, parts_of
from grain_sft.pipeline.stage import Stage, placed
from grain_sft.sampling import Host, StagedSampler, StepMap
from grain_sft.source import Element, RowSource

if TYPE_CHECKING:
    from jaxtyping import Int64


class StagedPipeline(Pipeline):
    """Batches by step of consecutive stages. Shapes change only where a stage begins.

    A stream of rows is a corpus with its layout, order and seed. A stage continues each stream at the first row that the
    earlier stages did not read. `WindowLayout`s with the same `max_target_sequence_length` share one stream, whatever their
    sequence lengths. Where a stage with longer rows would begin inside a row, it begins at the next row, and `gaps` counts
    the tokens between. The shares of a mixture start anew in each stage.

    Args:
      stages: Stages in order.
      audit, observers, amendments: As in `Pipeline`. Their steps are those of the run. Skipped steps make later stages begin
        earlier.

    Attributes:
      stages: `Pipeline` of each stage, from `first_step` to `end_step` of the run. A stage whose steps are all skipped has
        none.
      gaps: For each stage, the number of tokens that lie in its streams between the earlier stages' last row and its first row.

    Raises:
      PipelineError: There are no stages, a stage before the last has no end, or a stage has more steps than its epochs.
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
        self._stated, self.amendments = tuple(stages), tuple(amendments)
        if not self._stated:
            raise PipelineError("stages: none; expected one or more. Give a stage.")
        self._planned, self.gaps = placed(self._stated, ())
        reweighted = any(each.reweight for each in self.amendments)
        samplers = placed(self._stated, self.amendments)[0] if reweighted else self._planned
        self._skips = skips = StepMap([(each.step, each.skip) for each in self.amendments if each.skip])
        self._stages = tuple(
            Pipeline(
                stage.source, sampler, stage.transforms, amendments=_unweighted(stage.amendments_of(self.amendments))
            )
            for stage, sampler in zip(self._stated, samplers, strict=True)
            if sampler.num_steps is None or skips.step_of(sampler.first_step) < skips.step_of(sampler.num_steps)
        )
        if not self._stages:
            raise PipelineError(f"skip: all {samplers[-1].num_steps} steps are skipped. Skip fewer.")
        self._firsts = [each.first_step for each in self._stages]
        self.planned_sampler = StagedSampler(self._planned)
        self.sampler = StagedSampler([each.sampler for each in self._stages])
        self._observe(audit, observers)

    @property
    def stages(self) -> tuple[Pipeline, ...]:
        return self._stages

    @property
    def documents(self) -> RunDocuments:
        return RunDocuments([each.source.layout for each in self._stated])

    def at(self, step: int) -> Pipeline:
        return self._stages[max(0, bisect_right(self._firsts, step) - 1)]

    def __getitem__(self, step: int) -> Element:
        return self.at(as_integer("step", step, 0, RowIndexError))[step]

    def read(self, step: int, slots: Int64[np.ndarray, " slots"], *, columns: tuple[int, int] | None = None) -> Element:
        return self.at(step).read(step, slots, columns=columns)

    @property
    def reads_columns(self) -> bool:
        return all(each.reads_columns for each in self._stages)

    def source_at(self, step: int) -> RowSource:
        return self.at(step).source_at(step)

    def replace(self, *, host: Host | None = None, num_amendments: int | None = None) -> Self:
        stages = self._stated
        if host is not None:
            stages = tuple(dataclasses.replace(each, sampler=each.sampler.with_host(host)) for each in stages)
        return type(self)(stages, amendments=self.amendments[:num_amendments])

    def with_first_stages(self, count: int, last_step: int) -> list[Pipeline]:
        """Return the runs that may have become this one when more stages were added to their `count`.

        Their last stage has no end, or its present end, or ended with `last_step`. With `count` 1, a run without stages comes
        first.
        """
        *before, last = self._stated[:count]
        steps = self._skips.data_step(last_step) + 1 - self._planned[count - 1].first_step
        ends: list[dict[str, Any]] = [{"steps": None, "tokens": None}, {}]
        ends += [{"steps": steps, "tokens": None}] if steps > 0 else []
        runs = ([*before, dataclasses.replace(last, **end)] for end in ends)
        found: list[Pipeline] = [type(self)(stages, amendments=self.amendments) for stages in runs]
        if not before:
            amendments = last.amendments_of(self.amendments)
            found.insert(0, Pipeline(last.source, last.sampler, last.transforms, amendments=amendments))
        return found

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "transforms", "withdrawals"):
            raise PipelineError(f"{name}: each stage of a run has its own. Take pipeline.at(step).{name}.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def data_key(self) -> str:
        """The `data_key` of a run of the first stage alone."""
        first = self._stated[0]
        return data_key_of(first.source, first.sampler, first.transforms)

    @property
    def later_stages(self) -> list[str]:
        return [
            f"from step {sampler.first_step}: {data_key_of(stage.source, sampler.sampler, stage.transforms)}"
            for stage, sampler in zip(self._stated[1:], self._planned[1:], strict=True)
        ]

    @functools.cached_property
    def receipt(self) -> Receipt:
        """Receipt of the global batches: the parts of a run of the first stage alone, then those of later stages, each with
        the stage's first step."""
        first, *later = self._stated
        parts = parts_of(first.source, first.sampler, first.transforms)
        for number, (stage, sampler) in enumerate(zip(later, self._planned[1:], strict=True), 2):
            since, own = f"from step {sampler.first_step}: ", parts_of(stage.source, sampler.sampler, stage.transforms)
            parts[f"stage {number}"] = since + Receipt(own).code
            parts |= {f"stage {number}: {name}": since + part for name, part in own.items()}
        for number, stage in enumerate(self._stated, 1):
            own = amendment_parts(stage.amendments_of(self.amendments))
            if own != amendment_parts(self.amendments):  # a document has another number in this stage, or none
                parts |= {f"stage {number}: {name}": part for name, part in own.items()}
        return Receipt(parts | amendment_parts(self.amendments))

    def _repr_html_(self) -> str:
        facts: dict[str, Any] = {}
        for each in self._stages:
            last = "no end" if each.num_steps is None else each.num_steps - 1
            rows, length = each.sampler.batch_sizes.at(each.first_step), each.source.layout.sequence_length
            facts[f"steps {each.first_step} to {last}"] = f"{rows:,} rows of {length:,} tokens"
        return html_facts("Pipeline", facts)

    def __repr__(self) -> str:
        return f"StagedPipeline([{', '.join(map(repr, self._stages))}])"


def _unweighted(amendments: Sequence[Amendment]) -> list[Amendment]:
    """Return the amendments without their weights; those that neither skip nor withdraw are left out."""
    return [dataclasses.replace(each, reweight={}) for each in amendments if each.skip or len(each.withdraw)]
