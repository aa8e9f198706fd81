"""MixtureSampler: which rows of which sources does this host read at step k?"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.batches import Batches, Ints
from grain_sft.sampling.epochs import EpochSpan
from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture import Leaf, Mixture, Stream

_LAST_BATCH = ("drop", "fill")
_MOST_ROWS = 1 << 62  # of the stream: places in it are int64


class MixtureSampler(Batches):
    """Rows of every step of a mixture, as a pure function of (mixture, step, host).

    The mixture is one stream of rows; step k is the next `global_batch_size` of them, and host h of H reads rows h, h + H,
    h + 2H, ... of the step. Rows are numbered through all sources, as `MixtureSource` numbers them. Every source has epochs
    of its own, which roll over in the middle of a step.

    Args:
      mixture: sources, their orders and weights.
      global_batch_size: rows of all hosts together in a step.
      host: which host this is.
      last_batch: of a mixture that ends: "drop" the rows that don't fill a step, or "fill" it with `FILL_ROW`s.
      schedule: pairs (step, global_batch_size): from that step on, batches have so many rows.
      cache_dir: where exact orders are kept; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: arguments that don't fit together.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        global_batch_size: int,
        host: Host = Host(0, 1),
        last_batch: str = "drop",
        schedule: Iterable[tuple[int, int]] = (),
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(global_batch_size, schedule, host, blocks=False)
        if last_batch not in _LAST_BATCH:
            raise SamplerError(f"last_batch={last_batch!r}: a mixture takes one of {', '.join(_LAST_BATCH)}.")
        self.mixture, self.last_batch, self._cache_dir = mixture, last_batch, cache_dir
        self.num_instances = mixture.num_instances
        folder = None if cache_dir is None else os.fspath(cache_dir)
        self.stream = Stream(mixture, self.batch_sizes.before, folder)
        if self.num_steps == 0:
            raise SamplerError(
                f"global_batch_size={self.global_batch_size} is more than the {self.stream.length} rows of the mixture. Take a "
                "smaller batch, or last_batch='fill' for evaluation."
            )

    @functools.cached_property
    def num_steps(self) -> int | None:  # type: ignore[override]
        """Steps there are in all; None where they never end."""
        length = self.stream.length
        if length is None:
            return None
        return (
            self.batch_sizes.step_of(length) if self.last_batch == "drop" else self.batch_sizes.step_of(length - 1) + 1
        )

    @property
    def most_rows_off(self) -> float | None:
        """Rows that an outermost source may be away from its share, after any number of rows; None where weights change."""
        return self.stream.proportions.bound

    @property
    def leaves(self) -> list[Leaf]:
        """The sources that are no mixtures."""
        return self.stream.leaves

    def _checked_step(self, step: int) -> int:
        step = super()._checked_step(step)
        if self.batch_sizes.before(step + 1) > _MOST_ROWS:
            raise RowIndexError(
                f"step={step}: expected a step below {self.batch_sizes.step_of(_MOST_ROWS)}. A mixture counts its rows up to "
                "2^62. Give a smaller step."
            )
        return step

    def _rows(self, step: int, offsets: Ints) -> Ints:
        places = offsets + self.batch_sizes.before(step)
        length = self.stream.length
        if length is None or not len(places) or places.max() < length:
            return self.stream.draw(places).instance
        rows = np.full(len(places), FILL_ROW, np.int64)
        real = places < length
        rows[real] = self.stream.draw(places[real]).instance
        return rows

    def _row(self, step: int, offset: int) -> int | None:
        place = offset + self.batch_sizes.before(step)
        if self.stream.length is not None and place >= self.stream.length:
            return None
        return int(self.stream.draw(np.array([place], np.int64)).instance[0])

    def place(self, leaf: int, step: int) -> tuple[int, int]:
        """The epoch of a source that its next row is of when `step` begins, and how many rows of it come before."""
        found = self.leaves[leaf]
        return divmod(found.count(self._rows_before(step)), found.rows.num_instances)

    def span(self, leaf: int, epoch: int) -> EpochSpan | None:
        """The steps that read an epoch of a source; None where none does."""
        found = self.leaves[leaf]
        size, end = found.rows.num_instances, None if self.num_steps is None else self._rows_before(self.num_steps)
        first, last = (int(row) for row in found.find(np.array([epoch * size, epoch * size + size - 1])))
        if first < 0 or (end is not None and first >= end):
            return None
        rows, step = size, self.batch_sizes.step_of(first)
        if end is not None and not 0 <= last < end:  # it is cut off by the end
            last, rows = end - 1, found.count(end) - epoch * size
        return EpochSpan(step, self.batch_sizes.step_of(last) if last >= 0 else sys.maxsize, rows)

    def _rows_before(self, step: int) -> int:
        rows = self.batch_sizes.before(step)
        return rows if self.stream.length is None else min(rows, self.stream.length)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "mixture": self.mixture,
            "global_batch_size": self.global_batch_size,
            "host": self.host,
            "last_batch": self.last_batch,
            "schedule": self.batch_sizes.schedule,
            "cache_dir": self._cache_dir,
        }

    @property
    def data_key(self) -> str:
        """What decides the global batches: all but the host."""
        return (
            f"MixtureSampler({self.mixture.data_key}, global_batch_size={self.global_batch_size}, "
            f"last_batch={self.last_batch!r}{self._stated_schedule})"
        )
