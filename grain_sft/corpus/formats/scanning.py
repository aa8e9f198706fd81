"""Scanning: check token files and their sidecar files, which a format has found, in parallel, and make a corpus of them."""

import concurrent.futures
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.array_file import MAGIC
from grain_sft.corpus.boundaries import BoundaryKind, describe_boundaries
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.metadata import CorpusMetadata
from grain_sft.corpus.loss import LossFile, LossKind, scan_loss
from grain_sft.corpus.shard import TOKEN_DTYPES, Dtype, Shard, check_plausible, scan_shard
from grain_sft.errors import CorpusError
from grain_sft.progress import with_progress
from grain_sft.storage import DIGEST_BYTES, FileStamp, describe, files, read_head

_LAST_NUMBER = re.compile(r"^.*?0*(\d*)\D*$")  # group 1: the last number of a name, without leading zeros
THREADS = 32  # a scan waits for the disk or for a bucket, not for the processor

T = TypeVar("T")
Subset = Literal["train", "valid", "test"]
SUBSETS: tuple[str, ...] = get_args(Subset)


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """The arguments of `open_corpus` that formats take.

    Attributes:
      dtype: Dtype of headerless arrays; None: as the format states.
      eos_token_id: Token that ends a document; None: as the format states.
      use_loss_mask: Whether loss files are used; None: where they exist.
      masks: Label masks, one for each token file in order; None: the sidecar files.
      split: Weights of Megatron's splits, such as "969,30,1"; None: all sequences.
      subset: "train", "valid" or "test": the part of `split` to read. Without a `split`, it has no effect.
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
        """Raise CorpusError if the caller gave a dtype other than `dtype`, that of the file at `path`.

        `name` is the file's own name for it, such as "int32" of a file that is read as uint32.
        """
        if self.dtype not in (None, dtype):
            raise CorpusError(f"{path}: states {name or dtype} tokens, but dtype={self.dtype} was given. Leave it out.")


class TokenFile(NamedTuple):
    """The files of one shard.

    Attributes:
      tokens: Path of the tokens.
      loss: Path of their loss; "": none.
      loss_kind: "bool", "float32" (weights) or "labels", as in `LossFile`.
      boundaries: Path of the document boundaries; "": none.
      boundaries_kind: Kind of the boundaries, as in `BoundaryFile`.
      continues: Whether the first document began in the shard before; None: unknown.
      label: Label of the shard.
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
    """One split of a corpus: all of its token files, and the facts in its metadata.

    Attributes:
      files: Paths of the token files, in order; () for token files that belong to no corpus.
      metadata: Tokenizer and ids.
      dtype: Dtype of the tokens, or its name; None: unknown.
      dtypes: Names of the dtypes that the format allows.
      sources: Path of the file of documents' sources; "": none.
      continued: Files whose first document began in the file before; None: unknown.
    """

    files: tuple[str, ...] = ()
    metadata: CorpusMetadata = dataclasses.field(default_factory=CorpusMetadata)
    dtype: Dtype | str | None = None
    dtypes: Sequence[str] = TOKEN_DTYPES
    sources: str = ""
    continued: frozenset[str] | None = None

    @functools.cached_property
    def predecessors(self) -> dict[str, str]:
        """The file before each of `files`; "" for the first."""
        return dict(zip(self.files, ("", *self.files), strict=False))


def scan_corpus(split: Split, parts: Sequence[TokenFile], options: ReadOptions) -> Corpus:
    """Return the corpus of the token files `parts`, scanned, with the metadata of `split`.

    Raises:
      CorpusFileError: A file is missing or unreadable.
      CorpusError: Files that don't fit together, or masks for some parts only.
    """
    if options.masks is not None:
        check_masks([part.tokens for part in parts], options.masks)
        parts = [part._replace(loss=mask, loss_kind="bool") for part, mask in zip(parts, options.masks, strict=True)]
    uses_loss = options.use_loss_mask is not False
    without, having = [part for part in parts if not part.loss], [part for part in parts if part.loss]
    if uses_loss and without and having:
        raise CorpusError(
            f"{without[0].tokens}: has no loss mask, but {having[0].tokens} has {having[0].loss}. Without one, all of its "
            "tokens would take loss. Give the missing mask, open the files as two corpora, or ignore all masks with "
            "use_loss_mask=False."
        )
    dtype = options.dtype or (np.dtype(split.dtype) if split.dtype else None)
    opens_loss = uses_loss or dtype is None  # the sizes of loss files imply the dtype
    losses = in_threads(lambda part: scan_loss(part.loss, part.loss_kind) if part.loss and opens_loss else None, parts)
    if dtype is None:
        dtype = _implied_dtype(parts, losses, split.dtypes)
    if dtype is not None and dtype.name not in split.dtypes:
        raise CorpusError(f"{parts[0].tokens}: dtype={dtype}; tokens of this format are {' or '.join(split.dtypes)}.")
    scans = in_threads(lambda part, loss: _scan_part(part, loss, dtype), parts, losses, work="Scanning files")
    first = scans[0][1]
    for shard, own in scans:
        if own != first:
            raise CorpusError(
                f"{shard.path}: its tokens are {own.name}, but those of {parts[0].tokens} are {first.name}. "
                "All files of a corpus have one dtype: convert one of them, or open them as two corpora."
            )
    shards = tuple(shard if uses_loss else dataclasses.replace(shard, loss=None) for shard, _ in scans)
    sources = describe(split.sources) if split.sources else None
    fields = {"sources_file": sources, "ignores_loss": bool(having) and not uses_loss}
    return corpus_of(shards, first, split.metadata, options.eos_token_id, **fields)


def corpus_of(
    shards: tuple[Shard, ...], dtype: Dtype, metadata: CorpusMetadata, eos_token_id: int | None = None, **fields: Any
) -> Corpus:
    """Return the corpus of shards that were scanned; `fields` are further ones of `Corpus`."""
    stated = {name: value for name, value in vars(metadata).items() if name != "path"}
    if eos_token_id is not None:
        stated["eos_token_id"] = eos_token_id
    try:
        return Corpus(shards=shards, dtype=dtype, **stated, **fields)
    except CorpusError as error:
        raise CorpusError(f"{metadata.path or shards[0].path}: {error}") from error


def in_threads(function: Callable[..., T], *columns: Collection[Any], work: str = "") -> list[T]:
    """Return the result of each call, in order. `work` is the title of a progress bar; "" shows none."""
    context = contextvars.copy_context()  # passes on the root that files must lie in
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(lambda *values: context.copy().run(function, *values), *columns)
        return list(with_progress(results, len(columns[0]), work) if work else results)


def _implied_dtype(
    parts: Sequence[TokenFile], losses: Sequence[LossFile | None], allowed: Sequence[str]
) -> Dtype | None:
    """Return the dtype of the first token file with a loss file: from its header, or else from the sizes of both.

    Without loss files, return the last of `allowed` if the format limits dtypes. Else return None, so that each token file's
    header decides.
    """
    for part, loss in zip(parts, losses, strict=True):
        if loss is None:
            continue
        size, head, _ = read_head(part.tokens)
        if head.startswith(MAGIC):
            return scan_shard(part.tokens, None)[1]
        if not size and not loss.count:
            continue
        fitting = [dtype for dtype in map(np.dtype, allowed) if loss.count * dtype.itemsize == size]
        if not fitting:
            raise CorpusError(
                f"{part.tokens}: {size} bytes for {loss.count} values in {loss.path}; tokens are {' or '.join(allowed)}, and "
                "none of these gives a value for each token. A file was cut short, or is of another corpus."
            )
        check_plausible(part.tokens, head, fitting[0])
        return fitting[0]
    return np.dtype(allowed[-1]) if len(allowed) < len(TOKEN_DTYPES) else None  # no loss files, or only empty ones


def _scan_part(part: TokenFile, loss: LossFile | None, dtype: Dtype | None) -> tuple[Shard, Dtype]:
    """Return the shard of a part, and the dtype of its tokens. Without `dtype`, a raw file is uint32."""
    shard, dtype = scan_shard(part.tokens, dtype)
    if loss is not None:
        check_loss(shard, loss, dtype)
    boundaries = describe_boundaries(part.boundaries, part.boundaries_kind, part.continues) if part.boundaries else None
    return dataclasses.replace(shard, label=part.label, loss=loss, boundaries=boundaries), dtype


def check_loss(shard: Shard, loss: LossFile, dtype: Dtype) -> None:
    """Check that a loss file has a value for each token, and that the labels at its two ends are the tokens or IGNORED."""
    if shard.num_tokens != loss.count:
        raise CorpusError(
            f"{loss.path}: {loss.count} values for {shard.num_tokens} {dtype.name} tokens in {shard.path}; expected one "
            "for each. A file was cut short or is of another corpus, or the dtype is wrong. Copy both again, or fix `dtype`."
        )
    values = loss.values
    count = min(shard.num_tokens, DIGEST_BYTES // values.dtype.itemsize)
    for first in sorted({0, shard.num_tokens - count}) if values.follow_tokens else ():
        labels, tokens = _read_values(loss, values.dtype, first, count), _read_values(shard, dtype, first, count)
        wrong = np.flatnonzero(values.wrong(labels, tokens))
        if len(wrong):
            at = int(wrong[0])
            raise CorpusError(
                f"{loss.path}: label {first + at} is {labels[at]}, but that token is {tokens[at]} in {shard.path}; expected "
                f"{values.expected}."
            )


def _read_values(file: FileStamp, dtype: np.dtype[Any], first: int, count: int) -> npt.NDArray[Any]:
    begin = file.data_offset + first * dtype.itemsize
    data = files.read_range(file.path, begin, begin + count * dtype.itemsize, version=file.version)
    return np.frombuffer(data, dtype)


def check_masks(tokens: Sequence[str], masks: Sequence[str]) -> None:
    """Check that the caller names one label mask for each token file, in the order of the numbers in their names."""
    if len(masks) != len(tokens):
        more = max(tokens, masks, key=len)
        raise CorpusError(
            f"label_mask_paths: {len(masks)} label masks for {len(tokens)} token files; expected one for each, in the order "
            f"of the token files. The first without a counterpart is {more[min(len(masks), len(tokens))]}."
        )
    numbers = [[_LAST_NUMBER.sub(r"\1", files.name_of(path)) for path in paths] for paths in (tokens, masks)]
    if numbers[0] != numbers[1] and sorted(numbers[0]) == sorted(numbers[1]):
        at = next(at for at, (one, other) in enumerate(zip(*numbers, strict=True)) if one != other)
        raise CorpusError(
            f"label_mask_paths: {masks[at]} is listed for {tokens[at]}, and the numbers in their names differ. "
            "Globs are sorted as text, and directories by number. Name the masks in the order of the token files."
        )
