"""Conditions: assumed speeds of the hosts, the network and the bucket; and how long a trainer waits under them."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from grain_sft.pipeline import PREFETCH, READ_THREADS

if TYPE_CHECKING:
    from jaxtyping import Float64

Positive = Annotated[float, msgspec.Meta(gt=0, le=10**12)]  # JSON has no infinite numbers
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=10**12)]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Speeds of the hosts, of the network and of the bucket.

    Args:
      step_ms: Milliseconds of a training step without its data.
      latency_ms: Milliseconds from a request to its answer, without the time of the answer's bytes.
      request_ms: Milliseconds of a host's processor for each request. Real processes measure this.
      cores: Processor cores that each process has: 0.25 where 8 processes share 2 cores. More than 1 are as good as 1.
      host_mb: Megabytes per second that one host receives.
      bucket_requests: Requests per second that the bucket answers. 5,000 is what Cloud Storage states for a new bucket.
      bucket_mb: Megabytes per second that the bucket sends to all hosts together.
      threads: Threads of each host that read ahead.
      prefetch: Batches that each host keeps ready.
    """

    step_ms: Positive = 1000.0
    latency_ms: NotNegative = 50.0
    request_ms: NotNegative = 2.0
    cores: Positive = 1.0
    host_mb: Positive = 500.0
    bucket_requests: Positive = 5000.0
    bucket_mb: Positive = 25000.0
    threads: Count = READ_THREADS
    prefetch: Count = PREFETCH

    def bucket_seconds(self, requests: float, received: float) -> float:
        """Return the seconds that the bucket takes for requests of all hosts and the bytes of their answers."""
        return max(requests / self.bucket_requests, received / (self.bucket_mb * 1e6))

    @property
    def slowdown(self) -> float:
        """Seconds in which a process gets a second of a processor core."""
        return max(1.0, 1 / self.cores)


class Waits:
    """Clock of a run on all hosts whose steps begin when every host has its batch.

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
