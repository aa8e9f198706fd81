"""A pipeline's batches as global `jax.Array`s, on any mesh and sharding.

Row g of a step's global batch stands at index g of the global array, whatever the number of processes, and however mesh and
sharding lay rows and columns over their devices. A process reads the rows that its devices hold a part of, which the
sharding says; it is told no host index. Where devices of several processes hold the same rows (an axis of the mesh that
divides the model, or the sequence), each of these processes reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import data_state, resume_step
from grain_sft.pipeline import Delivery, Pipeline, StepIterator
from grain_sft.pipeline.iterator import checked_step
from grain_sft.pipeline.read_ahead import ReadAhead
from grain_sft.source.npy import Element
from grain_sft.storage import activity

AHEAD = 2  # batches whose transfer to the devices has begun before they are asked for
THREADS = 2

GlobalBatch = dict[str, jax.Array]
"""Global arrays [rows, L] by key, as a pipeline's batch has them."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessRows:
    """What the devices of one process hold of an array [rows, length].

    Attributes:
      shape: of the global array.
      held: int64 [n], rows that they hold a part of, ascending.
      indices: of each device, the part of the array that it holds.
      first: the process that holds row 0; of several, the first.
    """

    shape: tuple[int, int]
    held: npt.NDArray[np.int64]
    indices: dict[Any, tuple[slice, slice]]
    first: int

    @property
    def host(self) -> tuple[int, int] | None:
        """`(index, count)` where the rows are the index-th of count equal blocks of the array; else None."""
        rows, held = self.shape[0], self.held
        if not len(held) or rows % len(held) or held[0] % len(held) or held[-1] - held[0] + 1 != len(held):
            return None
        return int(held[0]) // len(held), rows // len(held)


def process_rows(sharding: Sharding, shape: tuple[int, int], process: int | None = None) -> ProcessRows:
    """What the devices of a process hold of an array of `shape` under `sharding`.

    Args:
      sharding: of the global array.
      shape: [rows, length] of the global array.
      process: which; None means this one.

    Raises:
      PipelineError: the sharding does not divide the array evenly.
    """
    process = jax.process_index() if process is None else process
    try:
        everywhere: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    except ValueError as error:
        raise PipelineError(
            f"{sharding} can't divide batches of {shape[0]} rows of {shape[1]} tokens: {error}. Take a global batch and a "
            "sequence length that are multiples of how often the mesh divides them."
        ) from error
    indices = {
        device: (slice(*rows.indices(shape[0])[:2]), slice(*columns.indices(shape[1])[:2]))
        for device, (rows, columns) in everywhere.items()
        if device.process_index == process
    }
    held = np.zeros(shape[0], np.bool_)
    for rows, _ in indices.values():
        held[rows] = True
    first = min(device.process_index for device, (rows, _) in everywhere.items() if not rows.start)
    return ProcessRows(shape, np.flatnonzero(held), indices, first)


class GlobalBatches(StepIterator[GlobalBatch]):
    """Iterator of a pipeline's batches as global arrays; every process makes one, and takes from it in step.

    The transfer of the next batches to the devices begins before they are asked for, in threads, so that a training step
    hides it. Its state is a step and a receipt (`grain_sft.integrations.checkpoint`), the same on all processes, for any
    number of them. A step that failed is tried again by the next `next`.

    Args:
      pipeline: of `Host(0, 1)`, as `load(config, host=Host(0, 1))` gives it: which rows this process reads comes from
        the sharding.
      sharding: of the arrays [rows, L].
      start_step: of the first batch.
      num_rows: of the global arrays, where that is more than the global batch has: the rows after it are 0, without loss,
        and a process that holds none but these reads nothing. None means as many as the global batch.
      loaders: processes that can read the data, where not all can: they read the batch, and it goes to the others between
        devices (one collective a step). None means all.
      ahead: batches whose transfer begins before they are asked for. 0 makes each when it is asked for.
      threads: that read and transfer ahead.
      allow_other_data: `set_state` takes the state of a run on other data too.
      prepare: called with a step and what this process read of its batch, arrays [n, L]; returns what goes to the
        devices. In threads.

    Raises:
      PipelineError: a pipeline of one host of many, arrays that the sharding can't divide, or no loaders.
      RowIndexError: a start step that is not there.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sharding: Sharding,
        *,
        start_step: int = 0,
        num_rows: int | None = None,
        loaders: Sequence[int] | None = None,
        ahead: int = AHEAD,
        threads: int = THREADS,
        allow_other_data: bool = False,
        prepare: Callable[[int, Element], Element] | None = None,
    ) -> None:
        self._closed = True  # until it is complete
        if pipeline.sampler.host.count != 1:
            raise PipelineError(
                f"the pipeline is that of {pipeline.sampler.host!r}, but which rows a process reads comes from the "
                "sharding here: load it with host=Host(0, 1)."
            )
        self.pipeline, self.sharding = pipeline, sharding
        self._num_rows = None if num_rows is None else as_integer("num_rows", num_rows, 1, PipelineError)
        self._loaders = None if loaders is None else tuple(loaders)
        self._prefetch = as_integer("ahead", ahead, 0, PipelineError)
        self._threads = as_integer("threads", threads, 1, PipelineError)
        self._allow_other_data, self._prepare = allow_other_data, prepare
        self._ways = {rows: self._way_of(rows) for rows in set(pipeline.sampler.batch_sizes.sizes)}
        super().__init__(pipeline, checked_step(pipeline, start_step))

    def _way_of(self, batch_rows: int) -> _Directly | _ByLoaders:
        """How batches of so many rows get to the devices."""
        rows = batch_rows if self._num_rows is None else self._num_rows
        if rows < batch_rows:
            raise PipelineError(f"num_rows={rows}: the global batch alone has {batch_rows} rows.")
        shape = (rows, self.pipeline.source.layout.sequence_length)
        if self._loaders is None:
            return _Directly(self.sharding, shape, batch_rows)
        return _ByLoaders(self.sharding, shape, batch_rows, self._loaders)

    def _way(self, step: int) -> _Directly | _ByLoaders:
        return self._ways[self.pipeline.sampler.batch_sizes.at(step)]

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """Rows of the global batch of `step` that this process reads: int64 [n]."""
        return self._way(step).reads

    def _make(self, step: int) -> GlobalBatch:
        if not self._prefetch:
            batch = self._put(step)
        else:
            self._read_ahead(step)
            assert self._ahead is not None
            slot = self._ahead.get(step)
            if slot.error is not None:
                error = slot.error
                self._stop()  # the next `next` tries this step again
                raise error
            assert slot.value is not None
            batch = slot.value
        return self._way(step).finish(batch)

    def _record(self, step: int, delivery: Delivery) -> None:
        if self.pipeline.audit is not None and self._way(step).writer == jax.process_index():
            self.pipeline.audit.handed_out(self.pipeline, step, delivery)

    def start_prefetch(self) -> None:
        """Begin to read batches and to transfer them."""
        with self._lock:
            step, waiting = self._position
            if not self._closed and self._prefetch and not waiting and step < self._end:
                self._read_ahead(step)

    def _read_ahead(self, step: int) -> None:
        """Have batches from `step` on read and transferred, unless they are."""
        if self._ahead is None:
            this = weakref.proxy(self)  # threads that wait for work keep no iterator that nobody holds
            self._ahead = ReadAhead(
                lambda step: this._put(step),
                start=step,
                end=self._end,
                ahead=self._prefetch,
                threads=self._threads,
                name="grain_sft-global-batches",
            )
        self._ahead.advance(step)

    def _put(self, step: int) -> GlobalBatch:
        """The batch of `step`, on its way to this process's devices."""
        way = self._way(step)
        with activity.making_batch(self.pipeline, step):
            batch = self.pipeline.read(step, way.reads)
        if self.pipeline.first_steps.left:
            self.pipeline.first_steps.check(self.pipeline, step, batch)
        expected = (len(way.reads), self.pipeline.source.layout.sequence_length)
        for key, array in batch.items():
            if array.shape != expected:
                raise PipelineError(
                    f"{key!r} of step {step} is {list(array.shape)}, but rows over many devices are of one shape, "
                    f"{list(expected)} here: take out the transform that cuts columns off ({self.pipeline.transforms!r})."
                )
        if self._prepare is not None:
            batch = self._prepare(step, batch)
        return {key: way.put(array) for key, array in batch.items()}

    def reset(self) -> None:
        """Begin again at step 0."""
        with self._lock:
            self.seek(0)

    def seek(self, step: int) -> None:
        """Go on at `step`.

        Raises:
          RowIndexError: a step that is not there.
        """
        step = checked_step(self.pipeline, step)
        with self._lock:
            if step != self.next_step:
                self._go_to(step)

    def get_state(self) -> dict[str, Any]:
        """The next step and the receipt, JSON-ready: the same on all processes."""
        return data_state(self.pipeline, self.next_step)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on at the step of `state`.

        Raises:
          PipelineError: not a state, or one of a run on other data: the message says what differs.
          RowIndexError: a step that is not there.
        """
        self.seek(resume_step(state, self.pipeline, allow_other_data=self._allow_other_data))

    def __str__(self) -> str:
        return f"GlobalBatches(next_step={self.next_step}, sharding={self.sharding})"


class _Directly:
    """Every process puts what its own devices hold there."""

    def __init__(self, sharding: Sharding, shape: tuple[int, int], batch_rows: int) -> None:
        mine = process_rows(sharding, shape)
        self._sharding, self._shape, self._indices = sharding, shape, mine.indices
        self._held, self.writer = mine.held, mine.first
        self.reads = mine.held[mine.held < batch_rows]

    def put(self, array: npt.NDArray[Any]) -> jax.Array:
        """The global array of what this process read of it, [len(reads), L]."""
        if len(self._held) > len(self.reads):
            filled = np.zeros((len(self._held), *array.shape[1:]), array.dtype)
            filled[: len(array)] = array
            array = filled
        parts = [array[self._mine(rows), columns] for rows, columns in self._indices.values()]
        shards = jax.device_put(parts, list(self._indices))
        return _global_array(self._shape, self._sharding, shards, array.dtype)

    def _mine(self, rows: slice) -> slice:
        """Where the rows of a device stand among those that this process holds: one after the other, as there."""
        first = int(np.searchsorted(self._held, rows.start))
        return slice(first, first + rows.stop - rows.start)

    def finish(self, batch: GlobalBatch) -> GlobalBatch:
        """As it is."""
        return batch


class _ByLoaders:
    """Some processes put the rows, as many on each of their devices; a collective gives every device what it is to hold."""

    def __init__(self, sharding: Sharding, shape: tuple[int, int], batch_rows: int, loaders: Sequence[int]) -> None:
        devices: list[Any] = list(sharding._device_assignment)  # the order that a computation on both shardings needs
        places = [place for place, device in enumerate(devices) if device.process_index in set(loaders)]
        if not places:
            raise PipelineError(f"loaders={list(loaders)}: none of these processes has a device of {sharding}.")
        self.writer = devices[places[0]].process_index
        each = -(-batch_rows // len(places))
        self._shape = (len(devices) * each, shape[1])
        self._sharding = NamedSharding(Mesh(np.array(devices), ("rows",)), PartitionSpec("rows"))  # type: ignore[no-untyped-call]
        me = jax.process_index()
        self._mine = [place for place in places if devices[place].process_index == me]
        self._devices = [device for device in devices if device.process_index == me]
        self._each, self._of_device = each, {devices[place]: number for number, place in enumerate(places)}
        self.reads = np.concatenate(
            [self._rows_of(devices[place], batch_rows) for place in self._mine] or [np.zeros(0, np.int64)]
        )
        order = np.zeros(shape[0], np.int32)  # where each row of the batch stands among those that were put
        for number, place in enumerate(places):
            rows = np.arange(number * each, min(batch_rows, (number + 1) * each))
            order[rows] = place * each + np.arange(len(rows))
        filler = np.arange(shape[0]) >= batch_rows

        @functools.partial(jax.jit, out_shardings=sharding)
        def spread(array: jax.Array) -> jax.Array:
            return jax.numpy.where(filler[:, None], 0, array[order])

        self._spread = spread

    def _rows_of(self, device: Any, batch_rows: int) -> npt.NDArray[np.int64]:
        number = self._of_device[device]
        return np.arange(number * self._each, max(number * self._each, min(batch_rows, (number + 1) * self._each)))

    def put(self, array: npt.NDArray[Any]) -> jax.Array:
        """The array of what all processes read, before it is spread: of those that don't load, zeros."""
        parts, begin = [], 0
        for device in self._devices:
            part = np.zeros((self._each, *array.shape[1:]), array.dtype)
            if device in self._of_device:
                count = min(self._each, len(array) - begin)
                part[:count] = array[begin : begin + count]
                begin += count
            parts.append(part)
        return _global_array(self._shape, self._sharding, jax.device_put(parts, self._devices), array.dtype)

    def finish(self, batch: GlobalBatch) -> GlobalBatch:
        """Spread over all devices. In the thread of the consumer: all processes run their collectives in one order."""
        return {key: self._spread(array) for key, array in batch.items()}


def _global_array(
    shape: tuple[int, int], sharding: Sharding, shards: list[jax.Array], dtype: np.dtype[Any]
) -> jax.Array:
    if shards:
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)  # no device of this process
