"""Demand: requests, bytes and seconds of each host for the batch of each step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.layout import FILL_ROW
from grain_sft.sampling import Sampler
from grain_sft.simulate.cache import HostCache, Piece
from grain_sft.simulate.conditions import Conditions
from grain_sft.simulate.reads import Gather, Ranges, Reads
from grain_sft.storage import CacheOptions, file_stamp, remote_files, shard_cache
from grain_sft.types import Ints

_ROWS_AT_ONCE = 1 << 20  # rows whose demand is computed together


class _Ask(NamedTuple):
    """Ranges of bytes that one `Gather` requests together. A `Gather` is a set of reads that a batch makes at the same time."""

    gather: Gather
    ranges: Ranges
    checks: bool  # whether the ranges are the beginnings and ends of files, which a host reads to check the files


class Demand:
    """Demand of consecutive steps on some hosts, in arrays [steps, hosts].

    A cell is the batch of one step on one host. With 4 hosts, step 2 on host 3 is cell 2 * 4 + 3 = 11.

    Attributes:
      rows: int64 [n], numbers of all rows that these hosts read, except `FILL_ROW`.
      requests: int64, number of all requests, including checks.
      checks: int64, number of requests that check a file before its first read on a host.
      received: int64, bytes of the answers.
      local: int64, bytes of local files.
      seconds: float64, time to read the batch.
    """

    def __init__(self, steps: int, hosts: int, rows: Ints, conditions: Conditions) -> None:
        self.rows = rows
        self._conditions = conditions
        self.seconds = np.zeros((steps, hosts))
        self.requests, self.checks, self.received, self.local = np.zeros((4, steps, hosts), np.int64)

    def sums(self, cell: Ints, values: Ints | None = None) -> Ints:
        """Return the sum of `values` in each cell, int64 [steps, hosts].

        Args:
          cell: int64 [n], number of the cell of each value.
          values: int64 [n]. None means that every value is 1.
        """
        return np.bincount(cell, values, self.seconds.size).astype(np.int64).reshape(self.seconds.shape)

    def add_requests(self, requests: Ints, received: Ints, at_once: int, min_rounds: Ints | int = 0) -> None:
        """Add requests and the bytes of their answers, both int64 [steps, hosts].

        A host makes at most `at_once` requests at a time: 10 requests with `at_once` 4 take 3 rounds, each of `latency_ms`.
        They take at least `min_rounds` rounds.
        """
        speeds = self._conditions
        rounds = np.maximum(-(-requests // at_once), min_rounds)  # -(-a // b) is a / b, rounded up
        self.requests += requests
        self.received += received
        processor_ms = requests * speeds.request_ms * speeds.slowdown
        self.seconds += (rounds * speeds.latency_ms + processor_ms) / 1e3 + received / (speeds.host_mb * 1e6)


class DemandModel:
    """Model of the demand of some hosts of a run. It records what each host has cached and checked.

    A host requests each piece of a row, or each block that its shard cache lacks, in parts of 8 MiB. Before the first read of a
    file, the host checks both ends of the file. If the corpus does not state the version, the host also requests it.

    Attributes:
      hosts: int64, indices of the modelled hosts, ascending.
      scale: Number of the run's hosts divided by the number of `hosts`: 4 if 16 of 64 hosts are modelled.
      checked: For each gather, bool [hosts, files]: whether the host has checked the file.
      caches: A shard cache for each of `hosts`, by `CacheOptions`. Gathers with the same options share the caches.
    """

    def __init__(self, reads: Reads, sampler: Sampler, conditions: Conditions, hosts: Sequence[int]) -> None:
        self.reads = reads
        self.conditions = conditions
        self.hosts: Ints = np.array(hosts, np.int64)
        self.scale = sampler.host.count / len(hosts)
        self.caches: dict[CacheOptions | None, list[HostCache]] = {}
        for gather in reads.gathers:
            if (options := gather.options.cache) is not None:
                self.caches[options] = [HostCache(options) for _ in hosts]
        self._sampler = sampler
        self.checked = [np.zeros((len(hosts), len(gather.files)), np.bool_) for gather in reads.gathers]

    def demands(self, steps: range, min_steps: int = 1) -> Iterator[Demand]:
        """Yield the demand of `steps`, in parts of `min_steps` or more consecutive steps. A part reads about a million rows."""
        rows_of_step = max(self._sampler.batch_sizes.sizes) * len(self.hosts) // self._sampler.host.count
        # When a run begins, several threads may check the same file. `_checking_reads` finds these only in one part, so the
        # first part has all steps that are made then.
        first_steps = self.conditions.prefetch + self.conditions.threads
        steps_at_once = max(min_steps, first_steps, _ROWS_AT_ONCE // max(1, rows_of_step))
        for first in range(steps.start, steps.stop, steps_at_once):
            # In a turn, each thread makes one batch. The first `prefetch` batches of the run take this many turns.
            turns = -(-self.conditions.prefetch // self.conditions.threads) if first == steps.start else 0
            yield self._demand(range(first, min(first + steps_at_once, steps.stop)), turns)

    def _demand(self, steps: range, turns: int) -> Demand:
        """Return the demand of `steps`, and record what they cache and check. `turns` is as in `_checking_reads`."""
        slots = self._sampler.slots(steps, hosts=self.hosts.tolist())
        has_row = slots.row != FILL_ROW
        rows = slots.row[has_row]
        host = self.hosts.searchsorted(slots.host[has_row])
        cells = (slots.step[has_row] - steps.start) * len(self.hosts) + host
        demand = Demand(len(steps), len(self.hosts), rows, self.conditions)
        asks: list[_Ask] = []
        for number, ranges in self.reads.ranges(rows, cells):
            asks += self._asks(demand, number, ranges.select(np.argsort(ranges.cell, kind="stable")), turns)
        from_caches = self._read_from_caches(demand, asks)
        for number, ask in enumerate(asks):
            if number in from_caches:
                requests, received = from_caches[number]
                # a shard cache fetches about `BATCH_BYTES` at a time, so more bytes take more rounds
                min_rounds = -(-received // shard_cache.BATCH_BYTES)
            else:
                requests = demand.sums(ask.ranges.cell, -(-ask.ranges.size // remote_files.PART_BYTES))
                received = demand.sums(ask.ranges.cell, ask.ranges.size)
                min_rounds = np.zeros_like(requests)
            demand.add_requests(requests, received, ask.gather.options.requests, min_rounds)
            if ask.checks:
                demand.checks += requests
        return demand

    def _asks(self, demand: Demand, number: int, ranges: Ranges, turns: int) -> list[_Ask]:
        """Return what gather `number` requests: both ends of each file that it checks, then the remote ranges of `ranges`.

        `ranges` are sorted by cell. The gather's reads of local files, and its requests for the versions of files, are added to
        `demand`.
        """
        gather = self.reads.gathers[number]
        remote = gather.remote[ranges.file]
        if not remote.all():
            local = demand.sums(ranges.cell[~remote], ranges.size[~remote])
            demand.local += local
            demand.seconds += local / (self.conditions.host_mb * 1e6)
            ranges = ranges.select(remote)
        cell, file = self._checking_reads(number, ranges.cell, ranges.file, turns)
        versions = demand.sums(cell[gather.unversioned[file]])
        demand.add_requests(versions, np.zeros_like(versions), gather.options.requests)
        demand.checks += versions
        sizes = np.array([stamp.size - stamp.data_offset for stamp in gather.files], np.int64)[file]
        end_bytes = np.minimum(file_stamp.DIGEST_BYTES, sizes)
        first_offset = gather.offsets[file]
        last_offset = first_offset + sizes - end_bytes
        both_offsets = np.stack([first_offset, last_offset], axis=1).reshape(-1)
        both_ends = Ranges(cell.repeat(2), file.repeat(2), both_offsets, end_bytes.repeat(2))
        return [_Ask(gather, both_ends, True), _Ask(gather, ranges, False)]

    def _checking_reads(self, number: int, cell: Ints, file: Ints, turns: int) -> tuple[Ints, Ints]:
        """Return the cell and the file of each read that checks its file, sorted by cell and file.

        The arguments `cell` and `file` have an item for each read of a remote file. Usually, only the first read of a file on a
        host checks the file. In the first `turns` turns of a run, the threads of a host make one batch each, at the same time.
        With 2 threads, turn 0 makes steps 0 and 1. If both steps read a new file, both check the file.
        """
        checked = self.checked[number]
        num_files = checked.shape[1]
        cell, file = np.divmod(np.unique(cell * num_files + file), num_files)
        step, host = np.divmod(cell, len(self.hosts))
        turn = np.minimum(step // self.conditions.threads, turns)  # all later steps count as turn `turns`
        _, first, inverse = np.unique(host * num_files + file, return_index=True, return_inverse=True)
        first_read = first[inverse]  # for each read, the index of the first read of the same file on the same host
        is_first = np.arange(len(cell)) == first_read
        is_concurrent = (turn == turn[first_read]) & (turn < turns)
        checks = (is_first | is_concurrent) & ~checked[host, file]
        checked[host, file] = True
        return cell[checks], file[checks]

    def _read_from_caches(self, demand: Demand, asks: Sequence[_Ask]) -> dict[int, Ints]:
        """Return the requests and the received bytes of each ask that reads through a shard cache.

        The result has an array int64 [2, steps, hosts] by index in `asks`.
        """
        pieces: dict[tuple[int, int], list[Piece]] = {}  # byte ranges that a cache reads, by cell and index of the ask
        counts: dict[int, Ints] = {}
        for number, ask in enumerate(asks):
            if ask.gather.options.cache is None:  # its ranges are requested from the bucket
                continue
            counts[number] = np.zeros((2, *demand.seconds.shape), np.int64)
            files = [(stamp.path, stamp.size) for stamp in ask.gather.files]
            for cell, file, offset, size in zip(*(column.tolist() for column in ask.ranges), strict=True):
                pieces.setdefault((cell, number), []).append((*files[file], offset, size))
        # each host reads one step after the other, and in a step one ask after the other
        for cell, number in sorted(pieces):
            step, host = divmod(cell, len(self.hosts))
            cache = self.caches[asks[number].gather.options.cache][host]
            counts[number][:, step, host] = cache.read(pieces[cell, number])
        return counts
