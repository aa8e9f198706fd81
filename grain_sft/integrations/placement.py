"""Placement: the rows of a global array that a process reads, and their transfer to its devices."""

import abc
import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from grain_sft.deprecated import renamed_attribute
from grain_sft.errors import PipelineError
from grain_sft.integrations.context_order import Columns, ContextOrder

Index = tuple[slice, ...]
GlobalBatch = dict[str, jax.Array]
"""Global arrays [rows, L] by key, as in a pipeline's batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessRows:
    """Part of an array [rows, length] on the devices of one process.

    Attributes:
      shape: Shape of the global array.
      rows: int64 [n], ascending indices of the rows that are on the devices, at least in part.
      indices: Rows and columns of the array that each device holds.
      first: First process that holds row 0.
    """

    shape: tuple[int, int]
    rows: npt.NDArray[np.int64]
    indices: dict[Any, tuple[slice, slice]]
    first: int

    @property
    def host(self) -> tuple[int, int] | None:
        """`(index, count)` where the rows are the index-th of count equal blocks of the array; else None."""
        total, rows = self.shape[0], self.rows
        if not len(rows) or total % len(rows) or rows[0] % len(rows) or rows[-1] - rows[0] + 1 != len(rows):
            return None
        return int(rows[0]) // len(rows), total // len(rows)

    held = renamed_attribute("ProcessRows.held", "rows")


def process_rows(sharding: Sharding, shape: tuple[int, int], process: int | None = None) -> ProcessRows:
    """Return the part of a global array that is on the devices of a process.

    Args:
      sharding, shape: Sharding and shape [rows, length] of the global array.
      process: Index of the process; None means this one.

    Raises:
      PipelineError: the sharding does not divide the array evenly.
    """
    process = jax.process_index() if process is None else process
    parts = {
        device: (slice(*rows.indices(shape[0])[:2]), slice(*columns.indices(shape[1])[:2]))
        for device, (rows, columns) in _parts(sharding, shape).items()
    }
    indices = {device: part for device, part in parts.items() if device.process_index == process}
    mine = np.zeros(shape[0], np.bool_)
    for rows, _ in indices.values():
        mine[rows] = True
    first = min(device.process_index for device, (rows, _) in parts.items() if not rows.start)
    return ProcessRows(shape, np.flatnonzero(mine), indices, first)


def _parts(sharding: Sharding, shape: tuple[int, int]) -> dict[Any, Any]:
    """Return the rows and columns of an array that each device holds, in the order of the sharding's devices."""
    try:
        return dict(sharding.devices_indices_map(shape))
    except ValueError as error:
        found = f"{sharding} can't divide batches of {shape[0]} rows of {shape[1]} tokens: {error}."
        fix = "Make the global batch size and the sequence length multiples of the mesh's numbers of parts."
        raise PipelineError(f"{found} {fix}") from error


class Block(NamedTuple):
    """Rows and columns of the global batch that are read at once.

    Attributes:
      rows: int64 [n], slots of the global batch.
      columns: First column and the one after the last; None for all.
    """

    rows: npt.NDArray[np.int64]
    columns: Columns | None


class Placement(abc.ABC):
    """Transfer of global batches of one shape to the devices."""

    reads: npt.NDArray[np.int64]  # [n], slots of the global batch that this process reads, at least in part
    blocks: list[Block]  # rows and columns that this process reads
    writer: int  # process that writes observers' files for all processes
    shape: tuple[int, int]  # of the arrays that are put on the devices
    sharding: Sharding  # of these arrays

    @abc.abstractmethod
    def part(self, arrays: Sequence[npt.NDArray[Any]], index: Index) -> npt.NDArray[Any]:
        """Return the rows and columns `index` of the array that `put` makes of `arrays`, one for each of `blocks`."""

    def put(self, arrays: Sequence[npt.NDArray[Any]]) -> jax.Array:
        """Return a global array of `self.shape`, made of one array for each of `blocks`. Any thread may call this."""
        part = functools.partial(self.part, arrays)
        # only a process without devices needs `dtype`, which earlier versions of JAX lack
        named = {} if self.sharding.addressable_devices else {"dtype": arrays[0].dtype}
        return jax.make_array_from_callback(self.shape, self.sharding, part, **named)

    def finish(self, array: jax.Array) -> jax.Array:
        """Return the trainer's array for one that `put` returned. Only the trainer's thread calls this."""
        return array


class DirectPlacement(Placement):
    """Placement in which every process transfers the rows of its own devices.

    Args:
      sharding, shape: Sharding and shape [rows, L] of the global arrays.
      batch_rows: Number of rows of the global batch. The rows of the array after them are zeros.
      order: Order of the columns.
      divides: Whether a process reads only the columns that its devices hold.
    """

    def __init__(
        self, sharding: Sharding, shape: tuple[int, int], batch_rows: int, order: ContextOrder, *, divides: bool
    ) -> None:
        mine = process_rows(sharding, shape)
        self.sharding, self.shape, self.writer, self._order = sharding, shape, mine.first, order
        self.reads = mine.rows[mine.rows < batch_rows]
        self.blocks = _blocks(mine, batch_rows, order) if divides else [Block(self.reads, None)]
        self._begins = [block.columns[0] if block.columns else 0 for block in self.blocks]

    def part(self, arrays: Sequence[npt.NDArray[Any]], index: Index) -> npt.NDArray[Any]:
        start, stop, _ = index[0].indices(self.shape[0])
        parts = []
        for first_column, end in self._order.sources(*index[1].indices(self.shape[1])[:2], self.shape[1]):
            number = bisect.bisect_right(self._begins, first_column) - 1
            begin = self._begins[number]
            # rows of one device are consecutive in the array, so also in the block
            first = int(self.blocks[number].rows.searchsorted(start))
            parts.append(arrays[number][first : first + stop - start, first_column - begin : end - begin])
        return _filled(parts, stop - start)


def _blocks(mine: ProcessRows, batch_rows: int, order: ContextOrder) -> list[Block]:
    """Return the blocks that a process reads, sorted by first column. No column is in two blocks."""
    length, rows_of = mine.shape[1], dict[Columns, npt.NDArray[np.bool_]]()
    for rows, columns in mine.indices.values():
        for each in order.sources(columns.start, columns.stop, length):
            rows_of.setdefault(each, np.zeros(mine.shape[0], np.bool_))[rows] = True
    merged: list[tuple[Columns, npt.NDArray[np.bool_]]] = []
    for each, mask in sorted(rows_of.items()):
        if merged and merged[-1][0][1] == each[0] and np.array_equal(merged[-1][1], mask):
            merged[-1] = (merged[-1][0][0], each[1]), mask
        else:
            merged.append((each, mask))
    blocks = [Block(np.flatnonzero(mask[:batch_rows]), None if each == (0, length) else each) for each, mask in merged]
    return blocks or [Block(mine.rows, None)]


class LoaderPlacement(Placement):
    """Placement in which some processes read the batch. Each of their devices gets equally many rows of it, and a collective
    moves these to all devices.

    Args:
      sharding, shape, batch_rows, order: As in `DirectPlacement`.
      loaders: Indices of the processes that read the batch.
    """

    def __init__(
        self,
        sharding: Sharding,
        shape: tuple[int, int],
        batch_rows: int,
        order: ContextOrder,
        *,
        loaders: Sequence[int],
    ) -> None:
        self._sources = order.sources(0, shape[1], shape[1])
        devices = list(_parts(sharding, shape))  # `spread` needs one order of devices in both shardings
        loading = [number for number, device in enumerate(devices) if device.process_index in loaders]
        if not loading:
            raise PipelineError(f"loaders={list(loaders)}: none of these processes has a device of {sharding}.")
        self.writer = devices[loading[0]].process_index
        self._each = -(-batch_rows // len(loading))
        self.shape = (len(devices) * self._each, shape[1])
        self.sharding = NamedSharding(Mesh(np.array(devices), ("rows",)), PartitionSpec("rows"))  # type: ignore[no-untyped-call]
        blocks = np.array_split(np.arange(batch_rows), range(self._each, len(loading) * self._each, self._each))
        places = np.zeros(shape[0], np.int32)  # index of each row of the batch in the array that `put` returns
        self._read: dict[int, slice] = {}  # rows of `reads` by number of the device they are put on
        self.reads = np.zeros(0, np.int64)
        for number, block in zip(loading, blocks, strict=True):
            places[block] = number * self._each + np.arange(len(block))
            if devices[number].process_index == jax.process_index():
                self._read[number] = slice(len(self.reads), len(self.reads) + len(block))
                self.reads = np.append(self.reads, block)
        self.blocks = [Block(self.reads, None)]
        filling = np.arange(shape[0])[:, None] >= batch_rows  # rows after the batch

        def spread(array: jax.Array) -> jax.Array:
            return jax.numpy.where(filling, jax.numpy.zeros((), array.dtype), array[places])

        self._spread = jax.jit(spread, out_shardings=sharding)

    def part(self, arrays: Sequence[npt.NDArray[Any]], index: Index) -> npt.NDArray[Any]:
        rows = arrays[0][self._read.get(index[0].indices(self.shape[0])[0] // self._each, slice(0))]
        return _filled([rows[:, start:stop] for start, stop in self._sources], self._each)

    def finish(self, array: jax.Array) -> jax.Array:
        # a collective: only the trainer's thread runs it, so that all processes run theirs in the same order
        placed: jax.Array = self._spread(array)
        return placed


def placement_of(*common: Any, loaders: Sequence[int] | None, divides: bool) -> Placement:
    """Return the placement of arrays that all processes read (`loaders` None), or that only some do. `common` are the first
    arguments of both classes."""
    if loaders is None:
        return DirectPlacement(*common, divides=divides)
    return LoaderPlacement(*common, loaders=loaders)


def _filled(parts: Sequence[npt.NDArray[Any]], count: int) -> npt.NDArray[Any]:
    """Return parts of the same rows joined along the columns, with rows of zeros up to `count` rows."""
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return rows if len(rows) == count else np.pad(rows, ((0, count - len(rows)), (0, 0)))
