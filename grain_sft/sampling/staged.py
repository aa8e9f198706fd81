"""StagedSampler: one sampler of all stages of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.sampling.batch_sizes import JoinedSizes
from grain_sft.sampling.host import Host
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.streams import BatchSlots

if TYPE_CHECKING:
    from jaxtyping import Int64


class StagedSampler(Sampler):
    """One sampler of all stages of a run. Each stage has the steps from its `first_step` to that of the next stage.

    A row number refers to the layout of its stage. So only the samplers of stages have `find_slots` and streams.

    Args:
      stages: Samplers of consecutive stages, in order, for the same host.

    Raises:
      SamplerError: The samplers are for different hosts.
    """

    runs_on = True
    epochs = None
    steps_per_epoch = None
    streams = ()

    def __init__(self, stages: Sequence[Sampler]) -> None:
        self.stages = tuple(stages)
        if len(hosts := {each.host: None for each in self.stages}) > 1:
            raise SamplerError(f"stages: {', '.join(map(repr, hosts))}; expected one host. Give it to each sampler.")
        self._firsts = [each.first_step for each in self.stages]
        joined = JoinedSizes((each.first_step, each.batch_sizes, 0) for each in self.stages)
        blocks = any(each.host_blocks for each in self.stages)
        super().__init__(joined, self.stages[0].host, host_blocks=blocks)
        self.first_step = self._firsts[0]
        self.consecutive_slots = all(each.consecutive_slots for each in self.stages)
        self.num_instances = sum(each.num_instances for each in self.stages)

    def at(self, step: int) -> Sampler:
        """Return the sampler of the stage of `step`.

        Raises:
          RowIndexError: No stage has the step.
        """
        return self.stages[bisect_right(self._firsts, self._checked_step(step)) - 1]

    @property
    def num_steps(self) -> int | None:
        return self.stages[-1].num_steps

    def steps_of_epochs(self, epochs: int | None) -> int:
        return self.stages[-1].steps_of_epochs(epochs)

    def row_length(self, step: int) -> int | None:
        return self.at(step).row_length(step)

    def rows(self, step: int) -> Int64[np.ndarray, " rows"]:
        return self.at(step).rows(step)

    def rows_at(self, step: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return self.at(step).rows_at(step, places)

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        parts = []
        for each, end in zip(self.stages, [*self._firsts[1:], steps.stop], strict=True):
            if of_stage := range(max(steps.start, each.first_step), min(steps.stop, end)):
                parts.append(each.slots(of_stage, hosts=hosts))
        return BatchSlots.joined(parts)

    def find_slots(
        self, rows: Int64[np.ndarray, " rows"], *, epochs: int | None = None, hosts: Sequence[int] | None = None
    ) -> BatchSlots:
        raise RowIndexError("find_slots: each stage has row numbers of its own. Search the sampler of a stage.")

    @property
    def changes(self) -> list[int]:
        """Steps at which a stage begins or the schedule of a stage changes."""
        return sorted({*self._firsts[1:], *(step for each in self.stages for step in each.changes)})

    def with_host(self, host: Host) -> StagedSampler:
        return StagedSampler([each.with_host(host) for each in self.stages])

    @property
    def data_key(self) -> str:
        return f"StagedSampler([{', '.join(each.data_key for each in self.stages)}])"
