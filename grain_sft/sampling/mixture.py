"""Mixture: rows of several sources, each in its own order, as one stream of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import checked_entries
from grain_sft.sampling.orders_table import Order, make_order
from grain_sft.sampling.proportions import WHEN_DRY, Proportions, as_shares

Ints = npt.NDArray[np.int64]
Weight = int | float | str | Fraction
CacheDir = str | None


@dataclasses.dataclass(frozen=True)
class SourceOrder:
    """One source of a mixture: its rows, in an order of its own, epoch after epoch without a gap.

    Its rows are those of `IndexSampler(num_instances, global_batch_size=1, ...)` for one host, step by step.

    Attributes:
      num_instances: rows it has.
      seed, order, shuffle: as in `IndexSampler`.
      epochs: after so many it has run dry; None means never.

    Raises:
      SamplerError: no such number or order.
    """

    num_instances: int
    seed: int
    order: str = "shuffle"
    shuffle: bool = True
    epochs: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_instances", 1), ("seed", 0)):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least, SamplerError))
        if self.epochs is not None:
            object.__setattr__(self, "epochs", as_integer("epochs", self.epochs, 1, SamplerError))

    @property
    def data_key(self) -> str:
        """All that decides its rows: no seed where nothing is drawn."""
        shuffled = self.shuffle and self.order != "sequential"
        drawn = f"{self.order!r}, seed={self.seed}" if shuffled else "'sequential'"
        return f"SourceOrder({self.num_instances}, {drawn}, epochs={self.epochs})"


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources and their weights: how often each gives a row.

    Weights are exact as written (0.7 is 7/10) and divided by their sum. After any number of rows each source is less than one
    row from its share, or for five and more weights of many digits less than two; see `Proportions`. A source may be a
    mixture: it has its share as a whole, and divides the rows that it gives among its own, with the same bounds.

    Attributes:
      sources: by name, the weight and the rows of each. Rows are numbered through all sources in this order.
      when_dry: what happens when a source has run dry, its `epochs` done: "repeat", nothing: no source has `epochs`, all
        begin again; "stop": the mixture ends where it asks for a row that is not there; "renormalize": the others
        divide the share of one that gave its last row, until none is left.
      schedule: pairs of a step and weights by name, which hold from that step on. What comes before it does not depend on
        them, and what each source is owed there is made up for.

    Raises:
      SamplerError: weights or a schedule that don't fit the sources.
    """

    sources: Mapping[str, tuple[Weight, SourceOrder | Mixture]]
    when_dry: str = "repeat"
    schedule: tuple[tuple[int, Mapping[str, Weight]], ...] = ()

    def __post_init__(self) -> None:
        if self.when_dry not in WHEN_DRY:
            raise SamplerError(f"when_dry={self.when_dry!r}: expected one of {', '.join(WHEN_DRY)}.")
        if not self.sources:
            raise SamplerError("a mixture of no sources: expected one or more.")
        object.__setattr__(self, "sources", dict(self.sources))
        object.__setattr__(self, "schedule", tuple(checked_entries(self.schedule, "(step, {name: weight})")))
        as_shares([(name, weight) for name, (weight, _) in self.sources.items()])
        for step, weights in self.schedule:
            if set(weights) != set(self.sources):
                raise SamplerError(
                    f"schedule: step {step} has weights of {', '.join(weights)}; expected one for each of "
                    f"{', '.join(self.sources)} (0 for none)."
                )
            as_shares([(name, weights[name]) for name in self.sources])
        self._check_dry()

    def _check_dry(self) -> None:
        for name, (_, rows) in self.sources.items():
            if isinstance(rows, Mixture) and rows.schedule and rows.when_dry != "repeat":
                raise SamplerError(
                    f"source {name!r} is a mixture with a schedule and when_dry={rows.when_dry!r}: how many rows it has would "
                    "depend on this mixture, and the other way round. Take its schedule out, or when_dry='repeat'."
                )
        ending = [name for name, (_, rows) in self.sources.items() if rows_of(rows) is not None]
        if self.when_dry == "repeat" and ending:
            raise SamplerError(
                f"source {ending[0]!r} ends (it has epochs, or is a mixture that ends), but when_dry='repeat' reads every "
                "source for ever. Leave epochs out, or take when_dry='stop' or 'renormalize'."
            )
        if self.when_dry != "repeat" and not ending:
            raise SamplerError(f"when_dry={self.when_dry!r}: no source ever runs dry. Say epochs for one or more.")

    @property
    def num_instances(self) -> int:
        """Rows of all sources."""
        return sum(rows.num_instances for _, rows in self.sources.values())

    @property
    def data_key(self) -> str:
        """All that decides its rows."""
        shares = as_shares([(name, weight) for name, (weight, _) in self.sources.items()])
        sources = ", ".join(
            f"{name!r}: ({share}, {rows.data_key})"
            for share, (name, (_, rows)) in zip(shares, self.sources.items(), strict=True)
        )
        changes = [
            f"{step}: {[str(share) for share in as_shares([(name, weights[name]) for name in self.sources])]}"
            for step, weights in self.schedule
        ]
        return f"Mixture({{{sources}}}, when_dry={self.when_dry!r}, schedule={{{', '.join(changes)}}})"


def rows_of(rows: SourceOrder | Mixture) -> int | None:
    """How many rows a source gives in all; None for any number."""
    if isinstance(rows, SourceOrder):
        return None if rows.epochs is None else rows.epochs * rows.num_instances
    return None if rows.when_dry == "repeat" else _proportions(rows, lambda step: 0).length  # it has no schedule


class Drawn(NamedTuple):
    """Rows of a mixture, as columns, int64 [n].

    Attributes:
      instance: number of the row, through all sources.
      epoch: of the source that it comes from, from 0.
    """

    instance: Ints
    epoch: Ints


class Leaf:
    """A source that is no mixture, in the stream of the whole."""

    def __init__(self, name: str, rows: SourceOrder, first: int, folder: CacheDir) -> None:
        self.name, self.rows, self.first = name, rows, first
        made = make_order(rows.order, rows.num_instances, rows.seed, folder)
        self.order: Order = made if rows.shuffle else make_order("sequential", rows.num_instances, rows.seed, None)
        self.path: list[tuple[Proportions, int]] = []  # what chose it, from the inside out

    def draw(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Its rows number so and so (int64 [n], from 0), numbered through all sources, and their epochs."""
        epoch, places = np.divmod(numbers, self.rows.num_instances)
        rows = np.empty(len(numbers), np.int64)
        for each in np.unique(epoch).tolist():
            here = epoch == each
            rows[here] = self.order(each, places[here])
        return rows + self.first, epoch

    def find(self, numbers: Ints) -> Ints:
        """The row of the whole at which its rows number so and so are drawn; -1 where they never are."""
        for proportions, source in self.path:
            found = np.full(len(numbers), -1, np.int64)
            there = numbers >= 0
            found[there] = proportions.find(source, numbers[there])
            numbers = found
        return numbers

    def count(self, row: int) -> int:
        """How many of its rows are drawn before `row` of the whole."""
        for proportions, source in reversed(self.path):
            row = proportions.counts(row)[source]
        return row


class Stream:
    """A mixture as a function of the row: which row of which source is drawn, at constant time.

    Args:
      mixture: what to mix.
      rows_before: rows of the whole before a step.
      folder: where exact orders are kept.

    Attributes:
      leaves: its sources that are no mixtures; those of a source that is one are named "outer/inner".
      length: rows there are; None where they never end.
    """

    def __init__(self, mixture: Mixture, rows_before: Callable[[int], int], folder: CacheDir) -> None:
        self.leaves: list[Leaf] = []
        self._root = _Node(mixture, rows_before, folder, "", 0, self.leaves)
        self.length = self._root.proportions.length

    def draw(self, rows: Ints) -> Drawn:
        """What is drawn at `rows` of the whole (int64 [n], below `length`)."""
        leaf, number = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for node, at, local in self._walk(self._root, np.arange(len(rows)), rows):
            leaf[at], number[at] = node, local
        instance, epoch = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for each in np.unique(leaf).tolist():
            here = leaf == each
            instance[here], epoch[here] = self.leaves[each].draw(number[here])
        return Drawn(instance, epoch)

    def _walk(self, node: _Node, at: Ints, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        sources, numbers = node.proportions.choose(rows)
        for source, child in enumerate(node.children):
            here = sources == source
            if here.any():
                if isinstance(child, int):
                    yield child, at[here], numbers[here]
                else:
                    yield from self._walk(child, at[here], numbers[here])

    @property
    def table_rows(self) -> int:
        """Rows of all tables that choices are looked up in."""
        return self._root.table_rows

    @property
    def proportions(self) -> Proportions:
        """Of the outermost sources."""
        return self._root.proportions


class _Node:
    """A mixture in the stream of the whole; its sources are mixtures, or numbers of leaves."""

    def __init__(
        self,
        mixture: Mixture,
        rows_before: Callable[[int], int],
        folder: CacheDir,
        prefix: str,
        first: int,
        leaves: list[Leaf],
    ) -> None:
        self.proportions = _proportions(mixture, rows_before)
        self.children: list[_Node | int] = []
        for source, (name, (_, rows)) in enumerate(mixture.sources.items()):
            begin = len(leaves)
            if isinstance(rows, Mixture):
                before = _before(self.proportions, source, rows_before)
                self.children.append(_Node(rows, before, folder, f"{prefix}{name}/", first, leaves))
            else:
                self.children.append(begin)
                leaves.append(Leaf(prefix + name, rows, first, folder))
            for leaf in leaves[begin:]:
                leaf.path.append((self.proportions, source))
            first += rows.num_instances

    @property
    def table_rows(self) -> int:
        return self.proportions.table_rows + sum(each.table_rows for each in self.children if isinstance(each, _Node))


def _before(proportions: Proportions, source: int, rows_before: Callable[[int], int]) -> Callable[[int], int]:
    def before(step: int) -> int:
        row = rows_before(step)
        return proportions.counts(row if proportions.length is None else min(row, proportions.length))[source]

    return before


def _proportions(mixture: Mixture, rows_before: Callable[[int], int]) -> Proportions:
    names = list(mixture.sources)
    limits = [rows_of(rows) for _, rows in mixture.sources.values()]
    changes = {0: as_shares([(name, weight) for name, (weight, _) in mixture.sources.items()])}
    for step, weights in mixture.schedule:
        changes[rows_before(step)] = as_shares([(name, weights[name]) for name in names])
    return Proportions(list(changes.items()), limits, mixture.when_dry)
