"""Recipe of Megatron's indices: which data sets a corpus has, the stream of samples of each, and the blend of the streams."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, Documents, Shard, split_range
from grain_sft.errors import LayoutError
from grain_sft.layout.megatron.blending import Blend, blend, normalized
from grain_sft.layout.megatron.cache import read_blend, read_stream, stamps_of
from grain_sft.layout.megatron.stream import Cut, Stream, make_stream
from grain_sft.storage import artifact

_VERSION = 1  # increment to rebuild cached indices


class Variant(NamedTuple):
    """Properties of a system (`VARIANTS`) whose rows `MegatronGptLayout` reproduces.

    Attributes:
      extra: Whether a row also holds the first token of the next row by default.
      shuffles: Whether documents and samples are shuffled.
      blends: Whether megatron-core's rules for blends apply. If True, each shard is a data set, even if the corpus has no
        weights, and each share of a weighted blend is rounded up: weights 0.5 and 0.5 and 5 samples give 3 + 3 rows. If False,
        the shards of a corpus without weights are one data set, and a weighted blend has `num_samples` rows, 5 in the example.
      by_documents: Whether the sequences of one document stay together in the stream.
      resets: Whether attention and positions begin anew after each EOD by default.
      segments_per_row: Default of `max_segments_per_row`.
      masks_targets: Whether predictions of EOD take no loss.
      splits: Whether the layout splits the documents of each data set.
    """

    extra: bool = True
    shuffles: bool = True
    blends: bool = False
    by_documents: bool = True
    resets: bool = True
    segments_per_row: int = 25
    masks_targets: bool = False
    splits: bool = False


VARIANTS = {
    "megatron": Variant(blends=True, by_documents=False, resets=False, segments_per_row=0),
    "mmap_npy": Variant(splits=True),
    "mmap": Variant(extra=False, shuffles=False, masks_targets=True),
}

Variants = Literal["megatron", "mmap_npy", "mmap"]
"""Names of `VARIANTS`."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All options that decide the indices of a corpus.

    Attributes:
      variant: Name of an entry of `VARIANTS`.
      cut: How streams are cut into samples.
      num_samples: Number of samples that the run needs; None for one epoch.
      seed: Seed of the shuffles; None for no shuffle.
      surplus: Share of additional samples that each data set of a blend has.
      split: Shares and subset of the documents of each data set, such as ("99,1", "train"); None for all documents.
      index_dir: Folder of indices that megatron-core or MaxText made; None to make them here.
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
        if self.index_dir is not None and not VARIANTS[self.variant].shuffles:
            raise LayoutError(f"index_dir={self.index_dir!r}: variant {self.variant} has no index. Leave it out.")
        if self.split is not None and not VARIANTS[self.variant].splits:
            raise LayoutError(
                f"document_split={self.split[0]!r}: variant {self.variant} splits the sequences of each prefix. Give "
                "corpus.split."
            )

    def dependencies(self, corpus: Corpus) -> dict[str, Any]:
        """Return everything that the indices depend on, ready for JSON."""
        content = corpus.find_documents().content
        options = dataclasses.asdict(self) | {"index_dir": self.index_dir and stamps_of(self.index_dir)}
        return {"megatron": _VERSION, "documents": content, "weights": list(corpus.weights), **options}

    def make(self, corpus: Corpus) -> dict[str, npt.NDArray[Any]]:
        """Return the indices.

        Returns:
          Arrays by name. A unit is a document, or a sequence in variants that shuffle sequences.
            starts: First token of each unit, counted through the corpus.
            documents: Number of each unit in `corpus.documents`; absent where units are documents.
            firsts: First unit of each data set.
            order N, ends N, shuffle N: `Stream` of data set N, counted without data sets of weight 0.
            chosen, taken: `Blend` of several data sets.

        Raises:
          LayoutError: The corpus has too few tokens or samples, or weights that the variant refuses.
          CorpusError, CorpusFileError: The documents cannot be found.
        """
        traits = VARIANTS[self.variant]
        units = corpus.documents if traits.by_documents else corpus.sequences
        borders = _borders(corpus, units) if traits.blends or corpus.weights else [0, len(units)]
        # A prefix is a pair of `.bin` and `.idx` files. `corpus.split` may divide its sequences only if each prefix is a data
        # set, and the units are sequences.
        prefixes_are_datasets = len(borders) > len(corpus.shards)
        units_are_sequences = len(units) == len(corpus.sequences)
        if self.split is not None or not prefixes_are_datasets or not units_are_sequences:
            self._refuse_split(corpus)
        weights, needs, blend_size = self._needs(corpus.weights, len(borders) - 1)
        used = [number for number, weight in enumerate(weights) if weight]
        ranges = [self._range(borders[number], borders[number + 1]) for number in used]
        streams = [
            self._stream(corpus.shards[number], units.length[first:stop], first - borders[number], needs[number])
            for (first, stop), number in zip(ranges, used, strict=True)
        ]
        arrays = {"starts": units.start, "firsts": np.array([first for first, _ in ranges], np.int64)}
        if len(units) != len(corpus.documents):
            arrays["documents"] = corpus.documents.start.searchsorted(units.start, side="right") - 1
        for number, stream in enumerate(streams):
            arrays |= {f"order {number}": stream.order, f"ends {number}": stream.ends}
            if stream.shuffle is not None:
                arrays[f"shuffle {number}"] = stream.shuffle
        if len(used) > 1 or (corpus.weights and traits.blends):
            blended = self._blend(corpus, {number: weights[number] for number in used}, streams, blend_size)
            arrays |= {"chosen": blended.chosen, "taken": blended.taken}
        return arrays

    def _blend(self, corpus: Corpus, weights: dict[int, float], streams: Sequence[Stream], size: int | None) -> Blend:
        """Return the blend of streams.

        Args:
          corpus: Corpus of the data sets.
          weights: Weight of each data set, by its number.
          streams: Stream of each of these data sets.
          size: Number of samples of the blend; None means as many as the streams have.
        """
        counts = [self.cut.samples_in(int(stream.ends[-1])) for stream in streams]
        if corpus.weights:
            shares = normalized(list(weights.values()))
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
        for number, taken, count in zip(weights, blended.counts.tolist(), counts, strict=True):
            if taken > count:
                path = corpus.shards[number].path
                raise LayoutError(f"{path}: the blend takes {taken} samples of it, but its stream has {count}. {fix}")
        return blended

    def _range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the (first, stop) range of documents that the split keeps."""
        if self.split is None:
            return first, stop
        kept = split_range(*self.split, stop - first)
        return first + kept[0], first + kept[1]

    def _stream(self, shard: Shard, sizes: npt.NDArray[np.integer], skipped: int, samples: int | None) -> Stream:
        """Return the stream of the data set that begins with `shard`, without its first `skipped` documents."""
        if self.index_dir is None:
            return make_stream(sizes, samples, self.cut, self.seed)
        # (first, stop) of the sequences that `corpus.split` keeps; None without a split.
        sequences = shard.boundaries.sequences if shard.boundaries is not None else None
        first_in_index = sequences[0] if sequences else skipped
        return read_stream(self.index_dir, shard.path, sizes, first_in_index, samples, self.cut, self.seed)

    def _refuse_split(self, corpus: Corpus) -> None:
        """Raise a `LayoutError` if `corpus.split` has divided the sequences of a `.bin` and `.idx` pair, its prefix."""
        splits = VARIANTS[self.variant].splits
        for shard in corpus.shards:
            if shard.boundaries is not None and shard.boundaries.sequences is not None:
                raise LayoutError(
                    f"{shard.path}: variant {self.variant} does not divide the sequences of a prefix, but corpus.split does. "
                    + ("Give layout.document_split instead." if splits else "Write the split as a prefix of its own.")
                )

    def _needs(
        self, weights: Sequence[float], datasets: int
    ) -> tuple[Sequence[float], Sequence[int | None], int | None]:
        """Return the weights and the numbers of samples that a run needs.

        Returns:
          weights: Weight of each data set; 1 if the corpus has no weights.
          needs: Number of samples that the stream of each data set must have; None for one epoch.
          blend_size: Number of samples of the blend; None for as many as the streams have.
        """
        samples, traits = self.num_samples, VARIANTS[self.variant]
        if not weights:
            return [1.0] * datasets, [samples if datasets == 1 else None] * datasets, samples
        if not traits.shuffles:
            raise LayoutError(
                f"corpus with weights: variant {self.variant} has no weighted blend. Give corpus.mixture."
            )
        if traits.blends and samples is None:
            raise LayoutError("num_samples is missing: a corpus with weights needs it, as in megatron-core. Give it.")
        if traits.blends and not all(weights):
            raise LayoutError(
                "corpus: a weight is 0; megatron-core takes weights above 0. Remove the prefix of that weight."
            )
        weights = normalized(weights).tolist()
        if samples is None:
            return weights, [None] * datasets, None
        shares = [math.ceil(samples * weight) for weight in weights]
        needs = [math.ceil(share * (1 + self.surplus)) for share in shares]
        return weights, needs, sum(shares) if traits.blends else samples


def _borders(corpus: Corpus, units: Documents) -> list[int]:
    """Return the first unit of each shard, then the number of units."""
    ends = units.shard_ends
    if ends is None:
        ends = units.start.searchsorted(np.cumsum([shard.num_tokens for shard in corpus.shards]), side="left")
    return [0, *ends.tolist()]


def check_indices(arrays: artifact.Arrays) -> None:
    """Raise ValueError for cached arrays that `Recipe.make` cannot have returned."""
    if "starts" not in arrays or "firsts" not in arrays or ("chosen" in arrays) != ("taken" in arrays):
        raise ValueError("it lacks an array")
    for number in range(len(arrays["firsts"])):
        order, ends = arrays.get(f"order {number}"), arrays.get(f"ends {number}")
        if order is None or ends is None or order.shape != ends.shape or ends.dtype != np.int64 or ends.ndim != 1:
            raise ValueError(f"stream {number} lacks `order` or `ends`, or their shapes or types do not fit")
