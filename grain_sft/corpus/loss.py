"""Loss files: sidecar files that state for each token whether it takes loss, or its weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.array_file import header_of, scan_array
from grain_sft.errors import CorpusError
from grain_sft.storage import FileStamp, RemoteOptions, ShardReader

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped

Ints = npt.NDArray[np.int64]
LossKind = Literal["bool", "float32", "labels"]

IGNORED = -100
"""Label of a token that takes no loss."""


@dataclasses.dataclass(frozen=True)
class LossValues:
    """Properties of the values in loss files of one kind.

    Attributes:
      dtype: Dtype of the values in the file.
      headers: Dtypes that a .npy header may state.
      expected: Description of valid values, for error messages.
      wrong: Function of the values and their tokens that returns a mask of the invalid values.
      no_loss: Value of a token that takes no loss.
      weighted: Whether values are weights.
      follow_tokens: Whether `wrong` needs the tokens.
    """

    dtype: np.dtype[Any]
    headers: tuple[str, ...]
    expected: str
    wrong: Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[np.bool_]]
    no_loss: int = 0
    weighted: bool = False
    follow_tokens: bool = False


def _invalid_weights(values: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    wrong: npt.NDArray[np.bool_] = ~np.isfinite(values) | (values < 0)
    return wrong


def _invalid_labels(values: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    wrong: npt.NDArray[np.bool_] = (values != IGNORED) & (values != tokens.astype(np.int64))
    return wrong


_LABELS = f"the token itself or {IGNORED}, not shifted"
KINDS: dict[LossKind, LossValues] = {
    "bool": LossValues(np.dtype(np.uint8), ("|b1", "|u1"), "0 or 1", lambda values, _: values > 1),
    "float32": LossValues(np.dtype("<f4"), ("<f4",), "a finite weight, 0 or more", _invalid_weights, weighted=True),
    "labels": LossValues(np.dtype("<i4"), ("<i4",), _LABELS, _invalid_labels, IGNORED, follow_tokens=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFile(FileStamp):
    """Loss file of one shard, with the attributes of `FileStamp`. Value i applies where token i is the target.

    Attributes:
      kind: "bool", "float32" (weights) or "labels" (int32, loss where it is not -100).
    """

    kind: LossKind

    @property
    def values(self) -> LossValues:
        """Entry of `KINDS` for this file."""
        return KINDS[self.kind]

    @property
    def count(self) -> int:
        """Number of values in the file."""
        return (self.size - self.data_offset) // self.values.dtype.itemsize


def scan_loss(path: str, kind: LossKind) -> LossFile:
    """Return the loss file at `path`, after a check of its first and last values, unless the check needs the tokens."""
    values = KINDS[kind]
    found = scan_array(path, values.dtype, header_of(path, values.headers, values.dtype))
    for data in () if values.follow_tokens else (found.first, found.last):
        array: npt.NDArray[Any] = np.frombuffer(data, values.dtype, len(data) // values.dtype.itemsize)
        wrong = values.wrong(array, array)
        if wrong.any():
            raise CorpusError(f"{path}: holds {array[wrong][0]}; expected {values.expected} for each token.")
    return LossFile(**vars(found.stamp), kind=kind)


class LossReader:
    """Reader of the loss of tokens. Every token of a shard without a loss file takes loss.

    Args:
      losses: Loss file of each shard, in order, or None for a shard without one.
      max_open_files: Limit of open files, as in `ShardReader`.
      scattered: Whether reads are scattered, as in `ShardReader`.
      remote: Options for reading remote files.

    Attributes:
      weighted: Whether `gather` returns weights, because at least one shard has weights.
    """

    def __init__(
        self,
        losses: Sequence[LossFile | None],
        max_open_files: int | None = None,
        *,
        scattered: bool = False,
        remote: RemoteOptions | None = None,
    ) -> None:
        self._losses, self._readers = losses, dict[LossKind, ShardReader]()
        for kind, stand_in in {loss.kind: loss for loss in losses if loss is not None}.items():
            # Shards of other kinds are never read with this reader. A file of this kind takes their place in the list, so
            # that shard numbers are indices into it.
            of_kind = [loss if loss is not None and loss.kind == kind else stand_in for loss in losses]
            width = KINDS[kind].dtype.itemsize
            self._readers[kind] = ShardReader(of_kind, width, max_open_files, scattered=scattered, remote=remote)
        self._kinds = np.array(["" if loss is None else loss.kind for loss in losses])
        self.weighted = any(KINDS[kind].weighted for kind in self._readers)
        self._uniform = len(self._readers) == 1 and None not in losses

    def gather(
        self,
        shard: Int64[np.ndarray, " pieces"],
        start: Int64[np.ndarray, " pieces"],
        place: Int64[np.ndarray, " pieces"],
        length: Int64[np.ndarray, " pieces"],
        count: int,
    ) -> Shaped[np.ndarray, " count"]:
        """Return bool or float32 [count]: the loss of pieces of shards, and no loss elsewhere.

        Args:
          shard: Shard of each piece.
          start: Token offset of each piece in its shard.
          place: Index in the result at which each piece begins.
          length: Number of tokens in each piece.
          count: Length of the result.

        Raises:
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
          CorpusError: A weight is negative or not finite.
        """
        if self._uniform:  # without this path, a batch of packed chats takes 6 % longer
            return self._gather_kind(self._losses[0].kind, shard, start, place, length, count)  # type: ignore[union-attr]
        out: npt.NDArray[Any] = np.zeros(count, np.float32 if self.weighted else np.bool_)
        kinds = self._kinds[shard]
        for kind in self._readers:
            own = kinds == kind
            found = self._gather_kind(kind, shard[own], start[own], place[own], length[own], count)
            out = np.add(out, found, dtype=out.dtype)
        for first, size in zip(place[kinds == ""].tolist(), length[kinds == ""].tolist(), strict=True):
            out[first : first + size] = 1
        return out

    def _gather_kind(
        self, kind: LossKind, shard: Ints, start: Ints, place: Ints, length: Ints, count: int
    ) -> npt.NDArray[Any]:
        """Return what `gather` returns, for pieces of shards whose loss files are of one kind."""
        values = KINDS[kind]
        raw: npt.NDArray[Any] = np.full(count, values.no_loss, values.dtype)
        width = raw.itemsize
        self._readers[kind].gather(shard, start, place * width, length * width, raw.data.cast("B"))
        if not values.weighted:
            taken: npt.NDArray[np.bool_] = raw != values.no_loss
            return taken
        if raw.size and not (raw.min() >= 0 and raw.max() < np.inf):  # both comparisons are False for NaN
            at = int(np.flatnonzero(values.wrong(raw, raw))[0])
            piece = int(np.flatnonzero((place <= at) & (at < place + length))[0])
            path = self._losses[shard[piece]].path
            raise CorpusError(
                f"{path}: the weight of token {start[piece] + at - place[piece]} is {raw[at]}; "
                "expected a finite number, 0 or more. Prepare the corpus again."
            )
        return raw
