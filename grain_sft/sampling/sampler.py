"""IndexSampler: which rows does this host read at step k?"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, FillKey
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import WITHOUT_EPOCHS, make_order

LAST_BATCH = ("drop", "fill", "run_on")

Rows = npt.NDArray[np.int64]


class IndexSampler:
    """Rows of every step, as a pure function of (seed, step, host): nothing is remembered between calls.

    Host h of H reads rows h, h + H, h + 2H, ... of the global batch, which does not depend on the hosts. An epoch is
    `num_instances // global_batch_size` steps of an order's permutation, and the next epoch has the next; they roll
    over for ever, unless `epochs` ends them. `sampler[i]` gives the same rows one by one, as Grain's samplers do, and
    carries `NoSharding`: rows are divided here, and `grain.DataLoader` must not divide them again.

    Orders:
      shuffle: keyed by seed and epoch, at constant memory and time for any number of rows (its limits are in
        `grain_sft.sampling.orders.shuffle`).
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
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.num_instances = as_integer("num_instances", num_instances, 1, SamplerError)
        self.global_batch_size = as_integer("global_batch_size", global_batch_size, 1, SamplerError)
        self.seed = as_integer("seed", seed, 0, SamplerError)
        self.epochs = None if epochs is None else as_integer("epochs", epochs, 1, SamplerError)
        if not isinstance(host, Host):
            raise SamplerError(f"host={host!r}: expected Host(index, count).")
        if last_batch not in LAST_BATCH:
            raise SamplerError(f"last_batch={last_batch!r}: expected one of {', '.join(LAST_BATCH)}.")
        if global_batch_size % host.count:
            raise SamplerError(
                f"global_batch_size={global_batch_size} can't be divided by {host.count} hosts: "
                f"{global_batch_size % host.count} rows are left over. Take a multiple of {host.count}."
            )
        if last_batch == "fill" and order in WITHOUT_EPOCHS:
            raise SamplerError(f"last_batch='fill': order {order!r} runs on across epochs and has no last batch.")
        self.order, self.host, self.shuffle = order, host, bool(shuffle)
        self.last_batch = last_batch
        self._cache_dir = cache_dir
        blocks = order == "maxtext"  # of the permutation, one a host; else stripes of the step
        counting = np.arange(self.rows_per_host)
        self._offsets = counting if blocks else host.index + host.count * counting  # of this host's rows in a step
        self._first_place = host.index * (self.num_instances // host.count) if blocks else 0
        self._shard_options = grain.sharding.NoSharding()  # where grain.DataLoader looks for it
        permutation = make_order(order, self.num_instances, self.seed, cache_dir)
        self._rows_at = permutation if shuffle else make_order("sequential", self.num_instances, self.seed, None)
        self._check_steps()

    def _check_steps(self) -> None:
        """Refuse a batch that is never full."""
        rows = f"{self.num_instances} rows there are"
        if self.num_steps == 0 and self.runs_on and self.order != "maxtext":
            raise SamplerError(
                f"global_batch_size={self.global_batch_size} is more than the {rows} in epochs={self.epochs}."
            )
        if not self.steps_per_epoch and (not self.runs_on or self.order == "maxtext"):
            raise SamplerError(
                f"global_batch_size={self.global_batch_size} is more than the {rows}: an epoch has no full step. Take a "
                "smaller batch, last_batch='run_on', or last_batch='fill' for evaluation."
            )

    @property
    def runs_on(self) -> bool:
        """Whether a step may straddle epochs."""
        return self.last_batch == "run_on" or self.order in WITHOUT_EPOCHS

    @functools.cached_property
    def rows_per_host(self) -> int:
        """Rows that this host reads in a step."""
        return self.global_batch_size // self.host.count

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; rounded down where epochs don't end with a step."""
        return self.rows_per_host_and_epoch // self.rows_per_host

    @functools.cached_property
    def rows_per_host_and_epoch(self) -> int:
        """Records of this host in an epoch, filling rows included; rounded down where epochs don't end with a step."""
        if self.runs_on:
            return self.num_instances // self.host.count
        up = self.global_batch_size - 1 if self.last_batch == "fill" else 0
        return (self.num_instances + up) // self.global_batch_size * self.rows_per_host

    @functools.cached_property
    def num_steps(self) -> int | None:
        """Steps there are in all; None where they never end. Where steps straddle epochs, only the last epoch has rows
        that are left out, so there may be more than `epochs * steps_per_epoch`."""
        return None if self.epochs is None else self.epochs * self._epoch_size // self._step_size

    @property
    def _epoch_size(self) -> int:
        """Rows of an epoch, of the stream that this host's rows are taken from: all hosts', or in "maxtext" its own."""
        if self.order == "maxtext":
            return self.num_instances // self.host.count
        return self.num_instances if self.runs_on else self.steps_per_epoch * self.global_batch_size

    @property
    def _step_size(self) -> int:
        """Rows of a step, of the same stream."""
        return self.rows_per_host if self.order == "maxtext" else self.global_batch_size

    def rows(self, step: int) -> Rows:
        """Rows that this host reads at `step` (from 0): int64 [global_batch_size // host.count].

        Raises:
          RowIndexError: a negative step, or one after the last epoch.
        """
        step = as_integer("step", step, 0, RowIndexError)
        if self.num_steps is not None and step >= self.num_steps:
            raise RowIndexError(f"step={step}: expected 0 to {self.num_steps - 1}.")
        if self.runs_on:
            return self._straddling(step)
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        places = self._offsets + step_in_epoch * self.global_batch_size
        if (step_in_epoch + 1) * self.global_batch_size <= self.num_instances:
            return self._rows_at(epoch, places)
        rows = np.full(self.rows_per_host, FILL_ROW, np.int64)
        real = places < self.num_instances
        rows[real] = self._rows_at(epoch, places[real])
        return rows

    def epoch(self, step: int) -> int:
        """The epoch, from 0, in which `step` begins."""
        return as_integer("step", step, 0, RowIndexError) * self._step_size // self._epoch_size

    def __len__(self) -> int:
        """Records of this host: `sys.maxsize` where they never end."""
        return sys.maxsize if self.num_steps is None else self.num_steps * self.rows_per_host

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        """Record `index` of this host, counted over all its steps."""
        index = as_integer("record", index, 0, RowIndexError)
        if index >= len(self):
            raise RowIndexError(f"record={index}: expected 0 to {len(self) - 1}.")
        step, mine = divmod(index, self.rows_per_host)
        epoch, place = divmod(step * self._step_size + int(self._offsets[mine]), self._epoch_size)
        place += self._first_place
        if place >= self.num_instances:
            return grain.RecordMetadata(index=index, record_key=FillKey(FILL_ROW))
        row = self._rows_at(epoch, np.array([place], np.int64))[0]
        return grain.RecordMetadata(index=index, record_key=int(row))

    def _straddling(self, step: int) -> Rows:
        """This host's rows of a step that may straddle epochs."""
        epoch, first = divmod(step * self._step_size, self._epoch_size)
        later, places = np.divmod(first + self._offsets, self._epoch_size)
        rows = np.empty(self.rows_per_host, np.int64)
        for each in range(int(later[0]), int(later[-1]) + 1):
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
            "cache_dir": self._cache_dir,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def data_key(self) -> str:
        """What decides the global batches: all but the host, and the host too in order "maxtext"."""
        hosts = f"host={self.host!r}, " if self.order == "maxtext" else ""
        return (
            f"IndexSampler(num_instances={self.num_instances}, global_batch_size={self.global_batch_size}, "
            f"seed={self.seed}, order={self.order!r}, {hosts}shuffle={self.shuffle}, "
            f"epochs={self.epochs}, last_batch={self.last_batch!r})"
        )

    def __repr__(self) -> str:
        """What decides this host's rows and nothing else: Grain compares this when it restores an iterator."""
        return f"{self.data_key}[{self.host!r}]"
