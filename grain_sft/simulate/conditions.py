"""Assumed speeds of hosts, network and bucket, and the waits of a trainer for its batches."""

import dataclasses
from collections import deque
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.arguments import MOST_AHEAD
from grain_sft.pipeline import PREFETCH, READ_THREADS

# the figures become JSON, which has no infinite numbers, so all numbers have an upper bound
Positive = Annotated[float, msgspec.Meta(gt=0, le=10**12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=10**12)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_AHEAD)]


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Speeds of the hosts, of the network and of the bucket.

    Args:
      step_ms: Milliseconds of a training step, without the wait for its batch.
      latency_ms: Milliseconds from a request to the first byte of its answer.
      request_ms: Milliseconds of processor time for each request. If real processes run, their measured value replaces it.
      cores: Processor cores of each process: 0.25 if 8 processes share 2 cores. A value above 1 counts as 1.
      host_mb: Megabytes per second that one host receives.
      bucket_requests: Requests per second that the bucket answers. Cloud Storage promises 5,000 for a new bucket.
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
        """Return the seconds that the bucket takes to answer `requests` requests of all hosts with `received` bytes."""
        return max(requests / self.bucket_requests, received / (self.bucket_mb * 1e6))

    @property
    def slowdown(self) -> float:
        """Seconds that a process takes for one second of processor time."""
        return max(1.0, 1 / self.cores)


class Waits:
    """Clock of a run. A step begins when every host has its batch.

    The threads of a host make batches in turns. A thread begins the batch of step k as soon as the thread is free and the
    trainer has ended step k - max(prefetch, threads). The bucket answers all requests of a step before those of the next step.

    Attributes:
      now: Seconds since the trainer asked for the first step.
    """

    def __init__(self, conditions: Conditions, hosts: int) -> None:
        ahead = max(conditions.prefetch, conditions.threads)
        self.now = 0.0
        self._step_seconds = conditions.step_ms / 1e3
        # time at which each of the last `ahead` steps ended, the oldest first
        self._ended = deque([0.0] * ahead, maxlen=ahead)
        # for each thread, the time at which it is free, float64 [hosts]; the thread that makes the next batch comes first
        self._free = deque([np.zeros(hosts) for _ in range(conditions.threads)])
        self._answered = 0.0  # time of the bucket's last answer

    def add(self, seconds: npt.NDArray[np.float64], bucket_seconds: float = 0.0) -> float:
        """Move the clock to the end of the next step. Return the seconds for which the trainer waits for this step.

        Args:
          seconds: float64 [hosts], seconds of each host to read its batch, if the bucket answers at once.
          bucket_seconds: Seconds that the bucket takes to answer all hosts.
        """
        may_begin = self._ended[0]
        begun = np.maximum(self._free.popleft(), may_begin)
        self._answered = max(self._answered, may_begin) + bucket_seconds
        ready = np.maximum(begun + seconds, self._answered)
        self._free.append(ready)
        waited = max(0.0, float(ready.max()) - self.now)
        self.now += waited + self._step_seconds
        self._ended.append(self.now)
        return waited
