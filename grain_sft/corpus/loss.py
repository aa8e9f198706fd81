"""Loss files: sidecars that state which tokens take loss, or how much of it, one value for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError
from grain_sft.storage import DIGEST_BYTES, MAGIC, RemoteOptions, ShardReader, digest_of, files, npy_header, read_head

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped

Count = Annotated[int, msgspec.Meta(ge=0)]
Ints = npt.NDArray[np.int64]
LossKind = Literal["bool", "float32", "labels"]

IGNORED = -100
"""The label of a token that takes no loss."""

KINDS: dict[LossKind, np.dtype[np.generic]] = {
    "bool": np.dtype(np.uint8),  # 0 or 1
    "float32": np.dtype("<f4"),  # a weight; 0: no loss
    "labels": np.dtype("<i4"),  # the token itself, or IGNORED
}
_HEADERS = {"bool": ("|b1", "|u1"), "float32": ("<f4",), "labels": ("<i4",)}


@dataclasses.dataclass(frozen=True)
class LossFile:
    """The loss of one shard's tokens. Value i states whether token i, as a target, takes loss.

    Attributes:
      path: Local path, or URL.
      kind: "bool", "float32" (weights) or "labels" (int32, loss where it is not -100).
      size: Size of the whole file in bytes.
      data_offset: Bytes before the first value.
      digest: Hash of the first and the last 4 KiB of values.
      version: Version of a remote file; None: unknown.
      root: Folder that the file must lie in whenever it is opened; None: anywhere. It is not saved.
    """

    path: str
    kind: LossKind
    size: Count
    data_offset: Count
    digest: str
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        """Number of values in the file."""
        return (self.size - self.data_offset) // KINDS[self.kind].itemsize


def scan_loss(path: str, kind: LossKind) -> LossFile:
    """Return a loss file of one of `KINDS`, after a check of the values at its ends."""
    size, head, version = read_head(path)
    dtype, offset = KINDS[kind], 0
    if head.startswith(MAGIC):
        descr, shape, offset = npy_header(path, head, size, version)
        if descr not in _HEADERS[kind] or len(shape) != 1:
            raise CorpusError(
                f"{path}: its .npy header says dtype {descr!r} and shape {shape}; expected {_HEADERS[kind][0]!r} "
                "and one dimension."
            )
        if not isinstance(shape[0], int) or shape[0] * dtype.itemsize != size - offset:
            raise CorpusError(f"{path}: the header promises {shape[0]} values, but {size - offset} bytes follow it.")
    if (size - offset) % dtype.itemsize:
        raise CorpusError(
            f"{path}: {size} bytes is not a multiple of {dtype.itemsize}, the size of a {dtype.name}. It was cut short."
        )
    first = files.read_range(path, offset, offset + DIGEST_BYTES, version=version) if offset else head[:DIGEST_BYTES]
    tail_start = max(offset, size - DIGEST_BYTES)
    last = files.read_range(path, tail_start, size, version=version)
    _check_values(path, kind, first)
    _check_values(path, kind, last)
    return LossFile(path, kind, size, offset, digest_of(first, last), version)


def _check_values(path: str, kind: LossKind, data: bytes) -> None:
    """Check the values at an end of the file. `check_labels` compares labels with the tokens."""
    dtype = KINDS[kind]
    values: npt.NDArray[Any] = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
    if kind == "bool":
        wrong, expected = values > 1, "0 or 1"
    elif kind == "float32":
        wrong, expected = ~np.isfinite(values) | (values < 0), "a finite weight, 0 or more"
    else:
        return
    if wrong.any():
        raise CorpusError(f"{path}: holds {values[wrong][0]}; expected {expected} for each token. It is another file.")


class LossReader:
    """Reader of the loss of a corpus's tokens. Every token of a shard without a loss file takes loss.

    Args:
      losses: Loss file of each shard, in order; None where it has none.
      max_open_files: Open files, as in `ShardReader`.
      scattered: Whether reads are scattered, as in `ShardReader`.
      remote: How remote files are read.

    Attributes:
      weighted: Whether the values are weights: some shard has weights, and so all have.
    """

    def __init__(
        self,
        losses: Sequence[LossFile | None],
        max_open_files: int | None = None,
        *,
        scattered: bool = False,
        remote: RemoteOptions | None = None,
    ) -> None:
        kinds = [None if loss is None else loss.kind for loss in losses]
        self.weighted = "float32" in kinds
        self._sets = [
            _LossSet(kind, losses, max_open_files, scattered, remote)
            for kind in dict.fromkeys(kinds)
            if kind is not None
        ]
        self._uniform = len(self._sets) == 1 and None not in kinds

    def gather(
        self,
        shard: Int64[np.ndarray, " pieces"],
        start: Int64[np.ndarray, " pieces"],
        place: Int64[np.ndarray, " pieces"],
        length: Int64[np.ndarray, " pieces"],
        count: int,
    ) -> Shaped[np.ndarray, " count"]:
        """Return bool or float32 [count]: from `place` on, `length` values of `shard` from token `start` on; else no loss.

        Args:
          shard: int64 [pieces], shard numbers.
          start: int64 [pieces], token offsets in the shards.
          place: int64 [pieces], indices into the result.
          length: int64 [pieces], numbers of values.
          count: Length of the result.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
          CorpusError: a weight is negative or not finite.
        """
        if self._uniform:
            return self._sets[0].gather(shard, start, place, length, count)
        out: npt.NDArray[Any] = np.zeros(count, np.float32 if self.weighted else np.bool_)
        left = np.ones(len(shard), np.bool_)
        for each in self._sets:
            mine = each.number[shard] >= 0
            left &= ~mine
            out = np.add(out, each.gather(shard[mine], start[mine], place[mine], length[mine], count), dtype=out.dtype)
        for first, size in zip(place[left].tolist(), length[left].tolist(), strict=True):
            out[first : first + size] = 1
        return out


class _LossSet:
    """The loss files of one kind."""

    def __init__(
        self,
        kind: LossKind,
        losses: Sequence[LossFile | None],
        max_open_files: int | None,
        scattered: bool,
        remote: RemoteOptions | None,
    ) -> None:
        self.number: Ints = np.full(len(losses), -1, np.int64)  # index of each shard's file in `_files`
        mine = [number for number, loss in enumerate(losses) if loss is not None and loss.kind == kind]
        self.number[mine] = np.arange(len(mine))
        self._kind, self._files = kind, [loss for loss in losses if loss is not None and loss.kind == kind]
        self._reader = ShardReader(
            self._files, KINDS[kind].itemsize, max_open_files, scattered=scattered, remote=remote
        )

    def gather(self, shard: Ints, start: Ints, place: Ints, length: Ints, count: int) -> npt.NDArray[Any]:
        dtype = KINDS[self._kind]
        raw: npt.NDArray[Any] = np.full(count, IGNORED if self._kind == "labels" else 0, dtype)
        numbers = self.number[shard]
        self._reader.gather(numbers, start, place * dtype.itemsize, length * dtype.itemsize, raw.data.cast("B"))
        if self._kind != "float32":
            taken: npt.NDArray[np.bool_] = raw != (IGNORED if self._kind == "labels" else 0)
            return taken
        if raw.size and not (raw.min() >= 0 and raw.max() < np.inf):  # both are false for NaN
            at = int(np.flatnonzero(~(raw >= 0) | (raw == np.inf))[0])
            piece = int(np.flatnonzero((place <= at) & (at < place + length))[0])
            token = int(start[piece] + at - place[piece])
            raise CorpusError(
                f"{self._files[numbers[piece]].path}: the weight of token {token} is {raw[at]}; expected a finite number, 0 or "
                "more. Prepare the corpus again."
            )
        return raw
