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
from grain_sft.sampling.orders import make_order

LAST_BATCH = ("drop", "fill")

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
      sequential: as the rows are numbered.

    Args:
      num_instances: rows there are.
      global_batch_size: rows of all hosts together in a step.
      seed: any integer from 0 on.
      order: one of the above.
      host: which host this is.
      shuffle: False reads rows as they are numbered, divided between hosts as `order` does.
      epochs: after so many the sampler ends; None means never.
      last_batch: "drop" the rows that don't fill a step at the end of an epoch; or, for evaluation, "fill" that step
        with `FILL_ROW`s, which take no loss.
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
        if last_batch == "fill" and order == "maxtext":
            raise SamplerError("last_batch='fill': MaxText's order runs on across epochs and has no last batch.")
        self.order, self.host, self.shuffle = order, host, bool(shuffle)
        self.last_batch = last_batch
        self._cache_dir = cache_dir
        self._stripe = host.index + host.count * np.arange(self.rows_per_host)
        self._shard_options = grain.sharding.NoSharding()  # where grain.DataLoader looks for it
        permutation = make_order(order, self.num_instances, self.seed, cache_dir)
        self._rows_at = permutation if shuffle else make_order("sequential", self.num_instances, self.seed, None)
        if not self.rows_per_host_and_epoch // self.rows_per_host:
            raise SamplerError(
                f"global_batch_size={global_batch_size} is more than the {num_instances} rows there are: an epoch has no "
                "full step. Take a smaller batch, or last_batch='fill' for evaluation."
            )

    @functools.cached_property
    def rows_per_host(self) -> int:
        """Rows that this host reads in a step."""
        return self.global_batch_size // self.host.count

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; in order "maxtext" rounded down, as its epochs don't end with a step."""
        return self.rows_per_host_and_epoch // self.rows_per_host

    @functools.cached_property
    def rows_per_host_and_epoch(self) -> int:
        """Records of this host in an epoch, filling rows included."""
        if self.order == "maxtext":
            return self.num_instances // self.host.count
        up = self.global_batch_size - 1 if self.last_batch == "fill" else 0
        return (self.num_instances + up) // self.global_batch_size * self.rows_per_host

    @functools.cached_property
    def num_steps(self) -> int | None:
        """Steps there are in all; None where they never end."""
        return None if self.epochs is None else self.epochs * self.rows_per_host_and_epoch // self.rows_per_host

    def rows(self, step: int) -> Rows:
        """Rows that this host reads at `step` (from 0): int64 [global_batch_size // host.count].

        Raises:
          RowIndexError: a negative step, or one after the last epoch.
        """
        step = as_integer("step", step, 0, RowIndexError)
        if self.num_steps is not None and step >= self.num_steps:
            raise RowIndexError(f"step={step}: expected 0 to {self.num_steps - 1}.")
        if self.order == "maxtext":
            return self._stream(step * self.rows_per_host)
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        places = self._stripe + step_in_epoch * self.global_batch_size
        if (step_in_epoch + 1) * self.global_batch_size <= self.num_instances:
            return self._rows_at(epoch, places)
        rows = np.full(self.rows_per_host, FILL_ROW, np.int64)
        real = places < self.num_instances
        rows[real] = self._rows_at(epoch, places[real])
        return rows

    def epoch(self, step: int) -> int:
        """The epoch, from 0, in which `step` begins."""
        return as_integer("step", step, 0, RowIndexError) * self.rows_per_host // self.rows_per_host_and_epoch

    def __len__(self) -> int:
        """Records of this host: `sys.maxsize` where they never end."""
        return sys.maxsize if self.num_steps is None else self.num_steps * self.rows_per_host

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        """Record `index` of this host, counted over all its steps."""
        index = as_integer("record", index, 0, RowIndexError)
        if index >= len(self):
            raise RowIndexError(f"record={index}: expected 0 to {len(self) - 1}.")
        epoch, record = divmod(index, self.rows_per_host_and_epoch)
        if self.order == "maxtext":
            place = self.host.index * self.rows_per_host_and_epoch + record
        else:
            step, mine = divmod(record, self.rows_per_host)
            place = step * self.global_batch_size + self.host.index + mine * self.host.count
        if place >= self.num_instances:
            return grain.RecordMetadata(index=index, record_key=FillKey(FILL_ROW))
        row = self._rows_at(epoch, np.array([place], np.int64))[0]
        return grain.RecordMetadata(index=index, record_key=int(row))

    def _stream(self, first: int) -> Rows:
        """This host's records from `first` on, a step of them, of a stream that runs on across epochs."""
        rows = np.empty(self.rows_per_host, np.int64)
        done = 0
        while done < len(rows):
            epoch, record = divmod(first + done, self.rows_per_host_and_epoch)
            count = min(len(rows) - done, self.rows_per_host_and_epoch - record)
            place = self.host.index * self.rows_per_host_and_epoch + record
            rows[done : done + count] = self._rows_at(epoch, np.arange(place, place + count))
            done += count
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
