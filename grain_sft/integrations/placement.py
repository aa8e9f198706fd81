"""Placement: which rows of a global batch this process reads, and how they get to the devices."""

import abc
import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from grain_sft.deprecated import renamed_attribute
from grain_sft.errors import PipelineError
from grain_sft.integrations.context_order import Columns, ContextOrder
from grain_sft.types import Array, Bools, Ints

Index = tuple[slice, ...]  # part of a global array, as JAX states it: a slice of rows and a slice of columns
Shape = tuple[int, int]  # shape [rows, L] of a global array
GlobalBatch = dict[str, jax.Array]
"""Global arrays [rows, L] by key, as in a pipeline's batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessRows:
    """Part of a global array [rows, length] that is on the devices of one process.

    Attributes:
      shape: Shape of the global array.
      rows: int64 [n], ascending indices of the rows that are on the devices, at least in part.
      indices: Rows and columns of the array on each device of the process.
      first: Lowest index of a process whose devices have row 0.
    """

    shape: Shape
    rows: Ints
    indices: dict[Any, tuple[slice, slice]]
    first: int

    @property
    def host(self) -> tuple[int, int] | None:
        """`(index, count)` if the rows are block `index` of `count` equal blocks of the array; else None."""
        total, rows = self.shape[0], self.rows
        if not len(rows) or total % len(rows) or rows[0] % len(rows) or rows[-1] - rows[0] + 1 != len(rows):
            return None
        return int(rows[0]) // len(rows), total // len(rows)

    held = renamed_attribute("ProcessRows.held", "rows")


def process_rows(sharding: Sharding, shape: Shape, process: int | None = None) -> ProcessRows:
    """Return the part of a global array that is on the devices of a process.

    Args:
      sharding, shape: Sharding and shape [rows, length] of the global array.
      process: Index of the process; None means this process.

    Raises:
      PipelineError: The sharding does not divide the array evenly.
    """
    process = jax.process_index() if process is None else process
    parts = _parts(sharding, shape)
    indices = {device: part for device, part in parts.items() if device.process_index == process}
    mine = np.zeros(shape[0], np.bool_)
    for rows, _ in indices.values():
        mine[rows] = True
    first = min(device.process_index for device, (rows, _) in parts.items() if rows.start == 0)
    return ProcessRows(shape, np.flatnonzero(mine), indices, first)


def _parts(sharding: Sharding, shape: Shape) -> dict[Any, tuple[slice, slice]]:
    """Return the slices (rows, columns) of an array that each device has, in the order of the sharding's devices."""
    parts = {}
    try:
        for device, (rows, columns) in sharding.devices_indices_map(shape).items():
            parts[device] = slice(*rows.indices(shape[0])[:2]), slice(*columns.indices(shape[1])[:2])
        return parts
    except ValueError as error:
        found = f"{sharding} can't divide batches of {shape[0]} rows of {shape[1]} tokens: {error}."
        fix = "Make the global batch size and the sequence length multiples of the numbers of devices that divide them."
        raise PipelineError(f"{found} {fix}") from error


class Block(NamedTuple):
    """Rows and columns of the global batch that a process reads with one call of `Pipeline.read`.

    Attributes:
      rows: int64 [n], slots of the global batch, ascending.
      columns: First column, and the column after the last; None for all columns.
    """

    rows: Ints
    columns: Columns | None


class Placement(abc.ABC):
    """Transfer of global batches of one shape to the devices."""

    reads: Ints  # [n], slots of the global batch; this process reads all or some of their columns
    blocks: list[Block]  # what this process reads
    writer: int  # index of the process that writes the files of observers for all processes
    shape: Shape  # shape of the arrays that `put` returns
    sharding: Sharding  # sharding of these arrays

    @abc.abstractmethod
    def part(self, arrays: Sequence[Array], index: Index) -> Array:
        """Return the part at `index` (slices of rows and columns) of the array that `put` makes of `arrays`."""

    def put(self, arrays: Sequence[Array]) -> jax.Array:
        """Return a global array of `self.shape`. `arrays` has one array for each of `blocks`. Any thread may call this."""
        part = functools.partial(self.part, arrays)
        # only a process without devices needs `dtype`, which earlier versions of JAX lack
        options = {} if self.sharding.addressable_devices else {"dtype": arrays[0].dtype}
        return jax.make_array_from_callback(self.shape, self.sharding, part, **options)

    def finish(self, array: jax.Array) -> jax.Array:
        """Return what the trainer gets for a result of `put`. Only the trainer's thread calls this."""
        return array


class DirectPlacement(Placement):
    """Placement in which every process reads the rows of its own devices. Rows of the array after `batch_rows` are zeros.

    With `divides`, a process reads only the columns of its devices.
    """

    def __init__(self, sharding: Sharding, shape: Shape, batch_rows: int, order: ContextOrder, divides: bool) -> None:
        mine = process_rows(sharding, shape)
        self.sharding, self.shape, self.writer, self._order = sharding, shape, mine.first, order
        self.reads = mine.rows[mine.rows < batch_rows]
        self.blocks = _blocks(mine, batch_rows, order) if divides else [Block(self.reads, None)]
        self._begins = [block.columns[0] if block.columns else 0 for block in self.blocks]  # first column of each block

    def part(self, arrays: Sequence[Array], index: Index) -> Array:
        """See `Placement.part`. Each range of columns that `ContextOrder.sources` returns is inside one of `blocks`."""
        first_row, end_row, _ = index[0].indices(self.shape[0])
        num_rows = end_row - first_row
        first_column, end_column, _ = index[1].indices(self.shape[1])
        parts = []
        for first, end in self._order.sources(first_column, end_column, self.shape[1]):
            number = bisect.bisect_right(self._begins, first) - 1
            begin = self._begins[number]
            # rows of one device are consecutive in the array, and so in the block too
            row = int(self.blocks[number].rows.searchsorted(first_row))
            parts.append(arrays[number][row : row + num_rows, first - begin : end - begin])
        return _filled(parts, num_rows)


def _blocks(mine: ProcessRows, batch_rows: int, order: ContextOrder) -> list[Block]:
    """Return the blocks that a process reads, ascending by column. Adjacent columns with the same rows are one block."""
    num_rows, length = mine.shape
    # `masks[columns][i]` is True if a device of the process has these columns of row i
    masks: dict[Columns, Bools] = {}
    for rows, columns in mine.indices.values():
        for source in order.sources(columns.start, columns.stop, length):
            masks.setdefault(source, np.zeros(num_rows, np.bool_))[rows] = True
    merged: list[tuple[Columns, Bools]] = []
    for (first, end), mask in sorted(masks.items()):
        if merged and merged[-1][0][1] == first and np.array_equal(merged[-1][1], mask):
            (first, _), _ = merged.pop()
        merged.append(((first, end), mask))
    whole = 0, length
    blocks = [Block(np.flatnonzero(mask[:batch_rows]), None if part == whole else part) for part, mask in merged]
    return blocks or [Block(mine.rows, None)]  # a process without devices has one block, without rows


class LoaderPlacement(Placement):
    """Placement in which only some processes, the loaders, read the batch.

    JAX lets a process fill only the parts of an array that are on its own devices. So `put` makes another array, with the same
    number of rows on each device. The devices of the loaders get the batch, and the other devices get zeros. A collective in
    `finish` moves the rows to the devices where the trainer needs them.

    Example: a batch of 6 rows, and devices 0 to 3. Devices 1 and 3 are those of the loaders.

      device                          0        1        2        3
      rows of the array from `put`    0 1 2    3 4 5    6 7 8    9 10 11
      slots of the batch in them      none     0 1 2    none     3 4 5

    So row i of the batch is row [3, 4, 5, 9, 10, 11][i] of the array.
    """

    def __init__(self, sharding: Sharding, shape: Shape, batch_rows: int, order: ContextOrder, loaders: Sequence[int]) -> None:
        # ranges of columns of the batch; joined in this order, they are the columns of the global array
        self._sources = order.sources(0, shape[1], shape[1])
        devices = list(_parts(sharding, shape))  # `jax.jit` needs the same order of devices in both shardings
        loading = [number for number, device in enumerate(devices) if device.process_index in loaders]
        if not loading:
            raise PipelineError(f"loaders={list(loaders)}: expected a process that has a device of {sharding}.")
        self.writer = devices[loading[0]].process_index
        self._device_rows = -(-batch_rows // len(loading))  # number of rows on each device, 3 in the example
        self.shape = (len(devices) * self._device_rows, shape[1])
        self.sharding = NamedSharding(Mesh(np.array(devices), ("rows",)), PartitionSpec("rows"))  # type: ignore[no-untyped-call]
        slots = np.arange(batch_rows)
        device_of_slot = np.array(loading)[slots // self._device_rows]  # [1, 1, 1, 3, 3, 3] in the example
        row_of_slot = np.full(shape[0], self.shape[0], np.int32)  # [3, 4, 5, 9, 10, 11] in the example
        row_of_slot[slots] = device_of_slot * self._device_rows + slots % self._device_rows
        is_mine = np.array([device.process_index == jax.process_index() for device in devices])
        self.reads = slots[is_mine[device_of_slot]]
        self._device_of_read = device_of_slot[self.reads]  # number of the device of each slot that this process reads
        self.blocks = [Block(self.reads, None)]

        def spread(array: jax.Array) -> jax.Array:
            # a row of the global array after the batch asks for a row that `array` lacks, so it is filled with zeros
            return array.at[row_of_slot].get(mode="fill", fill_value=0)

        self._spread = jax.jit(spread, out_shardings=sharding)

    def part(self, arrays: Sequence[Array], index: Index) -> Array:
        """See `Placement.part`. A part is all rows of one device; a device that is not a loader's gets only zeros."""
        first_row, _, _ = index[0].indices(self.shape[0])
        device = first_row // self._device_rows  # number in the order of the sharding's devices
        rows = arrays[0][slice(*self._device_of_read.searchsorted((device, device + 1)))]
        return _filled([rows[:, start:stop] for start, stop in self._sources], self._device_rows)

    def finish(self, array: jax.Array) -> jax.Array:
        # only the trainer's thread runs this collective, so that all processes run collectives in the same order
        placed: jax.Array = self._spread(array)
        return placed


def placement_of(
    sharding: Sharding, shape: Shape, batch_rows: int, order: ContextOrder, divides: bool, loaders: Sequence[int] | None
) -> Placement:
    """Return a `LoaderPlacement`, or a `DirectPlacement` if `loaders` is None."""
    if loaders is None:
        return DirectPlacement(sharding, shape, batch_rows, order, divides)
    return LoaderPlacement(sharding, shape, batch_rows, order, loaders)


def _filled(parts: Sequence[Array], count: int) -> Array:
    """Return `parts` side by side as one array of `count` rows; rows that the parts lack are zeros."""
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return rows if len(rows) == count else np.pad(rows, ((0, count - len(rows)), (0, 0)))
