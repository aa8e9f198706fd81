"""Waits: time for which a trainer on all hosts waits for batches that threads of each host make ahead."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64

    from grain_sft.simulate.conditions import Conditions


class Waits:
    """Clock of a run whose steps begin when every host has its batch.

    The threads of a host take steps in turn. A thread begins a batch when it is free and fewer batches are ahead of the trainer
    than the larger of `prefetch` and `threads`. The bucket answers the requests of all hosts in the order of the steps, at
    its own speed.

    Attributes:
      now: Seconds since the trainer asked for the first step.
      first: Seconds for which it waited for the first step; -1 before that.
    """

    def __init__(self, conditions: Conditions, hosts: int) -> None:
        ahead = max(conditions.prefetch, conditions.threads)
        self._step_seconds = conditions.step_ms / 1e3
        self._free = deque([np.zeros(hosts) for _ in range(conditions.threads)])
        self._asked = deque([0.0] * ahead, maxlen=ahead)  # when the last `ahead` steps were asked for
        self.now, self.first, self._answered = 0.0, -1.0, 0.0

    def add(self, seconds: Float64[np.ndarray, " hosts"], bucket_seconds: float = 0.0) -> float:
        """Return the seconds of waiting for the next step.

        Args:
          seconds: Seconds of each host for its batch, if the bucket answers at once.
          bucket_seconds: Seconds of the bucket for the batches of all hosts.
        """
        self._answered = max(self._answered, self._asked[0]) + bucket_seconds
        ready = np.maximum(np.maximum(self._free.popleft(), self._asked[0]) + seconds, self._answered)
        self._free.append(ready)
        arrived = max(self.now, float(ready.max()))
        waited, self.now = arrived - self.now, arrived + self._step_seconds
        self._asked.append(self.now)
        if self.first < 0:
            self.first = waited
        return waited
