"""Lanes: what of a run has epochs of its own. One, or of a mixture each source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from grain_sft.layout import Layout
from grain_sft.sampling import Host, IndexSampler, MixtureSampler
from grain_sft.sampling.epochs import EpochSpan

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

_SEED_AHEAD = {"episode": 0, "openchat": 0, "olmo": 1}
"""Orders whose generator is seeded with seed + epoch, and what comes on top; the others hash both."""


class Lane(Protocol):
    """Rows that are read epoch after epoch.

    Attributes:
      name: of the source; None where there is only one.
      layout: that the rows are of.
      num_rows: of an epoch.
    """

    name: str | None
    layout: Layout
    num_rows: int

    def place(self, step: int) -> tuple[int, int]:
        """The epoch in which `step` begins, and rows of it that come before."""
        ...

    def span(self, epoch: int) -> EpochSpan | None:
        """The steps that read an epoch; None where none does."""
        ...

    def first_rows(self, epoch: int, count: int) -> list[int]:
        """At most so many of the first rows of an epoch that is read, as the layout numbers them."""
        ...

    def seed(self, epoch: int) -> int:
        """What the order of an epoch was seeded with."""
        ...


class WholeLane:
    """All rows of a sampler, for all hosts."""

    name: str | None = None

    def __init__(self, pipeline: Pipeline, sampler: IndexSampler) -> None:
        hosts = sampler.host.count if sampler.order == "maxtext" else 1
        # The global batches: of one host that reads all rows; in order "maxtext" the hosts are all like the first.
        self._sampler = IndexSampler(**sampler.__getstate__() | {"host": Host(0, hosts)})
        self.layout = pipeline.source.layout
        self.num_rows = sampler.num_instances
        self.place, self.span = self._sampler.place, self._sampler.span

    def first_rows(self, epoch: int, count: int) -> list[int]:
        span = self._sampler.span(epoch)
        assert span is not None
        rows: list[int] = self._sampler.first_rows(epoch, min(count, span.rows // self._sampler.host.count)).tolist()
        return rows

    def seed(self, epoch: int) -> int:
        return _seed(self._sampler.order, self._sampler.seed, epoch)


class SourceLane:
    """The rows of one source of a mixture."""

    def __init__(self, pipeline: Pipeline, sampler: MixtureSampler, number: int) -> None:
        self._sampler, self._number, self._leaf = sampler, number, sampler.leaves[number]
        self.name: str | None = self._leaf.name
        self.layout = pipeline.source.layout.parts[self._leaf.name]
        self.num_rows = self._leaf.rows.num_instances

    def place(self, step: int) -> tuple[int, int]:
        return self._sampler.place(self._number, step)

    def span(self, epoch: int) -> EpochSpan | None:
        return self._sampler.span(self._number, epoch)

    def first_rows(self, epoch: int, count: int) -> list[int]:
        span = self.span(epoch)
        assert span is not None
        rows: list[int] = self._leaf.order(epoch, np.arange(min(count, span.rows))).tolist()
        return rows

    def seed(self, epoch: int) -> int:
        return _seed(self._leaf.rows.order, self._leaf.rows.seed, epoch)


def lanes_of(pipeline: Pipeline) -> list[Lane]:
    """What of a pipeline has epochs of its own."""
    sampler = pipeline.sampler
    if isinstance(sampler, MixtureSampler):
        return [SourceLane(pipeline, sampler, number) for number in range(len(sampler.leaves))]
    return [WholeLane(pipeline, sampler)]


def _seed(order: str, seed: int, epoch: int) -> int:
    return seed + epoch + _SEED_AHEAD[order] if order in _SEED_AHEAD else seed
