"""MixtureSampler: rows of several sources, each in its own order, as one stream that is cut into steps."""

import os
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Literal, NoReturn, Self

import numpy as np

from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.batch_sizes import BatchSizes, check_choice
from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture import Mixture, Weight
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.proportions import Path, Proportions, count_drawn, find_drawn
from grain_sft.sampling.stream_sampler import StreamSampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream

MixtureLastBatch = Literal["drop", "fill"]

_MOST_ROWS = 1 << 62  # of the stream: row numbers in it are int64


class NoRowLeftError(SamplerError):
    """A step needs a row of a source that has none left. Its arguments are the step and the text that follows it."""

    def __str__(self) -> str:
        step, text = self.args
        return f"step {step}: {text}"


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
        super().__init__(BatchSizes(global_batch_size, schedule), host, host_blocks=False)
        check_choice("last_batch of a mixture", last_batch, MixtureLastBatch)
        self.mixture, self.last_batch, self.cache_dir = mixture, last_batch, cache_dir
        self.num_instances = mixture.num_instances
        self.streams = ()
        self._paths: list[Path] = []  # one of each stream
        self._children: dict[Proportions, list[Proportions | int]] = {}
        """For each mixture the mixtures in it, or the indices of its sources' streams."""
        self._proportions = self._add(mixture, "", 0, ())
        self.length = self._proportions.length
        if self.num_steps == 0:
            found = f"global_batch_size={self.global_batch_size} is more than the {self.length} rows of the mixture"
            raise SamplerError(f"{found}. Take a smaller batch, or last_batch='fill' for evaluation.")

    def _add(self, mixture: Mixture, prefix: str, first_row: int, path: Path) -> Proportions:
        """Append the streams of the sources of a mixture, whose names begin with `prefix`; return its proportions."""
        proportions = mixture.proportions(lambda step: count_drawn(path, self.batch_sizes.before(step)))
        children = self._children[proportions] = []
        for number, (name, source, inner) in enumerate(mixture.parts()):
            below = (*path, (proportions, number))
            if inner is not None:
                child = self._add(inner, f"{prefix}{name}/", first_row, below)
                if inner.schedule and child.length is not None:
                    raise SamplerError(
                        f"source {prefix + name!r} is a mixture that ends and has a schedule: its number of rows would depend "
                        "on this mixture, and vice versa. Remove its schedule, or the epochs of its sources."
                    )
                children.append(child)
                first_row += inner.num_instances
            elif source is not None:
                index = len(self.streams)
                begin, span = partial(self._begin, index), partial(self._span, index)
                rows_at = source.rows_at(self.cache_dir)
                self.streams += (EpochStream(prefix + name, source, first_row, begin, span, rows_at),)
                self._paths.append(below)
                children.append(index)
                first_row += source.num_instances
        return proportions

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Self:
        return type(self)(**self.__getstate__() | {"mixture": self.mixture.continued(starts)})

    def reweighted(self, step: int, weights: Mapping[str, Weight]) -> Self:
        return type(self)(**self.__getstate__() | {"mixture": self.mixture.reweighted(step, weights)})

    @cached_property
    def num_steps(self) -> int | None:
        """Number of steps; None where they never end."""
        if self.length is None:
            return None
        full = self.batch_sizes.step_of(self.length)
        return full + (self.last_batch == "fill" and self.batch_sizes.before(full) < self.length)

    @property
    def most_rows_off(self) -> float | None:
        """Rows that a source, or a mixture as a source, may be away from its share at any row; None where weights change."""
        return self._proportions.bound

    @property
    def changes(self) -> list[int]:
        return [*super().changes, *self.mixture.changes]

    def steps_of_epochs(self, epochs: int | None) -> int:
        if self.num_steps is not None and epochs is None:
            return self.num_steps
        ends = [stream.span(epochs - 1 if epochs else stream.source.start[0]) for stream in self.streams]
        return max((end.last + 1 for end in ends if end is not None and end.last < sys.maxsize), default=1)

    def _checked_step(self, step: int) -> int:
        step = super()._checked_step(step)
        if self.batch_sizes.before(step + 1) > _MOST_ROWS:
            least = self.batch_sizes.step_of(_MOST_ROWS)
            raise RowIndexError(f"step={step}: expected a step below {least}. A mixture counts its rows up to 2^62.")
        return step

    def _rows(self, step: int, indices: Ints) -> Ints:
        return self._draw(indices + self.batch_sizes.before(step))[-1]

    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        return BatchSlots(steps[which], slot, host, *self._draw(self.batch_sizes.begins(steps)[0][which] + slot))

    def _draw(self, indices: Ints) -> tuple[Ints, ...]:
        """Return the rows drawn at `indices` of the mixture as columns, int64 [n] each: the number of the source's stream, the
        epoch, the index in its order, and the row. Past the end, these are -1, -1, -1 and `FILL_ROW`."""
        streams, epochs, places, rows = drawn = tuple(np.full(len(indices), value) for value in (-1, -1, -1, FILL_ROW))
        at = np.arange(len(indices)) if self.length is None else np.flatnonzero(indices < self.length)
        waiting: list[tuple[Proportions | int, Ints, Ints]] = [(self._proportions, at, indices[at])]
        while waiting:
            node, at, numbers = waiting.pop()
            if not isinstance(node, int):
                if node.failure is not None and numbers.max(initial=-1) >= node.failure[0]:
                    self._fail(node, int(indices[at][numbers >= node.failure[0]].min()))
                sources, numbers = node.choose(numbers)
                parts = ((child, sources == source) for source, child in enumerate(self._children[node]))
                waiting += [(child, at[here], numbers[here]) for child, here in parts if here.any()]
                continue
            stream = self.streams[node]
            streams[at] = node
            epochs[at], places[at] = np.divmod(numbers + stream.source.rows_before, stream.source.num_instances)
            for epoch in np.unique(epochs[at]).tolist():
                here = at[epochs[at] == epoch]
                rows[here] = stream.rows_at(epoch, places[here]) + stream.first_row
        return drawn

    def _fail(self, proportions: Proportions, index: int) -> NoReturn:
        """Raise the error of the row at an index of the mixture, for which a source has no row left."""
        assert proportions.failure is not None
        lacking = (proportions, proportions.failure[1])
        names = [stream.name for stream, path in zip(self.streams, self._paths, strict=True) if lacking in path]
        found = f"source {' and '.join(names)} has no row left after its epochs, and on_exhausted is 'fail'"
        expected = "End the run before this step, or amend it with other weights from an earlier one."
        raise NoRowLeftError(self.batch_sizes.step_of(index), f"{found}. {expected}")

    def _begin(self, source: int, step: int) -> tuple[int, int]:
        stream = self.streams[source].source
        rows = count_drawn(self._paths[source], self.batch_sizes.before(step))
        return divmod(rows + stream.rows_before, stream.num_instances)

    def _span(self, source: int, epoch: int) -> EpochSpan | None:
        stream = self.streams[source].source
        begin = epoch * stream.num_instances - stream.rows_before  # in rows of the stream, from its start
        least, most = max(0, begin), begin + stream.num_instances
        if most <= 0:
            return None
        end = None if self.num_steps is None else self.batch_sizes.before(self.num_steps)
        first, last = find_drawn(self._paths[source], np.array([least, most - 1])).tolist()
        if first < 0 or (end is not None and first >= end):
            return None
        rows, step = most - least, self.batch_sizes.step_of(first)
        if end is not None and not 0 <= last < end:  # the end of the run cuts the epoch off
            last, rows = end - 1, count_drawn(self._paths[source], end) - least
        return EpochSpan(step, self.batch_sizes.step_of(last) if last >= 0 else sys.maxsize, rows, least - begin)

    def _find(self, source: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        stream = self.streams[source].source
        numbers = indices + (epoch * stream.num_instances - stream.rows_before)
        at = np.where(numbers < 0, -1, find_drawn(self._paths[source], np.maximum(numbers, 0)))
        step = self.batch_sizes.steps_of(at)
        before, sizes = self.batch_sizes.begins(step)
        return np.where(at < 0, -1, step), at - before, self._hosts(at - before, sizes)

    @property
    def data_key(self) -> str:
        return (
            f"MixtureSampler({self.mixture.data_key}, global_batch_size={self.global_batch_size}, "
            f"last_batch={self.last_batch!r}{self._schedule_text})"
        )
