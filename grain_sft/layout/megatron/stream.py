"""Indices of Megatron-core's `GPTDataset`, which state the tokens of each sample in a stream of shuffled documents.

`GPTDataset` concatenates its shuffled documents into one stream, cuts the stream into samples of `sequence_length` tokens, and
shuffles the samples. A sample also holds the first token of the next sample, which is its last target.

megatron-core stores where each sample begins. This module stores only where each document ends in the stream. A binary search
finds the documents of a sample. `bench --only megatron` measures both ways.
"""

import dataclasses

import numpy as np

from grain_sft.errors import LayoutError
from grain_sft.types import Integers, Ints

_SEPARATE = 0.80  # if the run needs a smaller share of the last epoch's samples, the last epoch is shuffled separately


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a stream is cut into samples."""

    length: int  # tokens from the start of one sample to the start of the next
    extra: int  # 1 if a sample also holds the first token of the next, else 0
    drop_last: bool = True  # whether a last sample of fewer tokens is left out

    def samples_in(self, num_tokens: int) -> int:
        """Return the number of samples in a stream.

        Without `drop_last`, megatron-core divides 32-bit floats, so its count may be too low or too high for a long stream.
        This function returns the smaller of megatron-core's count and the exact count.
        """
        if self.drop_last:
            return max(0, num_tokens - self.extra) // self.length
        exact = -(-max(0, num_tokens - self.extra) // self.length)
        return min(exact, int(np.ceil(np.float32(num_tokens - self.extra) / np.float32(self.length))))

    def epochs_for(self, num_samples: int | None, num_tokens: int) -> int:
        """Return the number of epochs of `num_tokens` tokens that hold `num_samples` samples; None means one epoch."""
        return 1 if num_samples is None else max(1, -(-(num_samples * self.length + self.extra) // num_tokens))


@dataclasses.dataclass(frozen=True)
class Stream:
    """The documents of one data set in the order of its stream, and the order of its samples.

    An entry of the stream is one document. A stream of two epochs has two entries for each document.
    """

    order: Integers  # int32 [entries], number of the document at each entry
    ends: Ints  # int64 [entries], number of tokens up to the end of each entry
    shuffle: Integers | None  # uint32 or int64 [samples], numbers of the samples in shuffled order


def make_stream(sizes: Integers, num_samples: int | None, cut: Cut, seed: int | None) -> Stream:
    """Return the stream of a data set's documents in megatron-core's order.

    Args:
      sizes: Integers [documents], number of tokens of each document.
      num_samples: Number of samples that the run needs. The stream has just enough epochs to hold them. None means one epoch.
      seed: Seed of numpy's `RandomState`; None keeps documents and samples in order.

    Raises:
      LayoutError: The documents have no tokens, or too few tokens for one sample.
    """
    sizes = np.ascontiguousarray(sizes)
    num_tokens = int(sizes.sum(dtype=np.int64))
    if num_tokens < 1:
        raise LayoutError(f"{len(sizes)} documents of a data set have no tokens. Give more, or another document_split.")
    epochs = cut.epochs_for(num_samples, num_tokens)
    count = cut.samples_in(epochs * num_tokens)
    if not count:
        problem = f"{num_tokens} tokens are too few for one sample of {cut.length + cut.extra} tokens"
        raise LayoutError(f"{problem}. Give a smaller sequence_length.")
    order = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    if seed is None:
        return Stream(order, ends_of(sizes, order), None)
    random = np.random.RandomState(seed)
    dtype = np.dtype(np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    shuffle: Integers = np.arange(count, dtype=dtype)
    parts = [order, shuffle]
    before_last = ((epochs - 1) * num_tokens - cut.extra) // cut.length  # samples before the last epoch
    in_last = (num_tokens - cut.extra) // cut.length
    if epochs > 1 and num_samples is not None and num_samples - before_last < int(_SEPARATE * in_last):
        parts = [order[: -len(sizes)], order[-len(sizes) :], shuffle[:before_last], shuffle[before_last:]]
    for part in parts:  # views: a shuffle of a part changes `order` or `shuffle`
        random.shuffle(part)
    return Stream(order, ends_of(sizes, order), shuffle)


def ends_of(sizes: Integers, order: Integers) -> Ints:
    """Return the number of tokens up to the end of each entry: the cumulative sum of `sizes[order]`, int64 [entries]."""
    return np.cumsum(sizes[order], dtype=np.int64)


def sample_index(ends: Ints, cut: Cut) -> Ints:
    """Return megatron-core's sample index, int64 [samples + 1, 2]: a pair (entry, token) for the start of each sample.

    Indices that megatron-core made are compared with it. Rows are read without it.

    The token counts from the start of the entry. The last pair is the end of the last sample. If a sample begins where an entry
    ends, the pair depends on `cut.extra`. With 1, it is token 0 of the next entry. With 0, it is the end of the earlier entry,
    such as token 10 of an entry of 10 tokens.
    """
    count = cut.samples_in(int(ends[-1]))
    border = np.minimum(np.arange(count + 1) * cut.length, ends[-1] - cut.extra)
    entry = ends.searchsorted(border, side="right" if cut.extra else "left")
    entry[0] = 0  # even if that entry is empty
    if border[-1] < count * cut.length:  # the last sample is not full
        entry[-1] = len(ends) - 1  # even if that entry is empty
    return np.stack([entry, border - np.append(0, ends)[entry]], axis=1)
