"""Scanning: check the files that a format lists, in parallel, and make a corpus of them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from grain_sft.corpus.array_file import MAGIC, first_true
from grain_sft.corpus.boundaries import BoundaryKind, describe_boundaries
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.metadata import CorpusMetadata
from grain_sft.corpus.loss import LossFile, LossKind, scan_loss
from grain_sft.corpus.shard import TOKEN_DTYPES, Dtype, Shard, as_token_id, check_plausible, scan_shard
from grain_sft.errors import CorpusError
from grain_sft.progress import with_progress
from grain_sft.storage import MANY_THREADS, FileStamp, describe, file_stamp, files, in_threads
from grain_sft.types import Array

_LAST_NUMBER = re.compile(r"^.*?0*(\d*)\D*$")  # group 1: the last number of a name, without leading zeros

T = TypeVar("T")
Subset = Literal["train", "valid", "test"]
SUBSETS: tuple[str, ...] = get_args(Subset)


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Arguments of `open_corpus` that formats use.

    Attributes:
      masks: Paths of label masks, one for each token file; None for the sidecar files.
      remap: Function that applies `path_remap` to a path that a mix or an index lists.
      check_paths: Function that refuses paths outside of `root`.
    """

    dtype: Dtype | None = None
    eos_token_id: int | None = None
    use_loss_mask: bool | None = None
    masks: tuple[str, ...] | None = None
    split: str | None = None
    subset: Subset = "train"
    remap: Callable[[str], str] = lambda path: path
    check_paths: Callable[[Sequence[str]], None] = lambda paths: None

    def check_dtype(self, path: str, dtype: Dtype, name: str = "") -> None:
        """Raise CorpusError if `self.dtype` is set and is not `dtype`, the dtype that the file `path` states.

        `name` is the dtype in the message, such as "int32" for a file that is read as uint32. "" means the name of `dtype`.
        """
        if self.dtype not in (None, dtype):
            raise CorpusError(f"{path}: states {name or dtype} tokens, but dtype={self.dtype} was given. Omit dtype.")


class TokenFile(NamedTuple):
    """The paths of a token file and its sidecar files.

    Attributes:
      tokens: Path of the token file.
      loss: Path of the loss file; "" for a token file without one.
      loss_kind: Kind of the loss file: "bool", "float32" (weights) or "labels".
      boundaries: Path of the boundary file; "" for a token file without one.
      boundaries_kind: Kind of the boundary file, as in `BoundaryFile`.
      continues: Whether the first document began in the preceding token file; None if unknown.
      label: Label of the token file in its mix.
    """

    tokens: str
    loss: str = ""
    loss_kind: LossKind = "bool"
    boundaries: str = ""
    boundaries_kind: BoundaryKind = "csv"
    continues: bool | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a corpus, such as the training split: its token files and its metadata.

    Attributes:
      files: Paths of all token files of the split, in order; () if unknown.
      metadata: Tokenizer and ids.
      dtype: Dtype of the tokens, or its name; None if unknown.
      dtypes: Names of the dtypes that the format allows.
      sources: Path of the file that states the source of each document; "" for a split without one.
      continued: Those of `files` whose first document began in the preceding file; None if unknown.
    """

    files: tuple[str, ...] = ()
    metadata: CorpusMetadata = dataclasses.field(default_factory=CorpusMetadata)
    dtype: Dtype | str | None = None
    dtypes: Sequence[str] = TOKEN_DTYPES
    sources: str = ""
    continued: frozenset[str] | None = None

    @functools.cached_property
    def predecessors(self) -> dict[str, str]:
        """For each of `files`, the file before it; "" for the first file."""
        return dict(zip(self.files, ("", *self.files), strict=False))


def scan_corpus(split: Split, parts: Sequence[TokenFile], options: ReadOptions) -> Corpus:
    """Return the corpus of the token files `parts`, with the metadata of `split`.

    Raises:
      CorpusFileError: A file is missing or unreadable.
      CorpusError: A file is damaged, files do not fit together, or only some token files have a loss file.
    """
    if options.masks is not None:
        check_masks([part.tokens for part in parts], options.masks)
        parts = [part._replace(loss=mask, loss_kind="bool") for part, mask in zip(parts, options.masks, strict=True)]
    uses_loss = options.use_loss_mask is not False
    without_loss = [part for part in parts if not part.loss]
    with_loss = [part for part in parts if part.loss]
    if uses_loss and without_loss and with_loss:
        problem = f"{without_loss[0].tokens}: has no loss mask, but {with_loss[0].tokens} has {with_loss[0].loss}"
        fix = "Give the missing mask, open two corpora, or ignore all masks with use_loss_mask=False"
        raise CorpusError(f"{problem}. Without a mask, all tokens take loss. {fix}.")
    dtype = options.dtype or (np.dtype(split.dtype) if split.dtype else None)
    reads_loss = uses_loss or dtype is None  # an unknown dtype is inferred from the sizes of loss files
    losses = scan_in_threads(lambda part: scan_loss(part.loss, part.loss_kind) if part.loss and reads_loss else None, parts)
    if dtype is None:
        dtype = _infer_dtype(parts, losses, split.dtypes)
    if dtype is not None and dtype.name not in split.dtypes:
        expected = f"tokens of this format are {' or '.join(split.dtypes)}"
        raise CorpusError(f"{parts[0].tokens}: dtype={dtype}; {expected}. Give one of these, or convert the file.")
    scans = scan_in_threads(lambda part, loss: _scan_part(part, loss, dtype), parts, losses, work="Scanning files")
    first_dtype = scans[0][1]
    for shard, shard_dtype in scans:
        if shard_dtype != first_dtype:
            problem = f"{shard.path}: its tokens are {shard_dtype.name}, but those of {parts[0].tokens} are {first_dtype.name}"
            raise CorpusError(f"{problem}. A corpus has one dtype: convert one of them, or open two corpora.")
    shards = tuple(shard if uses_loss else dataclasses.replace(shard, loss=None) for shard, _ in scans)
    sources = describe(split.sources) if split.sources else None
    # true also with `label_mask_paths`, because they take the place of loss files that are found by name
    ignores_loss = bool(with_loss) and (not uses_loss or options.masks is not None)
    return corpus_of(shards, first_dtype, split.metadata, options.eos_token_id, sources_file=sources, ignores_loss=ignores_loss)


def corpus_of(
    shards: tuple[Shard, ...], dtype: Dtype, metadata: CorpusMetadata, eos_token_id: int | None = None, **fields: Any
) -> Corpus:
    """Return the corpus of `shards`. `eos_token_id` overrides that of `metadata`. `fields` are more fields of `Corpus`."""
    facts = {name: value for name, value in vars(metadata).items() if name != "path"}
    if eos_token_id is not None:
        facts["eos_token_id"] = as_token_id("eos_token_id", eos_token_id, dtype, fields.get("signed", False))
    try:
        return Corpus(shards=shards, dtype=dtype, **facts, **fields)
    except CorpusError as error:
        raise CorpusError(f"{metadata.path or shards[0].path}: {error}") from error


def scan_in_threads(function: Callable[..., T], *columns: Collection[Any], work: str = "") -> list[T]:
    """Return `list(map(function, *columns))`, computed in threads. `work` is the title of a progress bar; "" shows none."""
    results = in_threads(function, *columns, threads=MANY_THREADS)
    return list(with_progress(results, len(columns[0]), work) if work else results)


def _infer_dtype(parts: Sequence[TokenFile], losses: Sequence[LossFile | None], allowed: Sequence[str]) -> Dtype | None:
    """Infer the dtype from the number of loss values: a raw file of 2000 bytes with 1000 loss values is uint16.

    Without loss files, return the last of `allowed`. If `allowed` has every dtype, return None: `scan_shard` then infers it.
    """
    for part, loss in zip(parts, losses, strict=True):
        if loss is None:
            continue
        size, head, _ = file_stamp.read_head(part.tokens)
        if head.startswith(MAGIC):  # a .npy header, which states the dtype
            return scan_shard(part.tokens, None)[1]
        if not size and not loss.count:  # empty files fit every dtype
            continue
        fitting = [dtype for dtype in map(np.dtype, allowed) if loss.count * dtype.itemsize == size]
        if not fitting:
            problem = f"{part.tokens}: {size} bytes, and {loss.path} has {loss.count} values"
            expected = f"expected one value for each token of dtype {' or '.join(allowed)}"
            raise CorpusError(f"{problem}; {expected}. Copy both files again.")
        check_plausible(part.tokens, head, fitting[0])
        return fitting[0]
    return np.dtype(allowed[-1]) if len(allowed) < len(TOKEN_DTYPES) else None


def _scan_part(part: TokenFile, loss: LossFile | None, dtype: Dtype | None) -> tuple[Shard, Dtype]:
    """Return the shard of a token file and the dtype of its tokens."""
    shard, dtype = scan_shard(part.tokens, dtype)
    if loss is not None:
        check_loss(shard, loss, dtype)
    boundaries = describe_boundaries(part.boundaries, part.boundaries_kind, part.continues) if part.boundaries else None
    return dataclasses.replace(shard, label=part.label, loss=loss, boundaries=boundaries), dtype


def check_loss(shard: Shard, loss: LossFile, dtype: Dtype) -> None:
    """Check that a loss file has a value for each token, and that its first and last labels belong to their tokens."""
    if shard.num_tokens != loss.count:
        problem = f"{loss.path}: {loss.count} values for {shard.num_tokens} {dtype.name} tokens in {shard.path}"
        raise CorpusError(f"{problem}; expected one for each. Copy both files again, or fix `dtype`.")
    encoding = loss.encoding
    if not encoding.needs_tokens:  # a mask or weights, which `scan_loss` has checked
        return
    count = min(shard.num_tokens, file_stamp.DIGEST_BYTES // encoding.dtype.itemsize)
    for first in sorted({0, shard.num_tokens - count}):
        labels, tokens = _read_values(loss, encoding.dtype, first, count), _read_values(shard, dtype, first, count)
        if (i := first_true(encoding.find_invalid(labels, tokens))) is not None:
            found = f"label {first + i} is {labels[i]}, but token {first + i} of {shard.path} is {tokens[i]}"
            raise CorpusError(f"{loss.path}: {found}; expected {encoding.expected}. Copy both files again.")


def _read_values(file: FileStamp, dtype: np.dtype[Any], first: int, count: int) -> Array:
    """Return `count` values of a token file or a loss file, from value `first` on."""
    begin = file.data_offset + first * dtype.itemsize
    data = files.read_range(file.path, begin, begin + count * dtype.itemsize, version=file.version)
    return np.frombuffer(data, dtype)


def check_masks(tokens: Sequence[str], masks: Sequence[str]) -> None:
    """Check that there is one label mask for each token file, and that the files are in the same order.

    The order is checked by the last number in each name, and only if token files and masks have the same numbers.
    """
    if len(masks) != len(tokens):
        longer = max(tokens, masks, key=len)
        problem = f"label_mask_paths: {len(masks)} label masks for {len(tokens)} token files"
        fix = f"Add the counterpart of {longer[min(len(masks), len(tokens))]}, or remove this file"
        raise CorpusError(f"{problem}; expected one for each, in the order of the token files. {fix}.")
    numbers = [[_LAST_NUMBER.sub(r"\1", files.name_of(path)) for path in paths] for paths in (tokens, masks)]
    if sorted(numbers[0]) != sorted(numbers[1]):
        return  # the names are numbered in different ways, or not at all
    for token_file, mask, token_number, mask_number in zip(tokens, masks, *numbers, strict=True):
        if token_number != mask_number:
            problem = f"label_mask_paths: {mask} is listed for {token_file}, and the numbers in their names differ"
            fix = "Files of a glob are sorted as text: 10 is before 2. List the masks in the order of the token files"
            raise CorpusError(f"{problem}. {fix}.")
