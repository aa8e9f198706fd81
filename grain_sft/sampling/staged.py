"""Sampler of a run with stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import JoinedSizes
from grain_sft.sampling.host import Host
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.streams import BatchSlots
from grain_sft.types import Ints


class StagedSampler(Sampler):
    """Sampler of a run with stages. A stage begins at its sampler's `first_step`, and ends where the next stage begins.

    A row number refers to the layout of its stage. So this sampler has no streams, and `find_slots` raises a `SamplerError`.

    Args:
      stages: Samplers of consecutive stages, in order, for the same host.

    Raises:
      SamplerError: `stages` is empty, or the samplers are for different hosts.
    """

    streams = ()

    def __init__(self, stages: Sequence[Sampler]) -> None:
        self.stages = tuple(stages)
        hosts = list(dict.fromkeys(stage.host for stage in self.stages))
        if len(hosts) != 1:
            found = ", ".join(map(repr, hosts)) or "no sampler"
            raise SamplerError(f"stages: {found}; expected one host. Give samplers of the same host.")
        self._first_steps = [stage.first_step for stage in self.stages]
        # the shift is 0, because the sampler of a stage counts the steps of the whole run
        sizes = JoinedSizes((stage.first_step, stage.batch_sizes, 0) for stage in self.stages)
        super().__init__(sizes, hosts[0])
        self.first_step = self._first_steps[0]
        self.host_blocks = any(stage.host_blocks for stage in self.stages)
        self.consecutive_slots = all(stage.consecutive_slots for stage in self.stages)
        self.num_instances = sum(stage.num_instances for stage in self.stages)
        self.failing_step = min(stage.failing_step for stage in self.stages)

    def at(self, step: int) -> Sampler:
        """Return the sampler of the stage that has `step`. A step outside the run is a `RowIndexError`."""
        return self.stages[bisect_right(self._first_steps, self._checked_step(step)) - 1]

    @property
    def num_steps(self) -> int | None:
        return self.stages[-1].num_steps

    def steps_of_epochs(self, epochs: int | None) -> int:
        """See `Sampler.steps_of_epochs`. The epochs are those of the last stage."""
        return self.stages[-1].steps_of_epochs(epochs)

    def row_length(self, step: int) -> int | None:
        return self.at(step).row_length(step)

    def rows(self, step: int) -> Ints:
        return self.at(step).rows(step)

    def rows_at(self, step: int, places: Ints) -> Ints:
        return self.at(step).rows_at(step, places)

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        self._check_steps(steps)
        parts = []
        for stage, end in zip(self.stages, [*self._first_steps[1:], steps.stop], strict=True):
            steps_of_stage = range(max(steps.start, stage.first_step), min(steps.stop, end))
            if steps_of_stage:
                parts.append(stage.slots(steps_of_stage, hosts=hosts))
        return BatchSlots.joined(parts)

    def find_slots(self, rows: Ints, *, epochs: int | None = None, hosts: Sequence[int] | None = None) -> BatchSlots:
        raise SamplerError("find_slots: each stage has row numbers of its own. Search the sampler of a stage.")

    @property
    def changes(self) -> list[int]:
        """Steps at which a stage begins or the schedule of a stage changes."""
        return sorted({*self._first_steps[1:], *(step for stage in self.stages for step in stage.changes)})

    def with_host(self, host: Host) -> StagedSampler:
        return StagedSampler([stage.with_host(host) for stage in self.stages])

    @property
    def data_key(self) -> str:
        return f"StagedSampler([{', '.join(stage.data_key for stage in self.stages)}])"
