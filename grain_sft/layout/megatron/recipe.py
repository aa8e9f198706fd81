"""Recipe of the indices of a `MegatronGptLayout`. Each data set has a stream of samples, and a blend mixes the streams."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from grain_sft.corpus import Corpus, Documents, Shard, split_range
from grain_sft.errors import LayoutError
from grain_sft.layout.megatron.blending import Blend, blend, normalized
from grain_sft.layout.megatron.cache import read_blend, read_stream, stamps_of
from grain_sft.layout.megatron.stream import Cut, Stream, make_stream
from grain_sft.layout.pieces import check_documents
from grain_sft.storage import artifact
from grain_sft.types import Array

_VERSION = 1  # increment to rebuild cached indices


class Variant(NamedTuple):
    """Properties of a system whose rows `MegatronGptLayout` reproduces."""

    extra: bool = True  # default of `add_extra_token_to_sequence`
    shuffles: bool = True  # whether documents and samples are shuffled
    # Whether blends follow megatron-core. If True, each shard is a data set, and its share of `num_samples` is rounded up: of 5
    # samples, two shards with equal weights have 3 each. If False, all shards of a corpus without weights are one data set.
    blends: bool = False
    by_documents: bool = True  # whether a shuffle moves whole documents; if False, it moves sequences
    resets: bool = True  # whether `reset_attention_mask` and `reset_position_ids` are true by default
    segments_per_row: int = 25  # default of `max_segments_per_row`
    masks_targets: bool = False  # whether predictions of EOD take no loss
    splits: bool = False  # whether `document_split` may divide the documents of each data set


VARIANTS = {
    "megatron": Variant(blends=True, by_documents=False, resets=False, segments_per_row=0),
    "mmap_npy": Variant(splits=True),
    "mmap": Variant(extra=False, shuffles=False, masks_targets=True),
}

Variants = Literal["megatron", "mmap_npy", "mmap"]


class _Dataset(NamedTuple):
    """A data set of a corpus: units (documents or sequences) that make one stream."""

    shard: Shard  # first shard of the data set
    weight: float  # weight in the blend; 1 if the corpus has no weights
    first: int  # first unit of the stream
    stop: int  # unit after the last unit of the stream
    skipped: int  # number of units before `first` in the data set; `document_split` leaves them out


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All options that decide the indices of a corpus.

    Attributes:
      cut: How streams are cut into samples.
      seed: Seed of the shuffles; None for no shuffle.
      split: Shares and subset of the documents of each data set, such as ("99,1", "train"); None for all documents.

    The other attributes are arguments of `MegatronGptLayout`.
    """

    variant: str
    cut: Cut
    num_samples: int | None
    seed: int | None
    surplus: float
    split: tuple[str, str] | None = dataclasses.field(default=None, repr=False)
    index_dir: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.surplus <= 1000:
            raise LayoutError(f"surplus={self.surplus!r}: expected a number from 0 to 1000.")
        if self.index_dir is not None and not self.traits.shuffles:
            raise LayoutError(f"index_dir={self.index_dir!r}: variant {self.variant} has no index. Leave it out.")
        if self.split is not None and not self.traits.splits:
            raise LayoutError(f"document_split={self.split[0]!r}: {self.variant} does not split documents. Give corpus.split.")

    @property
    def traits(self) -> Variant:
        return VARIANTS[self.variant]

    def dependencies(self, corpus: Corpus) -> dict[str, Any]:
        """Return everything that the indices depend on, ready for JSON."""
        content = corpus.find_documents().content
        options = dataclasses.asdict(self) | {"index_dir": self.index_dir and stamps_of(self.index_dir)}
        return {"megatron": _VERSION, "documents": content, "weights": list(corpus.weights), **options}

    def make(self, corpus: Corpus) -> dict[str, Array]:
        """Return the indices: arrays by name. A unit is a document, or a sequence in variants that shuffle sequences.

          starts: Token offset of each unit in the corpus.
          documents: Number of each unit's document in `corpus.documents`; absent if each document is one unit.
          firsts: First unit of each data set.
          order N, ends N, shuffle N: Arrays of the `Stream` of data set N. N counts only data sets with a weight above 0.
          chosen, taken: Arrays of the `Blend` of several data sets.

        Raises:
          LayoutError: The corpus has too few tokens or samples, or weights that the variant refuses.
          CorpusError, CorpusFileError: The documents cannot be found.
        """
        units = check_documents(corpus.documents if self.traits.by_documents else corpus.sequences)
        datasets = self._datasets(corpus, units)
        needs, blend_size = self._samples_needed(corpus, datasets)
        streams = [self._stream(dataset, units, need) for dataset, need in zip(datasets, needs, strict=True)]
        arrays = {"starts": units.start, "firsts": np.array([dataset.first for dataset in datasets], np.int64)}
        if len(units) != len(corpus.documents):
            arrays["documents"] = corpus.documents.start.searchsorted(units.start, side="right") - 1
        for number, stream in enumerate(streams):
            arrays |= {f"{name} {number}": column for name, column in vars(stream).items() if column is not None}
        # megatron-core blends even a single data set if it has a weight
        if len(datasets) > 1 or (corpus.weights and self.traits.blends):
            arrays |= self._blend(corpus, datasets, streams, blend_size)._asdict()
        return arrays

    def _datasets(self, corpus: Corpus, units: Documents) -> list[_Dataset]:
        """Return the data sets with a weight above 0: one for each shard, or one for all shards."""
        shards_are_datasets = self.traits.blends or corpus.weights
        borders = _borders(corpus, units) if shards_are_datasets else [0, len(units)]
        # `corpus.split` may select only some sequences of a shard, if the shard is a prefix (the files `.bin` and `.idx`). This
        # fits only a data set of one shard whose units are the sequences. The split is refused for other data sets, and with
        # `document_split`.
        prefixes_are_datasets = shards_are_datasets or len(corpus.shards) == 1
        if self.split is not None or not prefixes_are_datasets or len(units) != len(corpus.sequences):
            self._refuse_split(corpus)
        datasets, weights = [], self._weights(corpus)
        # not strict, because all shards may be one data set
        for shard, weight, border, end in zip(corpus.shards, weights, borders, borders[1:], strict=False):
            if weight:
                count = end - border
                first, stop = (0, count) if self.split is None else split_range(*self.split, count, "document_")
                datasets.append(_Dataset(shard, weight, border + first, border + stop, skipped=first))
        return datasets

    def _weights(self, corpus: Corpus) -> Sequence[float]:
        """Return the weight of each shard; 1 if the corpus has no weights."""
        if not corpus.weights:
            return [1.0] * len(corpus.shards)
        if not self.traits.shuffles:
            raise LayoutError(f"corpus weights: variant {self.variant} has no weighted blend. Give corpus.mixture.")
        if self.traits.blends and self.num_samples is None:
            raise LayoutError("num_samples is missing: a corpus with weights needs it, as in megatron-core. Give it.")
        if self.traits.blends and not all(corpus.weights):
            raise LayoutError("corpus: a weight is 0; megatron-core needs weights above 0. Remove the prefix.")
        weights: list[float] = normalized(corpus.weights).tolist()
        return weights

    def _refuse_split(self, corpus: Corpus) -> None:
        for shard in corpus.shards:
            if shard.boundaries is not None and shard.boundaries.sequences is not None:
                problem = f"variant {self.variant} does not divide the sequences of a prefix, but corpus.split does"
                fix = "Give layout.document_split" if self.traits.splits else "Write the split as its own prefix"
                raise LayoutError(f"{shard.path}: {problem}. {fix}.")

    def _stream(self, dataset: _Dataset, units: Documents, num_samples: int | None) -> Stream:
        """Return the stream of a data set, made here or read from `index_dir`."""
        sizes = units.length[dataset.first : dataset.stop]
        if self.index_dir is None:
            return make_stream(sizes, num_samples, self.cut, self.seed)
        # `first_in_index` is the number that the stream's first unit has in the index, which numbers all units of the data set
        boundaries, first_in_index = dataset.shard.boundaries, dataset.skipped
        if boundaries is not None and boundaries.sequences:
            first_in_index = boundaries.sequences[0]  # first sequence that `corpus.split` selects
        return read_stream(self.index_dir, dataset.shard.path, sizes, first_in_index, num_samples, self.cut, self.seed)

    def _samples_needed(self, corpus: Corpus, datasets: Sequence[_Dataset]) -> tuple[Sequence[int | None], int | None]:
        """Return the pair (number of samples that each stream needs, number of samples of the blend).

        None for a stream means one epoch. None for the blend means as many samples as the streams have. Without weights, each
        of several data sets is read for one epoch.
        """
        samples = self.num_samples
        if samples is None or not corpus.weights:
            return [samples if len(datasets) == 1 else None] * len(datasets), samples
        shares = [math.ceil(samples * dataset.weight) for dataset in datasets]
        needs = [math.ceil(share * (1 + self.surplus)) for share in shares]
        return needs, sum(shares) if self.traits.blends else samples

    def _blend(self, corpus: Corpus, datasets: Sequence[_Dataset], streams: Sequence[Stream], size: int | None) -> Blend:
        """Return the blend of the streams. It has at most `size` samples; None means as many as the streams allow."""
        counts = [self.cut.samples_in(int(stream.ends[-1])) for stream in streams]
        if corpus.weights:
            shares = normalized([dataset.weight for dataset in datasets])
            # without a given size, the size at which the first stream has given all its samples
            size = math.floor((counts / shares).min()) if size is None else size
        else:
            shares = normalized(counts)
            size = min(size or sum(counts), sum(counts))
        blended = None if self.index_dir is None else read_blend(self.index_dir, shares, size)
        if blended is None:
            blended = blend(shares, size)
        fix = "Give a smaller num_samples."
        if corpus.weights and self.num_samples is not None:
            fix = f"Give a surplus (mid_level_dataset_surplus) greater than {self.surplus}."
        for dataset, taken, count in zip(datasets, blended.counts.tolist(), counts, strict=True):
            if taken > count:
                problem = f"{dataset.shard.path}: the blend needs {taken} samples of it, but its stream has {count}"
                raise LayoutError(f"{problem}. {fix}")
        return blended


def _borders(corpus: Corpus, units: Documents) -> list[int]:
    """Return the first unit of each shard, then the number of units."""
    ends = units.shard_ends
    if ends is None:
        ends = units.start.searchsorted(corpus.shard_borders[1:], side="left")
    return [0, *ends.tolist()]


def check_indices(arrays: artifact.Arrays) -> None:
    """Raise ValueError for cached arrays that `Recipe.make` cannot have returned."""
    if "starts" not in arrays or "firsts" not in arrays or ("chosen" in arrays) != ("taken" in arrays):
        raise ValueError("it lacks an array")
    for number in range(len(arrays["firsts"])):
        order, ends = arrays.get(f"order {number}"), arrays.get(f"ends {number}")
        if order is None or ends is None or order.shape != ends.shape or ends.dtype != np.int64 or ends.ndim != 1:
            raise ValueError(f"stream {number} lacks `order` or `ends`, or their shapes or types do not fit")
