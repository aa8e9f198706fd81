"""Sampler of a mixture of several sources of rows."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal, NoReturn, Self, get_args

import numpy as np

from grain_sft.arguments import check_choice
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, groups
from grain_sft.sampling.batch_sizes import MOST_ROWS, BatchSizes
from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture import Mixture, Weight
from grain_sft.sampling.orders import CacheDir
from grain_sft.sampling.proportions import Path, Proportions, count_drawn, find_drawn
from grain_sft.sampling.stream_sampler import StreamSampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream
from grain_sft.types import Ints

MixtureLastBatch = Literal["drop", "fill"]


class NoRowLeftError(SamplerError):
    """A step needs a row of a source that has none left.

    `args` are the step and the rest of the message, so that `MappedSampler`, which renumbers steps, can state its own number.
    """

    def __str__(self) -> str:
        step, text = self.args
        return f"step {step}: {text}"


class MixtureSampler(StreamSampler):
    """Rows of every step of a mixture, as a pure function of (mixture, step, host).

    Each step is the next `global_batch_size` rows of the mixture, and host h of H reads slots h, h + H, h + 2H, ... of the
    step. Row numbers count through all sources, as in `MixtureSource`. Epochs of a source may end in the middle of a step.

    Args:
      mixture: Sources, their orders and weights.
      global_batch_size: Number of rows of a step, of all hosts together.
      host: This host, and the number of hosts.
      last_batch: Treatment of the last rows of a mixture that ends, if they don't fill a step: "drop" leaves them out, "fill"
        fills the step with `FILL_ROW`s, which are padding.
      schedule: Pairs (step, global_batch_size): number of rows of each step from that step on.
      cache_dir: Folder of the files of orders such as `olmo`; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: Arguments that don't fit together.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        global_batch_size: int,
        host: Host = Host(0, 1),
        last_batch: MixtureLastBatch = "drop",
        schedule: Iterable[tuple[int, int]] = (),
        cache_dir: CacheDir = None,
    ) -> None:
        super().__init__(BatchSizes(global_batch_size, schedule), host)
        check_choice("last_batch of a mixture", last_batch, get_args(MixtureLastBatch), SamplerError)
        self.mixture, self.last_batch, self.cache_dir = mixture, last_batch, cache_dir
        self.num_instances = mixture.num_instances
        self.streams = ()
        self._paths: list[Path] = []  # for each stream, the path from `mixture` to its source
        self._children: dict[Proportions, list[Proportions | int]] = {}
        """For each mixture, an entry for each source: its `Proportions` if it is a mixture, else the index of its stream."""
        self._proportions = self._add(mixture, "", 0, ())
        self.length = self._proportions.length
        if self.num_steps == 0:
            problem = f"global_batch_size={self.global_batch_size} is more than the {self.length} rows of the mixture"
            raise SamplerError(f"{problem}. Take a smaller batch, or last_batch='fill' for evaluation.")

    def _add(self, mixture: Mixture, prefix: str, first_row: int, path: Path) -> Proportions:
        """Append the streams of a mixture's sources, and return its proportions.

        `path` leads from the sampler's mixture to this mixture. The names of the streams begin with `prefix`, such as "code/"
        for the sources of a mixture "code".
        """
        # a schedule of weights states steps, and the proportions need rows of `mixture`
        proportions = mixture.proportions(lambda step: count_drawn(path, self.batch_sizes.before(step)))
        children = self._children[proportions] = []
        if proportions.failure is not None:
            [row] = find_drawn(path, np.array(proportions.failure[:1])).tolist()
            if row >= 0:  # else the outermost mixture never draws the row
                self.failing_step = min(self.failing_step, self.batch_sizes.step_of(row))
        for number, (name, source, inner) in enumerate(mixture.parts()):
            path_to_source = (*path, (proportions, number))
            if inner is not None:
                child = self._add(inner, f"{prefix}{name}/", first_row, path_to_source)
                if inner.schedule and child.length is not None:
                    problem = f"source {prefix + name!r} is a mixture that ends and has a schedule"
                    reason = "its length would depend on the steps that draw its rows, and vice versa"
                    raise SamplerError(f"{problem}: {reason}. Remove its schedule, or the epochs of its sources.")
                children.append(child)
                first_row += inner.num_instances
            elif source is not None:
                index = len(self.streams)
                begin, span = partial(self._begin, index), partial(self._span, index)
                rows_at = source.rows_at(self.cache_dir)
                self.streams += (EpochStream(prefix + name, source, first_row, begin, span, rows_at),)
                self._paths.append(path_to_source)
                children.append(index)
                first_row += source.num_instances
        return proportions

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Self:
        return self._with(mixture=self.mixture.continued(starts))

    def reweighted(self, changes: Sequence[tuple[int, Mapping[str, Weight]]]) -> Self:
        return self._with(mixture=self.mixture.reweighted(changes))

    @cached_property
    def num_steps(self) -> int | None:
        if self.length is None:
            return None
        full_steps = self.batch_sizes.step_of(self.length)
        has_more = self.batch_sizes.before(full_steps) < self.length
        return full_steps + 1 if has_more and self.last_batch == "fill" else full_steps

    @property
    def most_rows_off(self) -> float | None:
        """Maximum number of rows by which a source of the outermost mixture differs from its share; None if weights change."""
        return self._proportions.bound

    @property
    def changes(self) -> list[int]:
        return [*super().changes, *self.mixture.changes]

    def steps_of_epochs(self, epochs: int | None) -> int:
        """Return the number of steps that read `epochs` epochs of each source, or all epochs of a source that has fewer."""
        epochs = self._checked_epochs(epochs)
        if self.num_steps is not None and epochs is None:
            return self.num_steps
        sources = [stream.source for stream in self.streams]
        # last epoch to read of each source; without `epochs`, the epoch in which the source starts
        last_epochs = [min(epochs, each.epochs or epochs) - 1 if epochs else each.start[0] for each in sources]
        spans = [stream.span(epoch) for stream, epoch in zip(self.streams, last_epochs, strict=True)]
        ends = [span.last + 1 for span in spans if span is not None and span.last < sys.maxsize]
        # Sources that never finish the epoch do not count. If no source counts, the result is the number of steps of the run,
        # or 1 if the run has no end.
        return max(ends, default=self.num_steps or 1)

    def _checked_step(self, step: int) -> int:
        step = super()._checked_step(step)
        if self.batch_sizes.before(step + 1) > MOST_ROWS:
            end = self.batch_sizes.step_of(MOST_ROWS)
            raise RowIndexError(f"step={step}: expected a step below {end}. A mixture counts its rows up to 2^62.")
        return step

    def _rows(self, step: int, indices: Ints) -> Ints:
        return self._draw(indices + self.batch_sizes.before(step))[-1]

    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        return BatchSlots(steps[which], slot, host, *self._draw(self.batch_sizes.of_steps(steps).before[which] + slot))

    def _draw(self, indices: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the columns source, epoch, index and row of `BatchSlots` for the rows at `indices` of the mixture.

        Past the end of the mixture, the values are -1, -1, -1 and `FILL_ROW`.
        """
        sources, epochs, order_indices = (np.full(len(indices), -1) for _ in range(3))
        rows = np.full(len(indices), FILL_ROW)
        drawn = np.arange(len(indices)) if self.length is None else np.flatnonzero(indices < self.length)
        sources[drawn], rows_of_streams = self._choose(self._proportions, indices[drawn], indices[drawn])
        for number, selected in groups(sources[drawn]):
            stream, entries = self.streams[number], drawn[selected]
            rows_of_stream = rows_of_streams[selected] + stream.source.rows_before
            epochs[entries], order_indices[entries] = np.divmod(rows_of_stream, stream.source.num_instances)
            for epoch, of_epoch in groups(epochs[entries]):
                rows[entries[of_epoch]] = stream.rows_at(epoch, order_indices[entries[of_epoch]]) + stream.first_row
        return sources, epochs, order_indices, rows

    def _choose(self, mixture: Proportions, rows: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Return the stream of each row of a mixture, and the number of earlier rows of that stream in the run: int64 [n] each.

        `rows` are row numbers in `mixture`. `indices` are the numbers of the same rows in the sampler's mixture.
        """
        if mixture.failure is not None and (missing := indices[rows >= mixture.failure[0]]).size:
            self._fail((mixture, mixture.failure[1]), int(missing.min()))
        sources, rows_of_sources = mixture.choose(rows)
        streams = np.empty_like(sources)
        for source, child in enumerate(self._children[mixture]):
            if isinstance(child, int):
                streams[sources == source] = child
            else:
                selected = np.flatnonzero(sources == source)
                inner = self._choose(child, rows_of_sources[selected], indices[selected])
                streams[selected], rows_of_sources[selected] = inner
        return streams, rows_of_sources

    def _fail(self, lacking: tuple[Proportions, int], index: int) -> NoReturn:
        """Raise a `NoRowLeftError`: at row `index` of `self.mixture`, the run draws from a source that has no row left.

        `lacking` is this source, as an entry of a `Path`.
        """
        names = [stream.name for stream, path in zip(self.streams, self._paths, strict=True) if lacking in path]
        sources = f"source {names[0]} has" if len(names) == 1 else f"sources {' and '.join(names)} have"
        problem = f"{sources} no row left after its epochs, and on_exhausted is 'fail'"
        fix = "End the run before this step, or amend it with other weights from an earlier step."
        raise NoRowLeftError(self.batch_sizes.step_of(index), f"{problem}. {fix}")

    def _begin(self, number: int, step: int) -> tuple[int, int]:
        source = self.streams[number].source
        rows = count_drawn(self._paths[number], self.batch_sizes.before(step))
        return divmod(rows + source.rows_before, source.num_instances)

    def _span(self, number: int, epoch: int) -> EpochSpan | None:
        source, path = self.streams[number].source, self._paths[number]
        # Begin and end of the epoch, as row numbers of the stream. Row 0 is the first row that the run reads.
        epoch_begin = epoch * source.num_instances - source.rows_before
        begin, end = max(0, epoch_begin), epoch_begin + source.num_instances
        if end <= 0:
            return None
        # first and last row of the epoch, as indices of the mixture; -1 if the mixture never draws the row
        first, last = find_drawn(path, np.array([begin, end - 1])).tolist()
        run_end = sys.maxsize if self.num_steps is None else self.batch_sizes.before(self.num_steps)
        if first < 0 or first >= run_end:
            return None
        if 0 <= last < run_end:
            last_step = self.batch_sizes.step_of(last)
            num_rows = end - begin
        else:  # the run ends inside the epoch, or it has no end and never draws the last row of the epoch
            last_step = sys.maxsize if self.num_steps is None else self.num_steps - 1
            num_rows = count_drawn(path, min(run_end, MOST_ROWS)) - begin
        return EpochSpan(self.batch_sizes.step_of(first), last_step, num_rows, start=begin - epoch_begin)

    def _find(self, number: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        source = self.streams[number].source
        rows = indices + (epoch * source.num_instances - source.rows_before)  # rows of the stream, as in `_span`
        rows_of_mixture = find_drawn(self._paths[number], rows)
        steps = self.batch_sizes.steps_of(rows_of_mixture)
        before, sizes = self.batch_sizes.of_steps(steps)
        slots = rows_of_mixture - before
        return np.where(rows_of_mixture < 0, -1, steps), slots, self._hosts(slots, sizes)

    @property
    def data_key(self) -> str:
        sizes = f"global_batch_size={self.global_batch_size}, last_batch={self.last_batch!r}"
        return f"MixtureSampler({self.mixture.data_key}, {sizes}{self._schedule_text})"
