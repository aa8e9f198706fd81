"""Loss files: sidecar files that state whether each token of a shard takes loss, or the weight of its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grain_sft.arguments import check_choice
from grain_sft.corpus.array_file import scan_array
from grain_sft.errors import CorpusError
from grain_sft.storage import FileStamp, RemoteOptions, ShardReader
from grain_sft.types import Array, Bools, Ints

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped

LossKind = Literal["bool", "float32", "labels"]

IGNORED = -100
"""Label of a token that takes no loss."""


@dataclasses.dataclass(frozen=True)
class LossEncoding:
    """Encoding of the loss in one kind of loss files, and the check of its values."""

    dtype: np.dtype[Any]
    expected: str  # description of valid values, for error messages
    find_invalid: Callable[[Array, Array], Bools]
    """Function that returns a mask of the invalid values, given the values and the tokens that they belong to."""
    no_loss: int = 0  # value of a token that takes no loss
    weighted: bool = False  # whether values are weights
    needs_tokens: bool = False  # whether `find_invalid` uses the tokens
    codes: tuple[str, ...] = ()  # dtypes that a .npy header may state besides `dtype`, such as "b1" for bool


KINDS: dict[LossKind, LossEncoding] = {
    "bool": LossEncoding(np.dtype(np.uint8), "0 or 1", lambda values, tokens: values > 1, codes=("b1",)),
    "float32": LossEncoding(
        np.dtype("<f4"), "a finite weight, 0 or more", lambda values, tokens: ~np.isfinite(values) | (values < 0), weighted=True
    ),
    "labels": LossEncoding(
        np.dtype("<i4"),
        f"the token itself or {IGNORED}, not shifted",
        lambda values, tokens: (values != IGNORED) & (values != tokens.astype(np.int64)),
        no_loss=IGNORED,
        needs_tokens=True,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFile(FileStamp):
    """Loss file of one shard, with the attributes of `FileStamp`. Value i is the loss of predicting token i.

    Attributes:
      kind: "bool", "float32" (weights) or "labels" (int32, loss where it is not -100).
    """

    kind: LossKind

    @property
    def encoding(self) -> LossEncoding:
        return KINDS[self.kind]

    @property
    def count(self) -> int:
        return (self.size - self.data_offset) // self.encoding.dtype.itemsize


def scan_loss(path: str, kind: LossKind) -> LossFile:
    """Return the loss file at `path`. Its first and last values are checked, unless the check needs tokens."""
    check_choice(f"{path}: loss_kind", kind, tuple(KINDS), CorpusError)
    encoding = KINDS[kind]
    array = scan_array(path, encoding.dtype, encoding.codes)
    ends = () if encoding.needs_tokens else (array.first, array.last)
    for data in ends:
        values: Array = np.frombuffer(data, encoding.dtype, len(data) // encoding.dtype.itemsize)
        wrong = encoding.find_invalid(values, values)  # the second argument, the tokens, is not used
        if wrong.any():
            found = f"{path}: holds {values[wrong][0]}; expected {encoding.expected} for each token"
            raise CorpusError(f"{found}. Write the file again.")
    return LossFile(**vars(array.stamp), kind=kind)


class LossReader:
    """Reader of the loss of tokens from loss files. In a shard without a loss file, every token takes loss.

    Args:
      losses: Loss file of each shard, in order; None for a shard without a loss file.
      max_open_files, scattered, remote: Arguments of the `ShardReader` of each kind of loss file.

    Attributes:
      weighted: Whether at least one shard has weights. Then `gather` returns weights.
    """

    def __init__(
        self,
        losses: Sequence[LossFile | None],
        max_open_files: int | None = None,
        *,
        scattered: bool = False,
        remote: RemoteOptions | None = None,
    ) -> None:
        self._losses = losses
        self._kinds = np.array(["" if loss is None else loss.kind for loss in losses])
        self._readers: dict[LossKind, ShardReader] = {}
        for kind, example in {loss.kind: loss for loss in losses if loss is not None}.items():
            # A `ShardReader` finds files by shard number. For shards without a loss file of this kind, `example` is listed, but
            # never read.
            listed = [loss if loss is not None and loss.kind == kind else example for loss in losses]
            width = KINDS[kind].dtype.itemsize
            self._readers[kind] = ShardReader(listed, width, max_open_files, scattered=scattered, remote=remote)
        self.weighted = any(KINDS[kind].weighted for kind in self._readers)
        # the kind of all loss files, if every shard has a loss file of the same kind; else None
        self._only_kind = next(iter(self._readers)) if len(self._readers) == 1 and None not in losses else None

    def gather(
        self,
        shard: Int64[np.ndarray, " pieces"],
        start: Int64[np.ndarray, " pieces"],
        place: Int64[np.ndarray, " pieces"],
        length: Int64[np.ndarray, " pieces"],
        count: int,
    ) -> Shaped[np.ndarray, " count"]:
        """Return the loss of pieces of shards: float32 [count] if `weighted`, else bool [count].

        Args:
          shard: Shard of each piece.
          start: Token offset of each piece in its shard.
          place: Index in the result at which each piece begins. Pieces don't overlap. The result is 0 outside of them.
          length: Number of tokens in each piece.
          count: Length of the result.

        Raises:
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
          CorpusError: A weight is negative or not finite.
        """
        if self._only_kind is not None:  # without this path, a batch of packed chats takes 6 % longer
            return self._gather_kind(self._only_kind, shard, start, place, length, count)
        result: Array = np.zeros(count, np.float32 if self.weighted else np.bool_)
        kinds = self._kinds[shard]
        for kind in self._readers:
            of_kind = kinds == kind
            # the added array is 0 outside of these pieces
            result += self._gather_kind(kind, shard[of_kind], start[of_kind], place[of_kind], length[of_kind], count)
        without_file = kinds == ""
        for begin, size in zip(place[without_file].tolist(), length[without_file].tolist(), strict=True):
            result[begin : begin + size] = 1
        return result

    def _gather_kind(self, kind: LossKind, shard: Ints, start: Ints, place: Ints, length: Ints, count: int) -> Array:
        """Return the result of `gather` for pieces with loss files of one kind."""
        encoding = KINDS[kind]
        raw: Array = np.full(count, encoding.no_loss, encoding.dtype)
        width = raw.itemsize
        self._readers[kind].gather(shard, start, place * width, length * width, raw.data.cast("B"))
        if not encoding.weighted:
            takes_loss: Bools = raw != encoding.no_loss
            return takes_loss
        if raw.size and not (raw.min() >= 0 and raw.max() < np.inf):  # both comparisons are False for NaN
            index = int(np.flatnonzero(encoding.find_invalid(raw, raw))[0])
            piece = int(np.flatnonzero((place <= index) & (index < place + length))[0])
            path = self._losses[shard[piece]].path
            problem = f"{path}: the weight of token {start[piece] + index - place[piece]} is {raw[index]}"
            raise CorpusError(f"{problem}; expected a finite number, 0 or more. Prepare the corpus again.")
        return raw
