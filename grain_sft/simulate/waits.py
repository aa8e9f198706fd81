"""Waits: how long a trainer on all hosts waits for batches that threads of each host make ahead."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64

    from grain_sft.simulate.conditions import Conditions


class Waits:
    """Clock of a run whose steps begin when every host has its batch.

    A host's threads take steps in turn. A step is begun when a thread is free and less than `prefetch` batches are ahead of the
    trainer, as in `grain_sft.pipeline.ReadAhead`.

    Attributes:
      now: Seconds since the first step was asked for.
      first: Seconds that the first step was waited for.
    """

    def __init__(self, conditions: Conditions, hosts: int) -> None:
        ahead = max(conditions.prefetch, conditions.threads)
        self._step_seconds = conditions.step_ms / 1e3
        self._free = deque([np.zeros(hosts) for _ in range(conditions.threads)])
        self._asked = deque([0.0] * ahead, maxlen=ahead)  # when the last `ahead` steps were asked for
        self.now, self.first = 0.0, -1.0

    def add(self, seconds: Float64[np.ndarray, " hosts"]) -> float:
        """Return the seconds that the next step is waited for, if its batch takes each host some `seconds`."""
        ready = np.maximum(self._free.popleft(), self._asked[0]) + seconds
        self._free.append(ready)
        arrived = max(self.now, float(ready.max()))
        waited, self.now = arrived - self.now, arrived + self._step_seconds
        self._asked.append(self.now)
        if self.first < 0:
            self.first = waited
        return waited
