"""IndexSampler: which rows does this host read at step k?"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.batches import Batches
from grain_sft.sampling.epochs import EndingEpochs, Epochs, EpochSpan, RunningEpochs
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders_table import WITHOUT_EPOCHS, make_order

LAST_BATCH = ("drop", "fill", "run_on")

Rows = npt.NDArray[np.int64]


class IndexSampler(Batches):
    """Rows of every step, as a pure function of (seed, step, host).

    Host h of H reads rows h, h + H, h + 2H, ... of the global batch, which does not depend on the hosts. An epoch is
    `num_instances // global_batch_size` steps of an order's permutation, and the next epoch has the next; they roll
    over for ever, unless `epochs` ends them. `sampler[i]` gives the same rows one by one, as Grain's samplers do, and
    carries `NoSharding`: rows are divided here, and `grain.DataLoader` must not divide them again.

    Orders:
      shuffle: keyed by seed and epoch, at constant memory and time for any number of rows (its limits are in
        `grain_sft.sampling.orders_table.shuffle`).
      olmo: OLMo-core's, batch by batch. Made once per machine above 2 M rows, and mapped: 4 bytes a row on disk.
      maxtext: MaxText's `olmo_grain` sampler: host h owns the h-th contiguous block of the permutation, and its stream
        runs on across epochs, so a batch may straddle two. The one order that depends on the number of hosts.
      episode: the episode-indexed loader's, `RandomState(seed + epoch).permutation(n)`. With last_batch "run_on" its
        batches straddle epochs as that loader's do.
      openchat: the order in which OpenChat takes documents, `default_rng(seed + epoch).permutation(n)`, one a row. Its
        own batches, several documents a row, are rows of `PackedLayout(algorithm="multipack")` read sequentially.
      random: every row of every batch is drawn among all, with replacement, keyed by seed, step and place in the
        batch. There are no epochs; `epochs` counts draws, as many as there are rows each. The values are ours.
      sequential: as the rows are numbered.

    Args:
      num_instances: rows there are.
      global_batch_size: rows of all hosts together in a step.
      seed: any integer from 0 on.
      order: one of the above.
      host: which host this is.
      shuffle: False reads rows as they are numbered, divided between hosts as `order` does.
      epochs: after so many the sampler ends; None means never.
      last_batch: "drop" the rows that don't fill a step at the end of an epoch; or let the next epoch "run_on" in the
        same step; or, for evaluation, "fill" that step with `FILL_ROW`s, which take no loss. Orders "maxtext" and
        "random" always run on.
      schedule: pairs (step, global_batch_size): from that step on, batches have so many rows. Rows go on where they were,
        so that an epoch still has each row once: it ends where the next batch, of whatever size, is not full ("drop"),
        where no row is left ("fill"), or anywhere ("run_on").
      cache_dir: where exact orders are kept; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: arguments that don't fit together.
    """

    def __init__(
        self,
        num_instances: int,
        *,
        global_batch_size: int,
        seed: int,
        order: str = "shuffle",
        host: Host = Host(0, 1),
        shuffle: bool = True,
        epochs: int | None = None,
        last_batch: str = "drop",
        schedule: Iterable[tuple[int, int]] = (),
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.num_instances = as_integer("num_instances", num_instances, 1, SamplerError)
        self.seed = as_integer("seed", seed, 0, SamplerError)
        self.epochs = None if epochs is None else as_integer("epochs", epochs, 1, SamplerError)
        if last_batch not in LAST_BATCH:
            raise SamplerError(f"last_batch={last_batch!r}: expected one of {', '.join(LAST_BATCH)}.")
        super().__init__(global_batch_size, schedule, host, blocks=order == "maxtext")
        if last_batch == "fill" and order in WITHOUT_EPOCHS:
            raise SamplerError(f"last_batch='fill': order {order!r} runs on across epochs and has no last batch.")
        self.order, self.shuffle = order, bool(shuffle)
        self.last_batch = last_batch
        self._cache_dir = cache_dir
        self._first_place = host.index * (self.num_instances // host.count) if self._blocks else 0
        permutation = make_order(order, self.num_instances, self.seed, cache_dir)
        self._rows_at = permutation if shuffle else make_order("sequential", self.num_instances, self.seed, None)
        self._epochs = self._make_epochs()
        self._check_steps()

    def _make_epochs(self) -> Epochs:
        """Epochs of the stream that this host's rows are taken from."""
        if not self.runs_on:
            return EndingEpochs(self.num_instances, self.batch_sizes, fill=self.last_batch == "fill")
        sizes = self.batch_sizes.shared(self.host.count) if self._blocks else self.batch_sizes
        return RunningEpochs(max(1, self._stream_rows), sizes)

    def _check_steps(self) -> None:
        """Refuse a batch that is never full."""
        rows = f"{self.num_instances} rows there are"
        if self.num_steps == 0 and not self._blocks:
            raise SamplerError(
                f"global_batch_size={self.global_batch_size} is more than the {rows} in epochs={self.epochs}."
            )
        if self._blocks and self._stream_rows * self.host.count < max(self.batch_sizes.sizes):
            raise SamplerError(
                f"global_batch_size={max(self.batch_sizes.sizes)} is more than the {rows}: an epoch has no full step. Take a "
                "smaller batch."
            )

    @property
    def runs_on(self) -> bool:
        """Whether a step may straddle epochs."""
        return self.last_batch == "run_on" or self.order in WITHOUT_EPOCHS

    @property
    def _stream_rows(self) -> int:
        """Rows of an epoch, of the stream that this host's rows are taken from: all hosts', or in "maxtext" its own."""
        return self.num_instances // self.host.count if self._blocks else self.num_instances

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; rounded down where epochs don't end with a step. With a schedule, of the first epoch."""
        return self._epochs.steps_before(1)

    @functools.cached_property
    def rows_per_host_and_epoch(self) -> int:
        """Records of this host in an epoch, filling rows included; rounded down where epochs don't end with a step. With a
        schedule, of the first epoch."""
        if self.runs_on:
            return self.num_instances // self.host.count
        return self._host_sizes.before(self.steps_per_epoch)

    @functools.cached_property
    def num_steps(self) -> int | None:  # type: ignore[override]
        """Steps there are in all; None where they never end. Where steps straddle epochs, only the last epoch has rows
        that are left out, so there may be more than `epochs * steps_per_epoch`."""
        return None if self.epochs is None else self._epochs.steps_before(self.epochs)

    def steps_before(self, epoch: int) -> int:
        """Whole steps in the epochs before `epoch`."""
        return self._epochs.steps_before(as_integer("epoch", epoch, 0, SamplerError))

    def _rows(self, step: int, offsets: Rows) -> Rows:
        epoch, first = self._epochs.begin(step)
        places = offsets + first
        if not len(places) or places.max() < self._stream_rows:
            return self._rows_at(epoch, places + self._first_place if self._blocks else places)
        if self.runs_on:
            return self._straddling(epoch, places)
        rows = np.full(len(places), FILL_ROW, np.int64)
        real = places < self.num_instances
        rows[real] = self._rows_at(epoch, places[real])
        return rows

    def _steps_alike(self, step: int, size: int) -> int:
        count = super()._steps_alike(step, size)
        return count if self.runs_on else min(count, (self.num_instances - self._epochs.begin(step)[1]) // size)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, in which `step` begins."""
        return self._epochs.begin(as_integer("step", step, 0, RowIndexError))[0]

    def place(self, step: int) -> tuple[int, int]:
        """The epoch in which `step` begins, and how many rows of it, of all hosts, come before."""
        epoch, rows = self._epochs.begin(as_integer("step", step, 0, RowIndexError))
        return epoch, rows * self.host.count if self._blocks else rows

    def span(self, epoch: int) -> EpochSpan | None:
        """The steps that read an epoch, and how many rows all hosts read of it; None where the run ends before. In order
        "maxtext" all hosts read as many."""
        span = self._epochs.span(epoch, self.num_steps)
        return span._replace(rows=span.rows * self.host.count) if span is not None and self._blocks else span

    def first_rows(self, epoch: int, count: int) -> Rows:
        """The first rows of an epoch that this host's stream of rows has: all hosts', or in order "maxtext" its own."""
        return self._rows_at(epoch, np.arange(count) + self._first_place)

    def _row(self, step: int, offset: int) -> int | None:
        epoch, place = self._epochs.begin(step)
        place += offset
        if self.runs_on:
            later, place = divmod(place, self._stream_rows)
            epoch, place = epoch + later, place + self._first_place
        return int(self._rows_at(epoch, np.array([place], np.int64))[0]) if place < self.num_instances else None

    def _straddling(self, epoch: int, places: Rows) -> Rows:
        """Rows at places that count on into the epochs after `epoch`."""
        later, places = np.divmod(places, self._stream_rows)
        rows = np.empty(len(places), np.int64)
        for each in range(int(later.min()), int(later.max()) + 1):
            here = later == each
            rows[here] = self._rows_at(epoch + each, places[here] + self._first_place)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {
            "num_instances": self.num_instances,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "order": self.order,
            "host": self.host,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
            "last_batch": self.last_batch,
            "schedule": self.batch_sizes.schedule,
            "cache_dir": self._cache_dir,
        }

    @property
    def data_key(self) -> str:
        """What decides the global batches: all but the host, and the host too in order "maxtext"."""
        hosts = f"host={self.host!r}, " if self.order == "maxtext" else ""
        return (
            f"IndexSampler(num_instances={self.num_instances}, global_batch_size={self.global_batch_size}, "
            f"seed={self.seed}, order={self.order!r}, {hosts}shuffle={self.shuffle}, "
            f"epochs={self.epochs}, last_batch={self.last_batch!r}{self._stated_schedule})"
        )
