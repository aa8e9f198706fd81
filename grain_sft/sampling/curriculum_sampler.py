"""Sampler of rows of several lengths."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, get_args

import msgspec
import numpy as np

from grain_sft.arguments import as_integer, as_pair, check_choice
from grain_sft.errors import SamplerError
from grain_sft.layout import groups
from grain_sft.sampling.batch_sizes import MOST_ROWS, BatchSizes
from grain_sft.sampling.curricula import Curriculum, CurriculumSizes, batch_counts, batch_order
from grain_sft.sampling.epoch_sampler import EpochSampler
from grain_sft.sampling.epochs import RunningEpochs
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import CacheDir
from grain_sft.sampling.orders.exact import stored_order
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.step_map import MappedSampler
from grain_sft.sampling.streams import SourceOrder
from grain_sft.types import Ints


class CurriculumSampler(EpochSampler):
    """Sampler of rows of several lengths, in the order of OLMo-core's `NumpyVSLDataLoader`.

    The rows of a batch have one length. All batches have the same number of tokens, so batches of shorter rows have more rows.
    Each epoch shuffles the rows of each length, cuts them into batches, and reads the batches in the order of the curriculum.
    Rows that do not fill a batch are dropped. With `shuffle`, each epoch drops different rows.

    Host h of H reads the h-th of H equal parts of each batch, like OLMo-core's rank h of H. Batches do not depend on H.

    Args:
      buckets: Pairs (length, number of rows), in ascending order of the lengths. A bucket is all rows of one length. Each
        length divides the longest length. Row numbers count through the buckets in this order.
      global_batch_size: Number of rows in a batch of the longest rows, of all hosts together.
      seed: Seed of the order, 0 or more.
      curriculum: Order of the batches. `natural` shuffles the batches of all lengths. In the two growing curricula, a cycle has
        one part for each length. All parts have batches of all lengths. The first part has the largest share of the shortest
        rows, and the last part the largest share of the longest rows. With 4 lengths, the batches of the shortest length are
        divided among 4 parts: 8:4:2:1 in `grow_p2`, and 4:3:2:1 in `grow_linear`.
      num_cycles: Number of cycles of a growing curriculum. All cycles have the same number of batches of each length. The
        remaining batches are dropped.
      balanced: Whether a growing curriculum reads the same number of batches of every length. This drops more rows.
      host: This host, and the number of hosts.
      shuffle: Whether to shuffle rows and batches. `false` reads the rows in ascending order, the shortest rows first, whatever
        the curriculum.
      epochs: Number of epochs after which the run ends. None means that the run never ends.
      cache_dir: Folder of the shuffled orders of large buckets; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Attributes:
      row_lengths: Length of the rows of each bucket, ascending. Batches of bucket b have `batch_sizes.sizes[b]` rows.

    Raises:
      SamplerError: Arguments contradict each other, or OLMo-core cannot build the curriculum from them.
    """

    runs_on = False
    consecutive_slots = True

    def __init__(
        self,
        buckets: Iterable[tuple[int, int]],
        *,
        global_batch_size: Annotated[int, msgspec.Meta(ge=1)],
        seed: Annotated[int, msgspec.Meta(ge=0)],
        curriculum: Curriculum = "natural",
        num_cycles: Annotated[int, msgspec.Meta(ge=1)] = 8,
        balanced: bool = False,
        host: Host = Host(0, 1),
        shuffle: bool = True,
        epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        cache_dir: CacheDir = None,
    ) -> None:
        self.buckets = tuple(as_pair("buckets: (length, number of rows)", pair, SamplerError) for pair in buckets)
        self.curriculum, self.balanced, self.cache_dir = curriculum, bool(balanced), cache_dir
        check_choice("curriculum", curriculum, get_args(Curriculum), SamplerError)
        self.num_cycles = as_integer("num_cycles", num_cycles, 1, SamplerError)
        lengths, rows = np.array(self.buckets, np.int64).reshape(-1, 2).T
        if not len(lengths) or (lengths < 1).any() or (lengths[-1] % lengths).any() or (np.diff(lengths) < 1).any():
            raise SamplerError(f"buckets={list(self.buckets)}: expected ascending lengths that divide the last one.")
        # The other batch sizes are multiples of `global_batch_size`. So it is enough that the hosts divide this size.
        super().__init__(BatchSizes(global_batch_size), host)
        # Only the audit log uses this order's name and epoch seeds. `_batch_order` and `_bucket_orders` compute the rows.
        source = SourceOrder(int(rows.sum()), seed, "olmo", shuffle, epochs)
        self.row_lengths = tuple(length for length, _ in self.buckets)
        self._rows_before_bucket = np.cumsum(rows) - rows
        rows_per_batch = self.global_batch_size * (lengths[-1] // lengths)
        self._counts = batch_counts(curriculum, rows, rows_per_batch, self.num_cycles, self.balanced)
        self.batch_sizes = self._sizes = CurriculumSizes(rows, rows_per_batch, self._counts, self._batch_order)
        self._bucket_orders = []
        for length, num_rows in self.buckets:
            order = stored_order(f"olmo_vsl-{length}", "PCG64", _seed_of(length))
            self._bucket_orders.append(order(num_rows, seed=source.seed, cache_dir=cache_dir))
        # These epochs have only the rows that steps read, so no step has rows of two epochs.
        epochs_of_stream = RunningEpochs(self._sizes.num_rows, self._sizes)
        as_integer("epochs", epochs or 1, 1, SamplerError, MOST_ROWS // self._sizes.num_rows)
        batching = f"global_batch_size={self.global_batch_size}, {self._curriculum_text}"
        self._set_stream(source, epochs_of_stream, self._rows_of, batching)

    def _batch_order(self, epoch: int) -> Ints:
        """Return the batches of an epoch in the order of the steps. Batches are numbered by bucket, the shortest rows first."""
        if not self.shuffle:
            return np.arange(int(self._counts.sum()))
        return batch_order(self.curriculum, self._counts, self.seed + epoch + 1, self.num_cycles)

    def row_length(self, step: int) -> int:
        epoch, step_of_epoch = divmod(self._checked_step(step), self._sizes.num_steps)
        return self.row_lengths[int(self._sizes.epoch(epoch).bucket[step_of_epoch])]

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Sampler:
        epoch, index = starts.get("", (0, 0))
        if self.epochs is not None and epoch >= self.epochs:
            raise SamplerError(f"no row is left: the {self.epochs} epochs were read before. Take more epochs.")
        steps_read = self._sizes.step_of(epoch * self._sizes.num_rows + index)
        return MappedSampler(self, [(0, steps_read)] if steps_read else [])  # skips `steps_read` steps at step 0

    def _rows_of(self, epoch: int, indices: Ints) -> Ints:
        """Return the rows at `indices` of an epoch's order. The order ends with the rows that no step reads.

        A part of the order is one batch, or the rows of one bucket that no batch has.
        """
        parts = self._sizes.epoch(epoch)
        part = parts.begins.searchsorted(indices, side="right") - 1
        bucket_indices = parts.first_row[part] + indices - parts.begins[part]
        rows = np.empty_like(indices)
        for bucket, selected in groups(parts.bucket[part]):
            indices_of_bucket = bucket_indices[selected]
            shuffled = self._bucket_orders[bucket](epoch, indices_of_bucket) if self.shuffle else indices_of_bucket
            rows[selected] = shuffled + self._rows_before_bucket[bucket]
        return rows

    @property
    def _curriculum_text(self) -> str:
        if self.curriculum == "natural":
            return f"curriculum={self.curriculum!r}"
        return f"curriculum={self.curriculum!r}, num_cycles={self.num_cycles}, balanced={self.balanced}"

    def _key(self, seed: int) -> str:
        rows = f"buckets={list(self.buckets)}, global_batch_size={self.global_batch_size}"
        return f"CurriculumSampler({rows}, seed={seed}, {self._curriculum_text}, shuffle={self.shuffle}, epochs={self.epochs})"


def _seed_of(length: int) -> Callable[[int, int], int]:
    return lambda seed, epoch: seed + epoch + 1 + length  # as in OLMo-core, whose epochs count from 1
