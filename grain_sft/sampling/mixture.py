"""Mixtures: rows of several sources, each in its own order, as one stream that is cut into steps."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cached_property, partial
from typing import Literal, Self, get_args

import numpy as np

from grain_sft.deprecated import renamed_arguments
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.batch_sizes import checked_entries
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.proportions import Path, Proportions, as_shares, count_drawn, find_drawn
from grain_sft.sampling.sampler import StreamSampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream, SourceOrder

Weight = int | float | str | Fraction
OnExhausted = Literal["repeat", "stop", "renormalize"]
MixtureLastBatch = Literal["drop", "fill"]

_MOST_ROWS = 1 << 62  # of the stream: row numbers in it are int64


@renamed_arguments(when_dry="on_exhausted")
@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources and their weights: how often each gives a row.

    Weights are exact as written (0.7 is 7/10) and divided by their sum. After any number of rows each source is less than one
    row from its share, or for five and more weights of many digits less than two; see `Proportions`. A source that is a
    mixture has its share as a whole, and divides its rows among its own sources with the same bounds.

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
                    "would depend on this mixture, and vice versa. Remove its schedule, or take on_exhausted='repeat'."
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
    def changes(self) -> list[int]:
        """Steps from which its schedule, or that of a mixture in it, holds."""
        inner = [step for _, rows in self.sources.values() if isinstance(rows, Mixture) for step in rows.changes]
        return [step for step, _ in self.schedule] + inner

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

    def reweighted(self, step: int, weights: Mapping[str, Weight]) -> Mixture:
        """Return the mixture with other weights of some sources from `step` on, until the next entry of its schedule."""
        if unknown := weights.keys() - self.sources.keys():
            raise SamplerError(f"reweight {', '.join(sorted(unknown))}: the mixture has {', '.join(self.sources)}.")
        entries = {0: {name: weight for name, (weight, _) in self.sources.items()}, **dict(self.schedule)}
        entries[step] = {**entries[max(each for each in entries if each <= step)], **weights}
        sources = {name: (entries[0][name], rows) for name, (_, rows) in self.sources.items()}
        schedule = tuple((each, entries[each]) for each in sorted(entries) if each)
        return dataclasses.replace(self, sources=sources, schedule=schedule)

    def proportions(self, rows_before: Callable[[int], int]) -> Proportions:
        """Return how the rows are divided among the sources."""
        changes = {0: self._shares(), **{rows_before(step): self._shares(weights) for step, weights in self.schedule}}
        limits = [rows.num_rows for _, rows in self.sources.values()]
        return Proportions(list(changes.items()), limits, self.on_exhausted)


class MixtureSampler(StreamSampler):
    """Rows of every step of a mixture, as a pure function of (mixture, step, host).

    The mixture is one stream of rows; step k is the next `global_batch_size` of them, and host h of H reads rows h, h + H,
    h + 2H, ... of the step. Rows are numbered as in `MixtureSource`. Epochs of a source may end in the middle of a step.

    Args:
      mixture: Sources, their orders and weights.
      global_batch_size: Rows of a step, of all hosts together.
      host: This host, and the number of hosts.
      last_batch: For a mixture that ends: "drop" the rows that don't fill a step, or "fill" it with `FILL_ROW`s.
      schedule: Pairs (step, global_batch_size): rows of each step from that step on.
      cache_dir: Folder of exact orders; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: Arguments that don't fit together.
    """

    runs_on = True
    epochs = None
    steps_per_epoch = None

    def __init__(
        self,
        mixture: Mixture,
        *,
        global_batch_size: int,
        host: Host = Host(0, 1),
        last_batch: MixtureLastBatch = "drop",
        schedule: Iterable[tuple[int, int]] = (),
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(global_batch_size, schedule, host, host_blocks=False)
        if last_batch not in get_args(MixtureLastBatch):
            raise SamplerError(
                f"last_batch={last_batch!r}: a mixture takes one of {', '.join(get_args(MixtureLastBatch))}."
            )
        self.mixture, self.last_batch, self.cache_dir = mixture, last_batch, cache_dir
        self.num_instances = mixture.num_instances
        self.streams = ()
        self._paths: list[Path] = []  # of the streams
        self._children: dict[Proportions, list[Proportions | int]] = {}
        """For each mixture the mixtures in it, or the indices of its sources' streams."""
        self._proportions = self._add(mixture, "", 0, ())
        self.length = self._proportions.length
        if self.num_steps == 0:
            raise SamplerError(
                f"global_batch_size={self.global_batch_size} is more than the {self.length} rows of the mixture. Take a "
                "smaller batch, or last_batch='fill' for evaluation."
            )

    def _add(self, mixture: Mixture, prefix: str, first_row: int, path: Path) -> Proportions:
        """Append the streams of the sources of a mixture, whose names begin with `prefix`; return its proportions."""
        proportions = mixture.proportions(lambda step: count_drawn(path, self.batch_sizes.before(step)))
        children = self._children[proportions] = []
        for number, (name, (_, rows)) in enumerate(mixture.sources.items()):
            below = (*path, (proportions, number))
            if isinstance(rows, Mixture):
                children.append(self._add(rows, f"{prefix}{name}/", first_row, below))
            else:
                index, rows_at = len(self.streams), rows.rows_at(self.cache_dir)
                begin, span = partial(self._begin, index), partial(self._span, index)
                self.streams += (EpochStream(prefix + name, rows, first_row, begin, span, rows_at),)
                self._paths.append(below)
                children.append(index)
            first_row += rows.num_instances
        return proportions

    def reweighted(self, step: int, weights: Mapping[str, Weight]) -> Self:
        return type(self)(**self.__getstate__() | {"mixture": self.mixture.reweighted(step, weights)})

    @cached_property
    def num_steps(self) -> int | None:
        """Number of steps; None where they never end."""
        if self.length is None:
            return None
        sizes = self.batch_sizes
        return sizes.step_of(self.length) if self.last_batch == "drop" else sizes.step_of(self.length - 1) + 1

    @property
    def most_rows_off(self) -> float | None:
        """Rows that an outermost source may be away from its share, after any number of rows; None where weights change."""
        return self._proportions.bound

    @property
    def changes(self) -> list[int]:
        return [*super().changes, *self.mixture.changes]

    def steps_of_epochs(self, epochs: int | None) -> int:
        if self.num_steps is not None and epochs is None:
            return self.num_steps
        ends = [stream.span((epochs or 1) - 1) for stream in self.streams]
        return max((end.last + 1 for end in ends if end is not None and end.last < sys.maxsize), default=1)

    def _checked_step(self, step: int) -> int:
        step = super()._checked_step(step)
        if self.batch_sizes.before(step + 1) > _MOST_ROWS:
            raise RowIndexError(
                f"step={step}: expected a step below {self.batch_sizes.step_of(_MOST_ROWS)}. A mixture counts its rows up to "
                "2^62. Give a smaller step."
            )
        return step

    def _rows(self, step: int, indices: Ints) -> Ints:
        return self._draw(indices + self.batch_sizes.before(step))[-1]

    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        return BatchSlots(steps[which], slot, host, *self._draw(self.batch_sizes.begins(steps)[0][which] + slot))

    def _draw(self, indices: Ints) -> tuple[Ints, ...]:
        """Return what is drawn at some indices of the stream, int64 [n] each: the index of the source's stream, its epoch, the
        index in that epoch's order, and the row. Past the end they are -1, and the row is `FILL_ROW`."""
        streams, epochs, places, rows = drawn = tuple(np.full(len(indices), value) for value in (-1, -1, -1, FILL_ROW))
        at = np.arange(len(indices)) if self.length is None else np.flatnonzero(indices < self.length)
        waiting: list[tuple[Proportions | int, Ints, Ints]] = [(self._proportions, at, indices[at])]
        while waiting:
            node, at, numbers = waiting.pop()
            if not isinstance(node, int):
                sources, numbers = node.choose(numbers)
                parts = ((child, sources == source) for source, child in enumerate(self._children[node]))
                waiting += [(child, at[here], numbers[here]) for child, here in parts if here.any()]
                continue
            stream = self.streams[node]
            streams[at] = node
            epochs[at], places[at] = np.divmod(numbers, stream.source.num_instances)
            for epoch in np.unique(epochs[at]).tolist():
                here = at[epochs[at] == epoch]
                rows[here] = stream.rows_at(epoch, places[here]) + stream.first_row
        return drawn

    def _begin(self, source: int, step: int) -> tuple[int, int]:
        rows = count_drawn(self._paths[source], self.batch_sizes.before(step))
        return divmod(rows, self.streams[source].source.num_instances)

    def _span(self, source: int, epoch: int) -> EpochSpan | None:
        size = self.streams[source].source.num_instances
        end = None if self.num_steps is None else self.batch_sizes.before(self.num_steps)
        first, last = find_drawn(self._paths[source], np.array([epoch * size, epoch * size + size - 1])).tolist()
        if first < 0 or (end is not None and first >= end):
            return None
        rows, step = size, self.batch_sizes.step_of(first)
        if end is not None and not 0 <= last < end:  # it is cut off by the end
            last, rows = end - 1, count_drawn(self._paths[source], end) - epoch * size
        return EpochSpan(step, self.batch_sizes.step_of(last) if last >= 0 else sys.maxsize, rows)

    def _find(self, source: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        at = find_drawn(self._paths[source], indices + epoch * self.streams[source].source.num_instances)
        step = self.batch_sizes.steps_of(at)
        slot = at - self.batch_sizes.begins(step)[0]
        return np.where(at < 0, -1, step), slot, slot % self.host.count

    @property
    def data_key(self) -> str:
        return (
            f"MixtureSampler({self.mixture.data_key}, global_batch_size={self.global_batch_size}, "
            f"last_batch={self.last_batch!r}{self._schedule_text})"
        )
