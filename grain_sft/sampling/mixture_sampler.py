"""MixtureSampler: which rows of which sources does this host read at step k?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Literal, get_args

import numpy as np

from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture import LeafSource, Mixture, MixtureStream
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream

MixtureLastBatch = Literal["drop", "fill"]
_MOST_ROWS = 1 << 62  # of the stream: row numbers in it are int64


class MixtureSampler(Sampler):
    """Rows of every step of a mixture, as a pure function of (mixture, step, host).

    The mixture is one stream of rows; step k is the next `global_batch_size` of them, and host h of H reads rows h, h + H,
    h + 2H, ... of the step. Rows are numbered through all sources, as `MixtureSource` numbers them. Every source has epochs
    of its own, which roll over in the middle of a step.

    Args:
      mixture: Sources, their orders and weights.
      global_batch_size: Rows of a step, of all hosts together.
      host: This host, and the number of hosts.
      last_batch: For a mixture that ends: "drop" the rows that don't fill a step, or "fill" it with `FILL_ROW`s.
      schedule: Pairs (step, global_batch_size): rows of each step from that step on.
      cache_dir: Folder of exact orders; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: Arguments that don't fit together.
    """

    runs_on = True
    epochs = None
    steps_per_epoch = None

    def __init__(
        self,
        mixture: Mixture,
        *,
        global_batch_size: int,
        host: Host = Host(0, 1),
        last_batch: MixtureLastBatch = "drop",
        schedule: Iterable[tuple[int, int]] = (),
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(global_batch_size, schedule, host, host_blocks=False)
        if last_batch not in get_args(MixtureLastBatch):
            raise SamplerError(
                f"last_batch={last_batch!r}: a mixture takes one of {', '.join(get_args(MixtureLastBatch))}."
            )
        self.mixture, self.last_batch, self.cache_dir = mixture, last_batch, cache_dir
        self.num_instances = mixture.num_instances
        self.stream = MixtureStream(mixture, self.batch_sizes.before, cache_dir)
        if self.num_steps == 0:
            raise SamplerError(
                f"global_batch_size={self.global_batch_size} is more than the {self.stream.length} rows of the mixture. Take a "
                "smaller batch, or last_batch='fill' for evaluation."
            )
        self.streams = tuple(map(self._stream_of, self.stream.leaves))

    def _stream_of(self, leaf: LeafSource) -> EpochStream:
        begin, span = partial(self._begin, leaf), partial(self._span, leaf)
        return EpochStream(leaf.name, leaf.source, leaf.first_row, begin, span, leaf.rows_at)

    @cached_property
    def num_steps(self) -> int | None:
        """Number of steps; None where they never end."""
        length, sizes = self.stream.length, self.batch_sizes
        if length is None:
            return None
        return sizes.step_of(length) if self.last_batch == "drop" else sizes.step_of(length - 1) + 1

    @property
    def most_rows_off(self) -> float | None:
        """Rows that an outermost source may be away from its share, after any number of rows; None where weights change."""
        return self.stream.proportions.bound

    def steps_of_epochs(self, epochs: int | None) -> int:
        if self.num_steps is not None and epochs is None:
            return self.num_steps
        ends = [stream.span((epochs or 1) - 1) for stream in self.streams]
        return max((end.last + 1 for end in ends if end is not None and end.last < sys.maxsize), default=1)

    def _checked_step(self, step: int) -> int:
        step = super()._checked_step(step)
        if self.batch_sizes.before(step + 1) > _MOST_ROWS:
            raise RowIndexError(
                f"step={step}: expected a step below {self.batch_sizes.step_of(_MOST_ROWS)}. A mixture counts its rows up to "
                "2^62. Give a smaller step."
            )
        return step

    def _rows(self, step: int, indices: Ints) -> Ints:
        rows: Ints = self._draw(indices + self.batch_sizes.before(step))[3]
        return rows

    def _draw(self, indices: Ints) -> Ints:
        """Return `MixtureStream.draw` of some indices of the stream; -1 past its end, and `FILL_ROW` in place of rows."""
        length = self.stream.length
        if length is None or not len(indices) or indices.max() < length:
            return self.stream.draw(indices)
        drawn = np.full((4, len(indices)), -1, np.int64)
        drawn[3] = FILL_ROW
        real = np.flatnonzero(indices < length)
        drawn[:, real] = self.stream.draw(indices[real])
        return drawn

    def _begin(self, leaf: LeafSource, step: int) -> tuple[int, int]:
        return divmod(leaf.count(self.batch_sizes.before(step)), leaf.source.num_instances)

    def _span(self, leaf: LeafSource, epoch: int) -> EpochSpan | None:
        size = leaf.source.num_instances
        end = None if self.num_steps is None else self.batch_sizes.before(self.num_steps)
        first, last = (int(row) for row in leaf.find(np.array([epoch * size, epoch * size + size - 1])))
        if first < 0 or (end is not None and first >= end):
            return None
        rows, step = size, self.batch_sizes.step_of(first)
        if end is not None and not 0 <= last < end:  # it is cut off by the end
            last, rows = end - 1, leaf.count(end) - epoch * size
        return EpochSpan(step, self.batch_sizes.step_of(last) if last >= 0 else sys.maxsize, rows)

    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        return BatchSlots(steps[which], slot, host, *self._draw(self.batch_sizes.begins(steps)[0][which] + slot))

    def _find(self, source: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        leaf = self.stream.leaves[source]
        at = leaf.find(indices + epoch * leaf.source.num_instances)
        step = self.batch_sizes.steps_of(at)
        slot = at - self.batch_sizes.begins(step)[0]
        return np.where(at < 0, -1, step), slot, slot % self.host.count

    @property
    def data_key(self) -> str:
        return (
            f"MixtureSampler({self.mixture.data_key}, global_batch_size={self.global_batch_size}, "
            f"last_batch={self.last_batch!r}{self._schedule_text})"
        )
