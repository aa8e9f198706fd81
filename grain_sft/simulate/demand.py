"""Demand: requests, bytes and time of each host for the batch of each step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.layout import FILL_ROW
from grain_sft.sampling import Sampler
from grain_sft.simulate.cache import HostCache, Piece
from grain_sft.simulate.conditions import Conditions
from grain_sft.simulate.reads import Gather, Ints, Ranges, Reads
from grain_sft.storage import DIGEST_BYTES, CacheOptions, remote_files, shard_cache

_ROWS_AT_ONCE = 1 << 20


class _Ask(NamedTuple):
    """Ranges of a gather that are requested together. `checks` is whether they check files."""

    gather: Gather
    ranges: Ranges
    checks: bool


class Block:
    """Demand of consecutive steps on the hosts of a `Walk`, in arrays [steps, hosts]. A cell is an index into a flattened one.

    Args:
      steps, hosts: Numbers of steps and hosts.
      rows: int64 [n], numbers of all rows that these hosts read, except `FILL_ROW`.
      conditions: Speeds of hosts and network.

    Attributes:
      requests: All requests, those of checks included.
      checks: Requests that check a file before its first read on a host.
      received: Bytes of the answers.
      local: Bytes of local files.
      seconds: Time to read the batch, float64; the others are int64.
    """

    def __init__(self, steps: int, hosts: int, rows: Ints, conditions: Conditions) -> None:
        self.rows, self._conditions, self.seconds = rows, conditions, np.zeros((steps, hosts))
        self.requests, self.checks, self.received, self.local = np.zeros((4, steps, hosts), np.int64)

    def sums(self, cell: Ints, values: Ints | None = None) -> Ints:
        """Return the sum of `values` in each cell, by default the number of items of `cell`: int64 [steps, hosts]."""
        found = np.bincount(cell, values, self.seconds.size)
        return found.astype(np.int64).reshape(self.seconds.shape)

    def ask(self, requests: Ints, received: Ints, at_once: int, min_rounds: Ints | int = 0) -> None:
        """Add requests, at most `at_once` at a time, and the bytes of their answers."""
        speeds = self._conditions
        rounds = np.maximum(-(-requests // at_once), min_rounds)
        self.requests += requests
        self.received += received
        processor_ms = requests * speeds.request_ms * speeds.slowdown
        self.seconds += (rounds * speeds.latency_ms + processor_ms) / 1e3 + received / (speeds.host_mb * 1e6)

    def read(self, local: Ints) -> None:
        """Add bytes of local files."""
        self.local += local
        self.seconds += local / (self._conditions.host_mb * 1e6)


class Walk:
    """Demand of some hosts, step by step.

    Without a shard cache, each piece of a row is one request. With one, each missing block is one. To check a file before it
    reads it for the first time, a host requests both ends of the file and, if the index states no version, the version. Threads
    that make batches at the same time all check it.

    Args:
      reads: Ranges of the rows.
      sampler: Sampler of the run with its number of hosts.
      conditions: Speeds of hosts and network.
      hosts: Numbers of the hosts.

    Attributes:
      scale: Number of the run's hosts divided by that of `hosts`.
      caches: Shard cache of each of the hosts, by the options of the gathers that use it.
    """

    def __init__(self, reads: Reads, sampler: Sampler, conditions: Conditions, hosts: Sequence[int]) -> None:
        self.reads, self._sampler, self.conditions = reads, sampler, conditions
        self.hosts: Ints = np.array(hosts, np.int64)
        self.scale = sampler.host.count / len(hosts)
        self._checked = [np.zeros((len(hosts), len(gather.files)), np.bool_) for gather in reads.gathers]
        self.caches: dict[CacheOptions | None, list[HostCache]] = {
            options: [HostCache(options) for _ in hosts]
            for each in reads.gathers
            if (options := each.options.cache) is not None
        }

    def checked_files(self) -> Ints:
        """Return the number of remote files that each host has checked, int64 [hosts]."""
        found: Ints = np.sum([checked.sum(axis=1) for checked in self._checked], axis=0, dtype=np.int64)
        return found

    def blocks(self, steps: range) -> Iterator[Block]:
        """Yield the demand of `steps` in blocks of consecutive steps."""
        size = max(self._sampler.batch_sizes.sizes) * len(self.hosts) // self._sampler.host.count
        at_once = max(1, _ROWS_AT_ONCE // max(1, size))
        for first in range(steps.start, steps.stop, at_once):
            threads = self.conditions.threads
            starting = -(-self.conditions.prefetch // threads) * threads if first == steps.start else 0
            yield self._block(range(first, min(first + at_once, steps.stop)), starting)

    def _block(self, steps: range, starting: int) -> Block:
        """Return the demand of `steps`. The first `starting` of them fill the batches that are kept ready."""
        whole = len(self.hosts) == self._sampler.host.count
        slots = self._sampler.slots(steps, hosts=None if whole else self.hosts.tolist())
        real = slots.row != FILL_ROW
        rows, host, step = slots.row[real], slots.host[real], slots.step[real] - steps.start
        host = host if whole else self.hosts.searchsorted(host)
        block, asks = Block(len(steps), len(self.hosts), rows, self.conditions), list[_Ask]()
        for number, found in self.reads.ranges(rows):
            found = found._replace(row=step[found.row] * len(self.hosts) + host[found.row])
            asks += self._asks(block, number, found.select(np.argsort(found.row, kind="stable")), starting)
        for ask, (requests, received, rounds) in zip(asks, self._answers(block, asks), strict=True):
            block.ask(requests, received, ask.gather.options.requests, rounds)
            block.checks += requests if ask.checks else 0
        return block

    def _asks(self, block: Block, number: int, found: Ranges, starting: int) -> list[_Ask]:
        """Return the requests of a gather's ranges, whose cells ascend. Ranges of local files are added to `block`."""
        gather, remote = self.reads.gathers[number], self.reads.gathers[number].remote[found.file]
        if not remote.all():
            block.read(block.sums(found.row[~remote], found.size[~remote]))
            found = found.select(remote)
        if not len(found.row):
            return []
        at, file = self._first_reads(number, found.row, found.file, starting)
        infos = block.sums(at[gather.unversioned[file]])
        block.ask(infos, 0 * infos, gather.options.requests)
        block.checks += infos
        sizes = np.array([stamp.size - stamp.data_offset for stamp in gather.files], np.int64)
        end, head = np.minimum(DIGEST_BYTES, sizes[file]), gather.offsets[file]
        ends = np.stack([head, head + sizes[file] - end], axis=1).reshape(-1)
        checks = Ranges(at.repeat(2), file.repeat(2), ends, end.repeat(2))
        return [_Ask(gather, checks, True), _Ask(gather, found, False)]

    def _first_reads(self, number: int, cell: Ints, file: Ints, starting: int) -> tuple[Ints, Ints]:
        """Return the cell and the file of each first read of a file on a host, sorted by cell and file.

        The first `starting` steps are made `threads` at a time. Each of these checks all files that no earlier step has
        checked.
        """
        checked, (step, host) = self._checked[number], np.divmod(cell, len(self.hosts))
        together, found = np.minimum(step, starting) // self.conditions.threads, []
        for turn in range(-(-starting // self.conditions.threads) + 1):
            asking = cell if turn * self.conditions.threads < starting else host
            wanted = np.flatnonzero(~checked[host, file] & (together == turn))
            keys = asking[wanted] * checked.shape[1] + file[wanted]
            found.append(wanted[np.unique(keys, return_index=True)[1]])
            checked[host[found[-1]], file[found[-1]]] = True
        at = np.concatenate(found)
        at = at[np.lexsort((file[at], cell[at]))]
        return cell[at], file[at]

    def _answers(self, block: Block, asks: Sequence[_Ask]) -> Iterator[tuple[Ints, Ints, Ints | int]]:
        """Yield the requests, the received bytes and the minimum number of round trips of each of `asks`, [steps, hosts]."""
        caches = [self.caches.get(ask.gather.options.cache, []) for ask in asks]
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for number, ask in enumerate(asks):
            if not caches[number]:
                continue
            files = [(stamp.path, stamp.size) for stamp in ask.gather.files]
            for cell, file, *range_ in zip(*(each.tolist() for each in ask.ranges), strict=True):
                pieces.setdefault((cell, number), []).append((*files[file], *range_))
        counts = np.zeros((len(asks), 2, block.seconds.size), np.int64)  # requests and bytes of each cell
        for (cell, number), wanted in sorted(pieces.items(), key=lambda item: item[0]):
            counts[number, :, cell] = caches[number][cell % len(self.hosts)].read(wanted)
        shape = len(asks), 2, *block.seconds.shape
        for ask, cached, (requests, received) in zip(asks, caches, counts.reshape(shape), strict=True):
            if cached:
                yield requests, received, -(-received // shard_cache.BATCH_BYTES)
            else:
                requests = block.sums(ask.ranges.row, -(-ask.ranges.size // remote_files.PART_BYTES))
                yield requests, block.sums(ask.ranges.row, ask.ranges.size), 0
