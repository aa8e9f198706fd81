"""Loss files: which tokens take loss, or how much of it, in a file beside the tokens and aligned to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError
from grain_sft.storage import DIGEST_BYTES, MAGIC, digest_of, files, npy_header, read_head

IGNORED = -100
"""The label of a token that takes no loss."""

KINDS: dict[str, np.dtype[np.generic]] = {
    "bool": np.dtype(np.uint8),  # 0 or 1
    "float32": np.dtype("<f4"),  # a weight; 0: no loss
    "labels": np.dtype("<i4"),  # the token itself, or IGNORED
}
_HEADERS = {"bool": ("|b1", "|u1"), "float32": ("<f4",), "labels": ("<i4",)}


@dataclasses.dataclass(frozen=True)
class LossFile:
    """The loss of one shard's tokens, a value for each: value i says whether token i, as a target, takes loss.

    Attributes:
      path: local path, or URL.
      kind: "bool", "float32" or "labels" (int32, loss where it is not -100).
      size: bytes of the whole file.
      data_offset: bytes before the first value.
      digest: hash of the first and the last 4 KiB of values.
      version: version of a remote file; None: not known.
      root: folder that the file has to lie in whenever it is opened; None: it may lie anywhere. Not saved.
    """

    path: str
    kind: str
    size: int
    data_offset: int
    digest: str
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        """Values in the file."""
        return (self.size - self.data_offset) // KINDS[self.kind].itemsize


def scan_loss(path: str, kind: str) -> LossFile:
    """Size and ends of a loss file, its values at the ends checked.

    Raises:
      CorpusFileError: missing or unreadable.
      CorpusError: not a whole number of values, or values that such a file can't hold.
    """
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
            f"{path}: {size} bytes is no multiple of {dtype.itemsize}, the size of a {dtype.name}. It was cut short."
        )
    first = files.read_range(path, offset, offset + DIGEST_BYTES, version=version) if offset else head[:DIGEST_BYTES]
    tail_start = max(offset, size - DIGEST_BYTES)
    last = files.read_range(path, tail_start, size, version=version)
    _check_values(path, kind, first)
    _check_values(path, kind, last)
    return LossFile(path, kind, size, offset, digest_of(first, last), version)


def _check_values(path: str, kind: str, data: bytes) -> None:
    """Check values at an end of the file; labels are compared with the tokens, by `check_labels`."""
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


def check_labels(
    loss: LossFile, tokens_path: str, tokens_offset: int, num_tokens: int, dtype: np.dtype[np.unsignedinteger]
) -> None:
    """Check that labels at the file's two ends are the tokens themselves or IGNORED.

    Raises:
      CorpusError: some are neither: the files don't belong together, or the labels are shifted.
    """
    count = min(num_tokens, DIGEST_BYTES // KINDS[loss.kind].itemsize)
    for first in dict.fromkeys((0, num_tokens - count)):
        width = KINDS[loss.kind].itemsize
        begin = loss.data_offset + first * width
        labels = np.frombuffer(files.read_range(loss.path, begin, begin + count * width, version=loss.version), "<i4")
        begin = tokens_offset + first * dtype.itemsize
        tokens = np.frombuffer(files.read_range(tokens_path, begin, begin + count * dtype.itemsize), dtype)
        if len(labels) != len(tokens):
            raise CorpusError(f"{loss.path}: was cut short while it was opened.")
        wrong = np.flatnonzero((labels != IGNORED) & (labels != tokens.astype(np.int64)))
        if len(wrong):
            place = int(wrong[0])
            raise CorpusError(
                f"{loss.path}: label {first + place} is {labels[place]}, but that token is {tokens[place]} in "
                f"{tokens_path}; expected the token itself or {IGNORED}, not shifted."
            )
