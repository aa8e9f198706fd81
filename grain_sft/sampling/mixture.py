"""Mixture: rows of several sources, each in its own order, as one stream of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import numpy as np

from grain_sft.deprecated import renamed_arguments
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import checked_entries
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.orders.order import CacheDir
from grain_sft.sampling.proportions import Proportions, as_shares
from grain_sft.sampling.streams import SourceOrder

Weight = int | float | str | Fraction
RowsBefore = Callable[[int], int]
"""Rows of the whole mixture before a step."""
OnExhausted = Literal["repeat", "stop", "renormalize"]


@renamed_arguments(when_dry="on_exhausted")
@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources and their weights: how often each gives a row.

    Weights are exact as written (0.7 is 7/10) and divided by their sum. After any number of rows each source is less than one
    row from its share, or for five and more weights of many digits less than two; see `Proportions`. A source may be a
    mixture: it has its share as a whole, and divides the rows that it gives among its own sources, with the same bounds.

    Args:
      sources: Weight and rows of each source, by name. Rows are numbered through all sources in this order.
      on_exhausted: When the `epochs` of a source are done: "repeat": no source has `epochs`, all begin again; "stop": the
        mixture ends where it asks for a row that the source does not have; "renormalize": the other sources divide the
        share of one that gave its last row, until none is left.
      schedule: Pairs of a step and weights by name, which hold from that step on. Rows before it do not depend on them, and
        what each source is behind or ahead of its share there is made up for.

    Raises:
      SamplerError: Weights or a schedule that don't fit the sources.
    """

    sources: Mapping[str, tuple[Weight, SourceOrder | Mixture]]
    on_exhausted: OnExhausted = "repeat"
    schedule: tuple[tuple[int, Mapping[str, Weight]], ...] = ()

    def __post_init__(self) -> None:
        if self.on_exhausted not in get_args(OnExhausted):
            raise SamplerError(
                f"on_exhausted={self.on_exhausted!r}: expected one of {', '.join(get_args(OnExhausted))}."
            )
        if not self.sources:
            raise SamplerError("a mixture of no sources: expected one or more.")
        object.__setattr__(self, "sources", dict(self.sources))
        object.__setattr__(self, "schedule", tuple(checked_entries(self.schedule, "(step, {name: weight})")))
        self._shares()
        for step, weights in self.schedule:
            if set(weights) != set(self.sources):
                raise SamplerError(
                    f"schedule: step {step} has weights of {', '.join(weights)}; expected one for each of "
                    f"{', '.join(self.sources)} (0 for none)."
                )
            self._shares(weights)
        self._check_ends()

    def _shares(self, weights: Mapping[str, Weight] | None = None) -> tuple[Fraction, ...]:
        """Return the share of each source: with `weights`, or its own."""
        own = {name: weight for name, (weight, _) in self.sources.items()}
        return as_shares([(name, (weights or own)[name]) for name in self.sources])

    def _check_ends(self) -> None:
        for name, (_, rows) in self.sources.items():
            if rows.num_rows is not None and isinstance(rows, Mixture) and rows.schedule:
                raise SamplerError(
                    f"source {name!r} is a mixture with a schedule and on_exhausted={rows.on_exhausted!r}: its number of rows "
                    "would depend on this mixture, and the other way round. Remove its schedule, or take "
                    "on_exhausted='repeat'."
                )
        ending = [name for name, (_, rows) in self.sources.items() if rows.num_rows is not None]
        if self.on_exhausted == "repeat" and ending:
            raise SamplerError(
                f"source {ending[0]!r} ends (it has epochs, or is a mixture that ends), but on_exhausted='repeat' reads every "
                "source for ever. Leave epochs out, or take on_exhausted='stop' or 'renormalize'."
            )
        if self.on_exhausted != "repeat" and not ending:
            raise SamplerError(
                f"on_exhausted={self.on_exhausted!r}: no source is ever exhausted. Give epochs for one or more."
            )

    @property
    def num_instances(self) -> int:
        """Rows of all sources."""
        return sum(rows.num_instances for _, rows in self.sources.values())

    @property
    def num_rows(self) -> int | None:
        """Rows of all epochs; None where they never end."""
        # The rows before a step matter to a schedule alone, which `_check_ends` refuses in a source that ends.
        return None if self.on_exhausted == "repeat" else self.proportions(lambda step: 0).length

    @property
    def data_key(self) -> str:
        """All that decides the rows."""
        sources = ", ".join(
            f"{name!r}: ({share}, {rows.data_key})"
            for share, (name, (_, rows)) in zip(self._shares(), self.sources.items(), strict=True)
        )
        changes = [f"{step}: {list(map(str, self._shares(weights)))}" for step, weights in self.schedule]
        return f"Mixture({{{sources}}}, when_dry={self.on_exhausted!r}, schedule={{{', '.join(changes)}}})"

    def proportions(self, rows_before: RowsBefore) -> Proportions:
        """Return how the rows are divided among the sources."""
        changes = {0: self._shares(), **{rows_before(step): self._shares(weights) for step, weights in self.schedule}}
        limits = [rows.num_rows for _, rows in self.sources.values()]
        return Proportions(list(changes.items()), limits, self.on_exhausted)


@dataclasses.dataclass(frozen=True)
class MixtureRows:
    """Rows of a mixture, as columns, int64 [n].

    Attributes:
      source: Index of the leaf source.
      epoch: Epoch of that source, from 0.
      index: Index of the row in the source's order of that epoch.
      row: Number of the row, through all sources.
    """

    source: Ints
    epoch: Ints
    index: Ints
    row: Ints


class LeafSource:
    """A source that is not a mixture, in the stream of the whole."""

    def __init__(self, name: str, source: SourceOrder, first_row: int, cache_dir: CacheDir) -> None:
        self.name, self.source, self.first_row = name, source, first_row
        self.rows_at = source.rows_at(cache_dir)
        self.path: list[tuple[Proportions, int]] = []  # of the mixtures that contain it, innermost first

    def find(self, numbers: Ints) -> Ints:
        """Return the row of the whole at which each of the source's rows `numbers` is drawn; -1 where it never is."""
        for proportions, source in self.path:
            found = np.full(len(numbers), -1, np.int64)
            drawn = numbers >= 0
            found[drawn] = proportions.find(source, numbers[drawn])
            numbers = found
        return numbers

    def count(self, row: int) -> int:
        """Return how many of its rows are drawn before `row` of the whole."""
        for proportions, source in reversed(self.path):
            row = proportions.counts(row)[source]
        return row


class MixtureStream:
    """A mixture as a function of the row: which row of which source is drawn, at constant time.

    Args:
      mixture: Mixture that is drawn from.
      rows_before: Rows of the whole before a step.
      cache_dir: Folder of exact orders.

    Attributes:
      proportions: How the rows are divided among the outermost sources.
      leaves: Sources that are not mixtures; those of a source that is one are named "outer/inner".
      length: Number of rows; None where they never end.
    """

    def __init__(self, mixture: Mixture, rows_before: RowsBefore, cache_dir: CacheDir) -> None:
        self.leaves: list[LeafSource] = []
        self._root = self._node(mixture, rows_before, cache_dir, "", 0)
        self.proportions = self._root.proportions
        self.length = self.proportions.length

    def _node(self, mixture: Mixture, rows_before: RowsBefore, cache_dir: CacheDir, prefix: str, first: int) -> _Node:
        node = _Node(mixture.proportions(rows_before), [])
        for source, (name, (_, rows)) in enumerate(mixture.sources.items()):
            begin = len(self.leaves)
            if isinstance(rows, Mixture):
                before = _rows_of_source_before(node.proportions, source, rows_before)
                node.children.append(self._node(rows, before, cache_dir, f"{prefix}{name}/", first))
            else:
                node.children.append(begin)
                self.leaves.append(LeafSource(prefix + name, rows, first, cache_dir))
            for leaf in self.leaves[begin:]:
                leaf.path.append((node.proportions, source))
            first += rows.num_instances
        return node

    def draw(self, rows: Ints) -> MixtureRows:
        """Return what is drawn at `rows` of the whole (int64 [n], below `length`)."""
        columns = np.empty((4, len(rows)), np.int64)
        for number, at, local in self._walk(self._root, np.arange(len(rows)), rows):
            leaf = self.leaves[number]
            epochs, indices = np.divmod(local, leaf.source.num_instances)
            columns[0, at], columns[1, at], columns[2, at] = number, epochs, indices
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                columns[3, at[here]] = leaf.rows_at(epoch, indices[here]) + leaf.first_row
        return MixtureRows(*columns)

    def _walk(self, node: _Node, at: Ints, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield, for each leaf that is drawn from: its index, where in `rows`, and the numbers of its rows."""
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
        """Rows of all tables of choices."""
        return sum({id(each): each.table_rows for leaf in self.leaves for each, _ in leaf.path}.values())


class _Node(NamedTuple):
    """A mixture in the stream of the whole; its children are mixtures, or indices of leaves."""

    proportions: Proportions
    children: list[_Node | int]


def _rows_of_source_before(proportions: Proportions, source: int, rows_before: RowsBefore) -> RowsBefore:
    def before(step: int) -> int:
        row = rows_before(step)
        return proportions.counts(row if proportions.length is None else min(row, proportions.length))[source]

    return before
