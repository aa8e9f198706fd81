"""Rows of a source that a run reads, with their order, steps and slots: `SourceOrder`, `EpochStream` and `BatchSlots`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sft.arguments import as_integer, as_pair
from grain_sft.errors import SamplerError
from grain_sft.sampling.orders import ORDERS, CacheDir, Costs, RowsAt
from grain_sft.sampling.proportions import OnExhausted
from grain_sft.types import Ints

if TYPE_CHECKING:
    from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class SourceOrder:
    """Order in which a run reads the rows of one source.

    Args:
      num_instances: Number of rows of the source.
      seed: Seed of the order, 0 or more.
      order: Name of the order, such as "shuffle", as in `IndexSampler`.
      shuffle: Whether to read the rows in `order`. False reads them in ascending order of their numbers.
      epochs: Number of epochs after which the source is exhausted; None if the source is never exhausted.
      on_exhausted: What the mixture of the source does after the source's last epoch: "stop", "renormalize" or "fail", as in
        `Mixture`. None means the `on_exhausted` of the mixture.
      chunk_size: Number of consecutive rows that stay together, as in OLMo-core's data loader. It divides `num_instances`.
        With 4, the order permutes the chunks of rows 0 to 3, 4 to 7, and so on.
      start: Pair (epoch, index) of the first row to read. `index` is an index in the order of the epoch.

    Raises:
      SamplerError: An argument is out of bounds.
    """

    num_instances: int
    seed: int
    order: str = "shuffle"
    shuffle: bool = True
    epochs: int | None = None
    on_exhausted: OnExhausted | None = None
    chunk_size: int = 1
    start: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        bounds = {"num_instances": 1, "seed": 0, "chunk_size": 1}
        if self.epochs is not None:
            bounds["epochs"] = 1
        for name, least in bounds.items():
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least, SamplerError))
        object.__setattr__(self, "start", as_pair("start", self.start, SamplerError))
        if self.shuffle not in (False, True):
            raise SamplerError(f"shuffle={self.shuffle!r}: expected True or False.")
        object.__setattr__(self, "shuffle", bool(self.shuffle))
        if self.on_exhausted not in (None, "stop", "renormalize", "fail"):
            raise SamplerError(f"on_exhausted={self.on_exhausted!r}: a source takes stop, renormalize or fail.")
        if self.on_exhausted is not None and self.epochs is None:
            problem = f"on_exhausted={self.on_exhausted!r}: the source is never exhausted"
            raise SamplerError(f"{problem}. Give it epochs (max_epochs in a config).")
        if self.num_instances % self.chunk_size:
            problem = f"chunk_size={self.chunk_size} does not divide the {self.num_instances} rows"
            raise SamplerError(f"{problem}. Take another chunk_size, or a layout with max_target_sequence_length.")
        if self.start[1] >= self.num_instances:
            raise SamplerError(f"start={self.start}: expected an epoch, and an index below {self.num_instances}.")

    @property
    def num_rows(self) -> int | None:
        """Number of rows from `start` to the end of the last epoch: 0 if `start` is later, None if `epochs` is None."""
        return None if self.epochs is None else max(0, self.epochs * self.num_instances - self.rows_before)

    @property
    def rows_before(self) -> int:
        """Number of rows before `start`, counted from the beginning of epoch 0."""
        return self.start[0] * self.num_instances + self.start[1]

    @property
    def seeded(self) -> bool:
        """Whether the rows depend on the seed."""
        return self.shuffle and not ORDERS[self.order].sequential

    @property
    def data_key(self) -> str:
        """Text of all that decides the rows."""
        order = f"{self.order!r}, seed={self.seed}" if self.seeded else "'sequential'"
        on_exhausted = "" if self.on_exhausted is None else f", on_exhausted={self.on_exhausted!r}"
        return f"SourceOrder({self.num_instances}, {order}, epochs={self.epochs}{on_exhausted}{self.options_text})"

    @property
    def options_text(self) -> str:
        """Text of `chunk_size` and `start` for a `data_key`, without default values."""
        chunks = f", chunk_size={self.chunk_size}" if self.chunk_size > 1 else ""
        start = f", start={self.start}" if self.start != (0, 0) else ""
        return chunks + start

    def rows_at(self, cache_dir: CacheDir, costs: Costs | None = None) -> RowsAt:
        """Return the function that maps an epoch, and indices in its order, to rows.

        Args:
          cache_dir: Folder of cached permutations, as in `IndexSampler`.
          costs: Cost of each row, and the indices that each step reads. Only an order by cost, such as "balanced", needs them.

        Raises:
          SamplerError: The order is by cost, and `costs` is None.
        """
        order = ORDERS[self.order]
        if order.by_cost and costs is None:
            fix = "Give IndexSampler costs=layout.row_costs; for a source of a mixture take another order."
            raise SamplerError(f"order={self.order!r} needs the cost of each row. {fix}")
        if not self.shuffle:
            return lambda epoch, indices: indices
        size = self.chunk_size
        options = {"costs": costs} if order.by_cost else {}
        chunks_at = order.make(self.num_instances // size, seed=self.seed, cache_dir=cache_dir, **options)
        if size == 1:
            return chunks_at
        return lambda epoch, indices: chunks_at(epoch, indices // size) * size + indices % size

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of an epoch's generator."""
        return ORDERS[self.order].epoch_seed(self.seed, epoch)


class EpochSpan(NamedTuple):
    """Part of an epoch that a run reads.

    Attributes:
      first, last: First and last step that read rows of the epoch. If a mixture's run ends inside the epoch, `last` is the
        run's last step. `last` is `sys.maxsize` if the run has no end and never finishes the epoch, because the epoch's source
        has the weight 0.
      rows: Number of rows of the epoch that the run reads.
      start: Index, in the epoch's order, of the first row that the run reads. If each host reads a block of its own, `start` is
        an index in each block.
    """

    first: int
    last: int
    rows: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class EpochStream:
    """Rows of one source in a run, epoch after epoch.

    Attributes:
      name: Name of the source; "" for the one stream of an `IndexSampler`.
      source: The source's number of rows, their order, its seed and its epochs.
      first_row: Row of the layout that is row 0 of the stream.
      begin: Function of a step that returns (epoch, n): the epoch of the first row that is read from this step on, and the
        number of rows that come before it in this epoch. Rows that the run skips count, too. If each step of a mixture has 4
        rows of a source with 10 rows, `begin(3)` is (1, 2).
      span: Function of an epoch that returns the epoch's `EpochSpan`. It returns None if the epoch is before the run or after
        its end. If the run skips the whole epoch, the span has 0 rows.
      rows_at: Function (epoch, indices) that returns the rows at `indices` of the epoch's order, numbered from 0 in the source.
      num_blocks: Number of blocks of an epoch. It is the number of hosts if each host reads a block of its own, else 1.
      batching: Rule that cuts an epoch into batches, such as "global_batch_size=8, curriculum='natural'", or into a block for
        each host. A later stage of the run can continue inside an epoch only if it has the same rule. "" means that a batch is
        the next rows of the order.
    """

    name: str
    source: SourceOrder
    first_row: int
    begin: Callable[[int], tuple[int, int]]
    span: Callable[[int], EpochSpan | None]
    rows_at: RowsAt
    num_blocks: int = 1
    batching: str = ""

    def first_rows(self, epoch: int, count: int) -> Ints:
        """Return the first rows that the run reads in an epoch (or in its first block), at most `count`: int64 [n]."""
        span = self.span(epoch) or EpochSpan(0, 0, 0)
        return self.rows_at(epoch, span.start + np.arange(min(count, span.rows // self.num_blocks)))


@dataclasses.dataclass(frozen=True)
class BatchSlots:
    """Table of the slots (indices into global batches) and their rows, sorted by step, then by slot. Columns are int64 [slots].

    Attributes:
      step: Step, from 0.
      slot: Index into the global batch, from 0.
      host: Host that reads the slot.
      source: Index of the row's stream in `sampler.streams`.
      epoch: Epoch of the row in its stream, from 0.
      index: Index of the row in the order of that epoch.
      row: Number of the row in the layout; `FILL_ROW` for padding by `last_batch="fill"`. In a mixture, `source`, `epoch` and
        `index` of such a slot are -1.
    """

    step: Int64[np.ndarray, " slots"]
    slot: Int64[np.ndarray, " slots"]
    host: Int64[np.ndarray, " slots"]
    source: Int64[np.ndarray, " slots"]
    epoch: Int64[np.ndarray, " slots"]
    index: Int64[np.ndarray, " slots"]
    row: Int64[np.ndarray, " slots"]

    @classmethod
    def joined(cls, parts: Iterable[BatchSlots]) -> BatchSlots:
        """Return the slots of all `parts`, in the order of `parts`."""
        return cls(*np.concatenate([np.zeros((7, 0), np.int64), *(part.columns() for part in parts)], axis=1))

    def columns(self) -> tuple[Ints, ...]:
        """Return all columns, in the order of the attributes."""
        return tuple(vars(self).values())

    def select(self, indices: Ints) -> BatchSlots:
        """Return the slots at `indices`, int64 [n]."""
        return BatchSlots(*(column[indices] for column in self.columns()))
