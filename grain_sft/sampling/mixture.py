"""Mixture: rows of several sources, each in its own order, as one stream of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from grain_sft.deprecated import renamed_arguments
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import checked_entries
from grain_sft.sampling.orders import CacheDir, Ints
from grain_sft.sampling.proportions import Proportions, as_shares
from grain_sft.sampling.streams import SourceOrder

Weight = int | float | str | Fraction
RowsBefore = Callable[[int], int]
"""Rows of the whole mixture before a step."""
OnExhausted = Literal["repeat", "stop", "renormalize"]
Path = tuple[tuple[Proportions, int], ...]


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
        ending = [name for name, (_, rows) in self.sources.items() if rows.num_rows is not None]
        for name in ending:
            rows = self.sources[name][1]
            if isinstance(rows, Mixture) and rows.schedule:
                raise SamplerError(
                    f"source {name!r} is a mixture with a schedule and on_exhausted={rows.on_exhausted!r}: its number of rows "
                    "would depend on this mixture, and the other way round. Remove its schedule, or take "
                    "on_exhausted='repeat'."
                )
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


class LeafSource:
    """A source that is not a mixture, in the stream of the whole.

    Args:
      name: Its name, below the names of the mixtures that contain it: "outer/inner".
      source: Its rows.
      first_row: Number of its first row among the rows of all sources.
      path: Proportions of each mixture that contains it, outermost first, and its index among their sources.
      cache_dir: Folder of exact orders.
    """

    def __init__(self, name: str, source: SourceOrder, first_row: int, path: Path, cache_dir: CacheDir) -> None:
        self.name, self.source, self.first_row, self.path = name, source, first_row, path
        self.rows_at = source.rows_at(cache_dir)

    def find(self, numbers: Ints) -> Ints:
        """Return the row of the whole at which each of the source's rows `numbers` is drawn; -1 where it never is."""
        for proportions, source in reversed(self.path):
            found = np.full(len(numbers), -1, np.int64)
            drawn = numbers >= 0
            found[drawn] = proportions.find(source, numbers[drawn])
            numbers = found
        return numbers

    def count(self, row: int) -> int:
        """Return how many of its rows are drawn before `row` of the whole."""
        return _count(self.path, row)


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
        self._children: dict[
            Proportions, list[Proportions | int]
        ] = {}  # of each mixture: mixtures, or indices of leaves
        self._rows_before, self._cache_dir = rows_before, cache_dir
        self.proportions = self._add(mixture, "", 0, ())
        self.length = self.proportions.length

    def _add(self, mixture: Mixture, prefix: str, first_row: int, path: Path) -> Proportions:
        proportions = mixture.proportions(lambda step: _count(path, self._rows_before(step)))
        children = self._children[proportions] = []
        for source, (name, (_, rows)) in enumerate(mixture.sources.items()):
            below = (*path, (proportions, source))
            if isinstance(rows, Mixture):
                children.append(self._add(rows, f"{prefix}{name}/", first_row, below))
            else:
                children.append(len(self.leaves))
                self.leaves.append(LeafSource(prefix + name, rows, first_row, below, self._cache_dir))
            first_row += rows.num_instances
        return proportions

    def draw(self, rows: Ints) -> Ints:
        """Return what is drawn at `rows` of the whole (int64 [n], below `length`): int64 [4, n], the index of the leaf
        source, its epoch, the index in the source's order of that epoch, and the number of the row through all sources."""
        drawn = np.empty((4, len(rows)), np.int64)
        waiting: list[tuple[Proportions | int, Ints, Ints]] = [(self.proportions, np.arange(len(rows)), rows)]
        while waiting:
            node, at, numbers = waiting.pop()
            if isinstance(node, int):
                self._draw_leaf(node, at, numbers, drawn)
                continue
            sources, numbers = node.choose(numbers)
            for source, child in enumerate(self._children[node]):
                here = sources == source
                if here.any():
                    waiting.append((child, at[here], numbers[here]))
        return drawn

    def _draw_leaf(self, number: int, at: Ints, numbers: Ints, drawn: Ints) -> None:
        """Put the rows `numbers` of a leaf at the indices `at` of `drawn`."""
        leaf = self.leaves[number]
        epochs, indices = np.divmod(numbers, leaf.source.num_instances)
        drawn[0, at], drawn[1, at], drawn[2, at] = number, epochs, indices
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            drawn[3, at[here]] = leaf.rows_at(epoch, indices[here]) + leaf.first_row

    @property
    def table_rows(self) -> int:
        """Rows of all tables of choices."""
        return sum(proportions.table_rows for proportions in self._children)


def _count(path: Path, row: int) -> int:
    """Return how many rows the source at the end of a path gives before `row` of the whole."""
    for proportions, source in path:
        row = proportions.counts(row)[source]
    return row
