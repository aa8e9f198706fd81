"""Spots: which rows stand at many steps at once, and, the other way round, at which steps rows stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import FILL_ROW
from grain_sft.sampling.batches import Batches
from grain_sft.sampling.mixture_sampler import MixtureSampler
from grain_sft.sampling.orders_table import Order
from grain_sft.sampling.sampler import IndexSampler

Ints = npt.NDArray[np.int64]

_SCANNED = 1 << 20  # places of an order looked at together


class Spots(NamedTuple):
    """Places of global batches and what stands there, as columns, int64 [spots]; by step, and then by `row`.

    Attributes:
      step: from 0.
      epoch: from 0; of the row, where a step straddles two; of its source, in a mixture.
      row: place in the global batch. Host h of H has places h, h + H, h + 2H, ...; in order "maxtext", where hosts read
        streams of their own, host h has the places from h * rows_per_host on.
      host: which host reads it.
      instance: number of the row in the layout; `FILL_ROW` where a filled batch has none.
    """

    step: Ints
    epoch: Ints
    row: Ints
    host: Ints
    instance: Ints


def spots_of_steps(sampler: IndexSampler | MixtureSampler, steps: range, hosts: Sequence[int]) -> Spots:
    """All that some `hosts` of the sampler's host count read at `steps`, each of which the sampler has."""
    numbers = np.arange(steps.start, steps.stop)
    at, row, host = places_of_steps(sampler, numbers, hosts)
    if isinstance(sampler, MixtureSampler):
        return _of_mixture(sampler, numbers[at], row, host, sampler.batch_sizes.begins(numbers)[0][at] + row)
    begun, first = sampler._epochs.begins(numbers)
    epoch, place = begun[at], first[at]
    if sampler._blocks:
        mine = sampler.batch_sizes.begins(numbers)[1][at] // sampler.host.count
        place = place + row - host * mine
    else:
        place = place + row
    if sampler.runs_on:
        later, place = np.divmod(place, sampler._stream_rows)
        epoch = epoch + later
    if sampler._blocks:
        place = place + host * (sampler.num_instances // sampler.host.count)
    instance = np.full(len(place), FILL_ROW, np.int64)
    for each in np.unique(epoch).tolist():
        real = np.flatnonzero((epoch == each) & (place < sampler.num_instances))
        instance[real] = sampler._rows_at(each, place[real])
    return Spots(numbers[at], epoch, row, host, instance)


def _of_mixture(sampler: MixtureSampler, step: Ints, row: Ints, host: Ints, place: Ints) -> Spots:
    """What stands at places of a mixture's stream of rows."""
    instance, epoch = np.full(len(place), FILL_ROW, np.int64), np.full(len(place), -1, np.int64)
    length = sampler.stream.length
    real = np.flatnonzero(place < length) if length is not None else np.arange(len(place))
    drawn = sampler.stream.draw(place[real])
    instance[real], epoch[real] = drawn.instance, drawn.epoch
    return Spots(step, epoch, row, host, instance)


def spots_in_mixture(sampler: MixtureSampler, instances: Ints, epochs: Sequence[int], hosts: Sequence[int]) -> Spots:
    """Where `instances`, numbered through all sources, stand in the first so many epochs of each source."""
    nothing = np.zeros(0, np.int64)
    found = [Spots(nothing, nothing, nothing, nothing, nothing)]
    for leaf, count in zip(sampler.leaves, epochs, strict=True):
        size = leaf.rows.num_instances
        mine = instances[(instances >= leaf.first) & (instances < leaf.first + size)] - leaf.first
        for epoch in range(count) if len(mine) else ():
            for places, rows in scan(leaf.order, epoch, 0, size, mine):
                at = leaf.find(places + epoch * size)
                at, rows = at[at >= 0], rows[at >= 0]
                step = sampler.batch_sizes.steps_of(at)
                row = at - sampler.batch_sizes.begins(step)[0]
                found.append(Spots(step, np.full(len(at), epoch), row, row % sampler.host.count, rows + leaf.first))
    return in_order(found, hosts, sampler.num_steps)


def spots_of_instances(sampler: IndexSampler, instances: Ints, epochs: Iterable[int], hosts: Sequence[int]) -> Spots:
    """Where `instances` stand in some epochs: all places of these are looked at, a million or so at a time (milliseconds;
    in order "shuffle", which is computed place by place, seconds)."""
    count = sampler.host.count
    found = []
    for epoch in epochs:
        for reader in hosts if sampler._blocks else (0,):
            first = reader * (sampler.num_instances // count) if sampler._blocks else 0
            for places, rows in scan(sampler._rows_at, epoch, first, first + sampler._stream_rows, instances):
                step, offset = sampler._epochs.find(epoch, places - first)
                there = step >= 0
                step, row, rows = step[there], offset[there], rows[there]
                host = row % count
                if sampler._blocks:
                    host = np.full(len(row), reader)
                    row = row + reader * (sampler.batch_sizes.begins(step)[1] // count)
                found.append(Spots(step, np.full(len(row), epoch), row, host, rows))
    return in_order(found, hosts, sampler.num_steps)


def scan(rows_at: Order, epoch: int, start: int, stop: int, instances: Ints) -> Iterator[tuple[Ints, Ints]]:
    """The places from `start` to `stop` of an epoch at which one of `instances` stands, and which; some at a time."""
    for begin in range(start, stop, _SCANNED):
        places = np.arange(begin, min(begin + _SCANNED, stop))
        rows = rows_at(epoch, places)
        hit = np.flatnonzero(np.isin(rows, instances))
        yield places[hit], rows[hit]


def in_order(found: Sequence[Spots], hosts: Sequence[int], num_steps: int | None) -> Spots:
    """All that was found, by step and row: of these hosts, and of steps there are."""
    spots = Spots(*(np.concatenate([np.zeros(0, np.int64), *columns]) for columns in zip(*found, strict=True)))
    kept = np.isin(spots.host, hosts)
    if num_steps is not None:
        kept &= spots.step < num_steps
    order = np.flatnonzero(kept)
    order = order[np.lexsort((spots.row[order], spots.step[order]))]
    return Spots(*(column[order] for column in spots))


def places_of_steps(sampler: Batches, steps: Ints, hosts: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """Of every place in the batches of `steps` that some hosts read: the number of its step in `steps`, its place in the
    global batch, and the host."""
    sizes, count = sampler.batch_sizes.begins(steps)[1], sampler.host.count
    at = np.arange(len(steps)).repeat(sizes)
    row = np.arange(len(at)) - (np.cumsum(sizes) - sizes).repeat(sizes)
    host = row // (sizes[at] // count) if sampler._blocks else row % count
    if len(hosts) < count:
        kept = np.isin(host, np.array(hosts, np.int64))
        at, row, host = at[kept], row[kept], host[kept]
    return at, row, host
