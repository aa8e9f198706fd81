"""MegatronGptLayout: rows as Megatron-LM and MaxText's `mmap` and `mmap_npy` make them."""

import functools
import numbers
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length, check_choice, check_type
from grain_sft.corpus import SUBSETS, Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.megatron.blending import Blend
from grain_sft.layout.megatron.recipe import VARIANTS, Recipe, Variants, check_indices
from grain_sft.layout.megatron.stream import Cut, Stream
from grain_sft.layout.pieces import LeftOut, Pieces, expand_counts, join_parts, pieces_of
from grain_sft.storage import artifact, files
from grain_sft.types import Integers, Ints

_BLOCK = 1 << 22  # values hashed at a time


class MegatronGptLayout(Layout):
    """Rows of Megatron-core's `GPTDataset`: row i is sample i, cut from a stream of shuffled documents.

    If the corpus has weights of its shards, or has several shards in variant "megatron", row i is sample i of the
    `BlendedDataset` of the shards. Except in variant "mmap", rows are numbered in Megatron's shuffled order, so a config
    without `sampler.order` reads them by ascending number. A row is one segment, which `reset_attention_mask` divides in the
    trainer's batch.

    Advantages: a run continues where Megatron-LM or MaxText stopped, sample by sample. Disadvantages: the layout needs an
    index, which is made once per machine: 12 bytes for each document in each epoch, and 4 bytes for each row. Another
    `num_samples` changes the order of the rows.

    Args:
      corpus: Corpus whose documents make the stream. A document consists of one or more sequences, the entries of an .idx file.
      sequence_length: Number of columns of the trainer's batch.
      variant: System whose rows these are: "megatron", or MaxText's "mmap_npy" or "mmap" (windows of all documents in
        order, without a shuffle).
      num_samples: Number of rows that the run needs, `train_samples` of Megatron-LM. The layout has the fewest whole epochs
        that together hold these rows. None means one epoch.
      seed: Seed of the shuffles, `--seed` of Megatron-LM.
      add_extra_token_to_sequence: Whether a row also holds the first token of the next row, as the target of its last token.
        None means false in variant "mmap", else true.
      drop_last_partial_sequence: Whether a last row that is not full is left out. If false, that row is padded.
      eod_token_id: Token that ends a document; None for `corpus.eos_token_id`.
      eod_mask_loss: Whether the target of an EOD, the token after it, takes no loss.
      reset_attention_mask: Whether a segment ends after each EOD. None means false in variant "megatron", else true.
      reset_position_ids: Whether positions restart after each EOD. None means the value of `reset_attention_mask` in MaxText's
        variants, else false.
      max_segments_per_row: MaxText's `packing_max_segments_per_sample`. A segment of at most
        `sequence_length / max_segments_per_row` tokens is joined with the next segment. For 8192 / 25, that is a segment of at
        most 327 tokens. 0 joins no segments. None means 25 in MaxText's variants, else 0.
      surplus: Share of additional rows that each data set of a blend has: 0.005 means 0.5 % more. Megatron-core calls it
        `mid_level_dataset_surplus`.
      document_split: Shares of the subsets "train", "valid" and "test" in the documents of each data set, such as "99,1". It is
        MaxText's `mmap_npy_split`. None means all documents.
      document_subset: Subset of `document_split` that is read: "train", "valid" or "test".
      index_dir: Local folder of indices that megatron-core (`--data-cache-path`) or MaxText (`mmap_npy`) made, with or without
        blends. Indices that do not fit the options are an error. None means that the layout makes its own indices.
      cache_dir: Folder, or URL in a bucket, of cached indices; None for the cache folder.

    Attributes:
      sequence_length: Number of tokens of a row, the extra token included.

    Raises:
      LayoutError: Arguments that contradict each other, or documents with too few tokens for a row.
      CorpusError, CorpusFileError: The documents cannot be found.
    """

    kind = "megatron_gpt"
    follows_documents = one_segment = takes_weights = True

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: Annotated[int, msgspec.Meta(ge=1)],
        *,
        variant: Variants = "megatron",
        num_samples: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        seed: Annotated[int, msgspec.Meta(ge=0)] = 1234,
        add_extra_token_to_sequence: bool | None = None,
        drop_last_partial_sequence: bool = True,
        eod_token_id: Annotated[int, msgspec.Meta(ge=0)] | None = None,
        eod_mask_loss: bool = False,
        reset_attention_mask: bool | None = None,
        reset_position_ids: bool | None = None,
        max_segments_per_row: Annotated[int, msgspec.Meta(ge=0)] | None = None,
        surplus: float = 0.005,
        document_split: str | None = None,
        document_subset: Literal["train", "valid", "test"] = "train",
        index_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        check_choice("variant", variant, VARIANTS, LayoutError)
        if document_subset not in SUBSETS or (document_split is None and document_subset != "train"):
            expected = f"expected one of {', '.join(SUBSETS)}, with document_split, such as document_split='99,1'"
            raise LayoutError(f"document_subset={document_subset!r}: {expected}.")
        if (seed := as_integer("seed", seed, 0, LayoutError)) >= 2**32:
            raise LayoutError(f"seed={seed}: expected less than 2**32, because numpy's RandomState uses it.")
        if num_samples is not None:
            num_samples = as_integer("num_samples", num_samples, 1, LayoutError)
        check_type("surplus", surplus, numbers.Real, "a number from 0 to 1000")
        if eod_token_id is not None:
            eod_token_id = as_integer("eod_token_id", eod_token_id, 0, LayoutError, int(np.iinfo(corpus.dtype).max))
        check_type("drop_last_partial_sequence", drop_last_partial_sequence, bool, "True or False")
        check_type("eod_mask_loss", eod_mask_loss, bool, "True or False")
        check_type("add_extra_token_to_sequence", add_extra_token_to_sequence, bool | None, "True, False or None")
        check_type("reset_attention_mask", reset_attention_mask, bool | None, "True, False or None")
        check_type("reset_position_ids", reset_position_ids, bool | None, "True, False or None")
        check_type("document_split", document_split, str | None, "shares, such as '99,1', or None")
        check_type("index_dir", index_dir, str | os.PathLike | None, "a path or None")
        traits, length = VARIANTS[variant], as_sequence_length(sequence_length)
        extra = traits.extra if add_extra_token_to_sequence is None else add_extra_token_to_sequence
        self.corpus, self.sequence_length = corpus, as_sequence_length(length + extra)
        self.orders_rows = traits.shuffles
        self._cut = Cut(length, int(extra), drop_last_partial_sequence)
        used_seed = seed if traits.shuffles else None
        split = None if document_split is None else (document_split, document_subset)
        indices = None if index_dir is None else files.normalize(index_dir)
        self._recipe = Recipe(variant, self._cut, num_samples, used_seed, float(surplus), split, indices)
        self._folder = None if cache_dir is None else files.normalize(cache_dir)
        self.transforms = self._transforms(
            eod_token_id, eod_mask_loss, reset_attention_mask, reset_position_ids, max_segments_per_row
        )
        # for each transform, whether the caller asked for it with an option; a default of the variant does not count
        stated = {"mask_eod": eod_mask_loss, "reset_at_eod": reset_attention_mask or reset_position_ids or max_segments_per_row}
        self.needed_transforms = [each for each in self.transforms if isinstance(each, dict) and stated[next(iter(each))]]
        self._open()

    def _transforms(
        self, eod: int | None, mask: bool, attention: bool | None, positions: bool | None, segments: int | None
    ) -> list[Any]:
        """Return the transforms from rows to a trainer's batch, written as in a config.

        The arguments are `eod_token_id`, `eod_mask_loss`, `reset_attention_mask`, `reset_position_ids` and
        `max_segments_per_row`.
        """
        traits = self._recipe.traits
        if mask and traits.masks_targets:
            raise LayoutError(f"eod_mask_loss=True: variant {self._recipe.variant} masks EODs, not their targets. Remove it.")
        attention = traits.resets if attention is None else attention
        positions = traits.resets and attention if positions is None else positions
        segments = traits.segments_per_row if segments is None else segments
        segments = as_integer("max_segments_per_row", segments, 0, LayoutError)
        # segments up to this length, it included, are joined with the next
        min_segment_length = self._cut.length // segments if segments and attention else 0
        transforms: list[Any] = ["shift_targets"]
        if self._cut.extra:
            transforms.append("drop_last_position")
        if not (mask or traits.masks_targets or attention or positions):
            return transforms
        if (eod := self.corpus.eos_token_id if eod is None else eod) is None:
            raise LayoutError("eod_token_id is missing: the corpus has no EOS id for masks and resets. Give it.")
        if mask or traits.masks_targets:
            transforms.insert(0, {"mask_eod": {"eod_token_id": eod, "as_target": traits.masks_targets}})
        if attention or positions:
            options = {"attention": attention, "positions": positions, "min_segment_length": min_segment_length}
            transforms.append({"reset_at_eod": {"eod_token_id": eod, **options}})
        return transforms

    def _open(self) -> None:
        """Set the attributes that come from the indices, which are read from the cache, or made and cached."""
        make = functools.partial(self._recipe.make, self.corpus)
        depends = self._recipe.dependencies(self.corpus)
        mapped = artifact.load_or_make("megatron", depends, make, self._folder, check=check_indices)
        self._arrays = arrays = {name: array.view(np.ndarray) for name, array in mapped.items()}  # np.memmap is slow
        self._blend = Blend(arrays["chosen"], arrays["taken"]) if "chosen" in arrays else None
        self._firsts: list[int] = arrays["firsts"].tolist()  # number of the first unit of each data set, as in `_parts_of`
        self._streams = [
            Stream(arrays[f"order {number}"], arrays[f"ends {number}"], arrays.get(f"shuffle {number}"))
            for number in range(len(self._firsts))
        ]
        self._counts = [self._cut.samples_in(int(stream.ends[-1])) for stream in self._streams]

    def __len__(self) -> int:
        return self._counts[0] if self._blend is None else len(self._blend.chosen)

    def pieces(self, rows: Ints) -> Pieces:
        """Return the parts of documents in each of `rows`. All parts of a row are one segment."""
        if self._blend is None or not len(rows):
            columns: Sequence[Ints] = self._parts_of(0, rows)
        else:
            dataset, number = self._blend.numbers_of(rows)
            columns = join_parts(dataset, lambda part, index: self._parts_of(part, number[index]))
        row, column, start, length, document = columns
        pieces = pieces_of(self.corpus, row, column, start, length, np.ones(len(row), np.int64), document)
        if self._cut.drop_last:  # no row has padding
            return pieces._replace(segment=None, position=None)
        return pieces._replace(position=pieces.column)  # positions count through all documents of the row

    def _parts_of(self, dataset: int, samples: Ints) -> Sequence[Ints]:
        """Return the pieces of `samples` of a data set, as the columns row, column, start, length and document.

        `start` is a token offset in the corpus. A unit is what the variant shuffles: a document, or a sequence.
        """
        stream, arrays = self._streams[dataset], self._arrays
        if stream.shuffle is not None:
            samples = stream.shuffle[samples].astype(np.int64)
        # all begins and stops are token offsets in the stream
        begin = samples * self._cut.length
        stop = np.minimum(begin + self.sequence_length, stream.ends[-1])
        first = stream.ends.searchsorted(begin, side="right")  # first entry of each sample
        row, within = expand_counts(stream.ends.searchsorted(stop - 1, side="right") - first + 1)
        entry = first[row] + within
        entry_begin = np.where(entry > 0, stream.ends[entry - 1], 0)
        piece_begin = np.maximum(begin[row], entry_begin)
        piece_stop = np.minimum(stop[row], stream.ends[entry])
        unit = stream.order[entry] + np.int64(self._firsts[dataset])
        document = arrays["documents"][unit] if "documents" in arrays else unit
        start = arrays["starts"][unit] + piece_begin - entry_begin
        columns = [row, piece_begin - begin[row], start, piece_stop - piece_begin, document]
        has_tokens = piece_stop > piece_begin  # false for empty documents
        return columns if has_tokens.all() else [column[has_tokens] for column in columns]

    def left_out(self) -> list[LeftOut]:
        remainder = sum(
            max(0, int(stream.ends[-1]) - self._cut.extra - count * self._cut.length)
            for stream, count in zip(self._streams, self._counts, strict=True)
        )
        lines: list[LeftOut] = [("ends of streams that fill no row", None, remainder)]
        return lines if self._cut.drop_last else [*lines, *super().left_out()]

    @functools.cached_property
    def _rows_receipt(self) -> str:

        def blocks() -> Iterator[Sequence[Integers]]:
            for name, array in self._arrays.items():
                yield [np.array([len(name), *array.shape], np.int64)]
                for begin in range(0, len(array), _BLOCK):
                    yield [array[begin : begin + _BLOCK].reshape(-1)]

        return self._hash_of(blocks())

    def __getstate__(self) -> dict[str, object]:
        set_by_open = ("_arrays", "_streams", "_firsts", "_counts", "_blend")  # large, and cached on disk
        return {name: value for name, value in vars(self).items() if name not in set_by_open}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open()

    def __repr__(self) -> str:
        """Return what decides the rows. Grain compares this text when it restores an iterator."""
        split = "" if self._recipe.split is None else f", split={self._recipe.split}"
        return f"MegatronGptLayout({self._recipe!r}, weights={self.corpus.weights}, rows={len(self)}{split})"
