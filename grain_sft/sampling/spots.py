"""Spots: which rows stand at many steps at once, and, the other way round, at which steps rows stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import FILL_ROW
from grain_sft.sampling.sampler import IndexSampler

Ints = npt.NDArray[np.int64]

_SCANNED = 1 << 20  # places of an order looked at together


class Spots(NamedTuple):
    """Places of global batches and what stands there, as columns, int64 [spots]; by step, and then by `row`.

    Attributes:
      step: from 0.
      epoch: from 0; of the row, where a step straddles two.
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


def spots_of_steps(sampler: IndexSampler, steps: range, hosts: Sequence[int]) -> Spots:
    """All that some `hosts` of the sampler's host count read at `steps`, each of which the sampler has."""
    offset, row, host, first = _places_of_a_step(sampler, hosts)
    numbers = np.arange(steps.start, steps.stop)
    stream = numbers[:, np.newaxis] * sampler._step_size + offset
    epoch, place = np.divmod(stream.reshape(-1), sampler._epoch_size)
    place += np.tile(first, len(numbers))
    instance = np.full(len(place), FILL_ROW, np.int64)
    for each in np.unique(epoch).tolist():
        real = np.flatnonzero((epoch == each) & (place < sampler.num_instances))
        instance[real] = sampler._rows_at(each, place[real])
    return Spots(numbers.repeat(len(row)), epoch, np.tile(row, len(numbers)), np.tile(host, len(numbers)), instance)


def spots_of_instances(sampler: IndexSampler, instances: Ints, epochs: Iterable[int], hosts: Sequence[int]) -> Spots:
    """Where `instances` stand in some epochs: all places of these are looked at, a million or so at a time (milliseconds;
    in order "shuffle", which is computed place by place, seconds)."""
    count, mine = sampler.host.count, sampler.rows_per_host
    blocks = sampler.order == "maxtext"
    found = []
    for epoch in epochs:
        for host in hosts if blocks else (0,):
            first = host * (sampler.num_instances // count) if blocks else 0
            stop = min(sampler._epoch_size, sampler.num_instances - first)
            for begin in range(0, stop, _SCANNED):
                places = np.arange(begin, min(begin + _SCANNED, stop))
                rows = sampler._rows_at(epoch, places + first)
                hit = np.flatnonzero(np.isin(rows, instances))
                step, offset = np.divmod(epoch * sampler._epoch_size + places[hit], sampler._step_size)
                reader = np.full(len(hit), host) if blocks else offset % count
                row = offset + host * mine if blocks else offset
                found.append(Spots(step, np.full(len(hit), epoch), row, reader, rows[hit]))
    spots = Spots(*(np.concatenate([np.zeros(0, np.int64), *columns]) for columns in zip(*found, strict=True)))
    kept = np.isin(spots.host, hosts)
    if sampler.num_steps is not None:
        kept &= spots.step < sampler.num_steps
    order = np.flatnonzero(kept)
    order = order[np.lexsort((spots.row[order], spots.step[order]))]
    return Spots(*(column[order] for column in spots))


def place_of_step(sampler: IndexSampler, step: int) -> tuple[int, int]:
    """The epoch in which `step` begins, and how many rows of it, of all hosts, come before."""
    epoch, into = divmod(step * sampler._step_size, sampler._epoch_size)
    return epoch, into * (sampler.global_batch_size // sampler._step_size)


def steps_of_epochs(sampler: IndexSampler, epochs: int) -> int:
    """Whole steps in so many epochs."""
    return epochs * sampler._epoch_size // sampler._step_size


def _places_of_a_step(sampler: IndexSampler, hosts: Sequence[int]) -> tuple[Ints, Ints, Ints, Ints]:
    """Of every place that `hosts` read in a step, by its place in the global batch: the offset in the stream that it is
    taken from, that place, the host, and where in an epoch the stream begins."""
    count, mine = sampler.host.count, sampler.rows_per_host
    host = np.array(sorted(hosts), np.int64).repeat(mine)
    local = np.tile(np.arange(mine), len(hosts))
    if sampler.order == "maxtext":
        return local, host * mine + local, host, host * (sampler.num_instances // count)
    row = host + count * local
    order = np.argsort(row)
    return row[order], row[order], host[order], np.zeros(len(row), np.int64)
