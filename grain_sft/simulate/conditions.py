"""Conditions: assumed speeds of the hosts, the network and the bucket."""

import dataclasses
from typing import Annotated

import msgspec

from grain_sft.pipeline import PREFETCH, READ_THREADS

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
