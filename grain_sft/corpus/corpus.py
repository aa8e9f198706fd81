"""Corpus: the tokens, the documents and the loss masks in a list of files."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import index_writer
from grain_sft.corpus.boundary_documents import sequences_of
from grain_sft.corpus.content import content_of_corpus, fingerprint_of
from grain_sft.corpus.document_finder import DocumentFinder
from grain_sft.corpus.documents import Document, Documents, iter_documents, read_documents, read_sources
from grain_sft.corpus.loss import LossFile, LossReader
from grain_sft.corpus.row_format import RowFormat
from grain_sft.corpus.shard import Shard, as_token_id, check_signed
from grain_sft.errors import RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.storage import FileStamp, RemoteOptions, ShardReader

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of one dtype, in order, with sidecar files that state which tokens take loss and where documents end.

    `grain_sft.open_corpus` returns one. A corpus opens its files on first use. Its pickle holds no open file.

    Attributes:
      shards: Token files, in the order of the corpus.
      dtype: Dtype of the tokens on disk: uint8, uint16, uint32 or uint64.
      eos_token_id: Token that ends a document; None if unknown.
      tokenizer: Name of the tokenizer; None if unknown. No batch depends on it.
      tokenizer_sha256: Hash of the tokenizer's files; None if unknown.
      pad_token_id: Token for padding; None if unknown.
      sources_file: File that `sources` reads; None if there is no such file.
      source_names: Names of the inputs, indexed by their numbers in `sources`.
      rows: Format of the rows that `grain-sft pack --materialize` stored; None if the files hold tokens alone.
      weights: Weight of each shard, if the corpus was opened as a Megatron blend; else ().
      signed: Whether the files store signed integers. They are read as unsigned ones, and a negative token is an error.
      remote: Options for reading remote files; None for those of the environment variables.
      ignores_loss: Whether loss files exist but `use_loss_mask=False` ignores them.

    Raises:
      CorpusError: `dtype` can't hold `eos_token_id` or `pad_token_id`.
    """

    shards: tuple[Shard, ...]
    dtype: np.dtype[np.unsignedinteger]
    eos_token_id: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    pad_token_id: int | None = None
    sources_file: FileStamp | None = None
    source_names: tuple[str, ...] = ()
    rows: RowFormat | None = None
    weights: tuple[float, ...] = ()
    signed: bool = False
    remote: RemoteOptions | None = dataclasses.field(default=None, compare=False)
    ignores_loss: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("eos_token_id", "pad_token_id"):
            object.__setattr__(self, name, as_token_id(name, getattr(self, name), self.dtype, self.signed))

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def padding_token_id(self) -> int:
        """Token that fills the end of a row: `pad_token_id`, else `eos_token_id`, else 0."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return 0 if self.eos_token_id is None else self.eos_token_id

    @property
    def has_loss(self) -> bool:
        """Whether loss files select the tokens that take loss. Without them, every token does."""
        return any(shard.loss is not None for shard in self.shards)

    @property
    def loss_files(self) -> list[LossFile | None]:
        """Loss file of each shard, or None for a shard without one."""
        return [shard.loss for shard in self.shards]

    @property
    def has_weights(self) -> bool:
        """Whether a loss file holds weights instead of a mask."""
        return any(shard.loss is not None and shard.loss.values.weighted for shard in self.shards)

    @property
    def of_pairs(self) -> bool:
        """Whether documents are preference pairs: a prompt and two responses."""
        return any(shard.boundaries is not None and shard.boundaries.kind == "preference" for shard in self.shards)

    @property
    def has_boundary_files(self) -> bool:
        """Whether boundary files state where documents begin and end. Without them, EOS tokens do."""
        return any(shard.boundaries is not None for shard in self.shards)

    def files(self) -> list[FileStamp]:
        """Return all files: token files, then their sidecar files, then `sources_file`."""
        sidecars = [file for shard in self.shards for file in (shard.loss, shard.boundaries)]
        return [file for file in (*self.shards, *sidecars, self.sources_file) if file is not None]

    def map_files(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy of the corpus with `change(file)` in place of each file that `files` returns."""

        def changed(file: Any) -> Any:
            return None if file is None else change(file)

        shards = []
        for shard in self.shards:
            loss, boundaries = changed(shard.loss), changed(shard.boundaries)
            shards.append(dataclasses.replace(change(shard), loss=loss, boundaries=boundaries))
        return dataclasses.replace(self, shards=tuple(shards), sources_file=changed(self.sources_file))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the dtype, the EOS id, and the length and first and last 4 KiB of each token, loss and boundary file.

        Access reads no file. A copy in another folder or in a bucket has the same fingerprint, because paths are not part of
        it. A change in the middle of a file does not change the fingerprint; it changes `content_hash`.
        """
        return fingerprint_of(self)

    @property
    def ends_fingerprint(self) -> str:
        """`fingerprint` with the prefix that commands print, such as "ends-sha256:3f9a…"."""
        return f"ends-{self.fingerprint}"

    def _repr_html_(self) -> str:
        loss = {shard.loss.kind for shard in self.shards if shard.loss is not None}
        facts = {
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "shards": len(self.shards),
            "first shard": self.shards[0].path if self.shards else None,
            "documents": vars(self).get("num_documents"),  # only if cached: counting may read all tokens
            "loss": " and ".join(sorted(loss)) or "on all tokens",
            "EOS id": self.eos_token_id,
            "padding id": self.padding_token_id,
            "tokenizer": self.tokenizer,
        }
        return html_facts(type(self).__name__, facts)

    @functools.cached_property
    def num_documents(self) -> int | None:
        """Number of `documents`; None if the corpus has neither boundary files nor an EOS id."""
        return len(self.documents) if self.has_boundary_files or self.eos_token_id is not None else None

    @functools.cached_property
    def documents(self) -> Documents:
        """Start and length of each document, in order. The first access reads the boundary files, or else all tokens.

        Without boundary files, each EOS ends a document, and tokens after a shard's last EOS are in no document.

        Raises:
          CorpusFileError: A file is missing or is not the one that was indexed.
          CorpusError: A boundary file is damaged, or the corpus has neither boundary files nor `eos_token_id`.
        """
        return self._finder.documents

    @functools.cached_property
    def sequences(self) -> Documents:
        """Start and length of each sequence, in order. Errors are those of `documents`.

        Documents of Megatron's files are groups of sequences. In any other corpus, each document is one sequence.
        """
        if any(shard.boundaries is not None and shard.boundaries.groups_sequences for shard in self.shards):
            return sequences_of(self)
        return self.documents

    @functools.cached_property
    def _finder(self) -> DocumentFinder:
        return DocumentFinder(self)

    def find_documents(self, boundaries: str = "auto", bos_token_id: int | None = None) -> DocumentFinder:
        """Return a `DocumentFinder` with these arguments. A `bos_token_id` that `dtype` can't hold is a CorpusError.

        Arguments that find the same documents as `documents` return one cached finder, so that files are read once.
        """
        as_token_id("bos_token_id", bos_token_id, self.dtype, self.signed)
        finds_own_documents = bos_token_id is None and (boundaries == "auto" or not self.has_boundary_files)
        return self._finder if finds_own_documents else DocumentFinder(self, boundaries, bos_token_id)

    @functools.cached_property
    def sources(self) -> npt.NDArray[np.int64] | None:
        """Input that each document was made from, int64 [documents, 2]; None without `sources_file`.

        Column 0 is an index into `source_names`. Column 1 is the line or row of that input, counted from 1.

        Raises:
          CorpusFileError: The file is missing.
          CorpusError: The file does not have one entry for each document.
        """
        return None if self.sources_file is None else read_sources(self.sources_file, len(self.documents))

    @functools.cached_property
    def _readers(self) -> tuple[npt.NDArray[np.int64], ShardReader, LossReader | None]:
        """Token offsets at which shards begin, int64 [shards + 1] (the last is `num_tokens`); readers of tokens and loss.

        The readers may be used by several threads.
        """
        bounds = np.cumsum([0, *(shard.num_tokens for shard in self.shards)], dtype=np.int64)
        tokens = ShardReader(self.shards, self.dtype.itemsize, remote=self.remote)
        loss = LossReader(self.loss_files, remote=self.remote) if self.has_loss else None
        return bounds, tokens, loss

    def read(self, start: int, stop: int) -> tuple[UInt[np.ndarray, " tokens"], Shaped[np.ndarray, " tokens"] | None]:
        """Return tokens `start` to `stop - 1`, counted through all shards, and their loss.

        Returns:
          The tokens, `dtype` [stop - start]. Their loss, bool [stop - start], or float32 [stop - start] if the corpus has
          weights, or None if all tokens of the corpus take loss.

        Raises:
          RowIndexError: The range is not within [0, num_tokens].
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
          CorpusError: A token is negative.
        """
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= self.num_tokens:
            raise RowIndexError(f"tokens {start} to {stop}: expected a range within 0 to {self.num_tokens}.")
        bounds, token_reader, loss_reader = self._readers
        shard = np.flatnonzero((bounds[1:] > start) & (bounds[:-1] < stop))  # one piece of each is read
        piece_start = np.maximum(bounds[shard], start)
        length = np.minimum(bounds[shard + 1], stop) - piece_start
        start_in_shard = piece_start - bounds[shard]
        start_in_result = piece_start - start
        tokens: npt.NDArray[Any] = np.empty(stop - start, self.dtype)
        width = tokens.itemsize
        token_reader.gather(shard, start_in_shard, start_in_result * width, length * width, tokens.data.cast("B"))
        if self.signed:
            check_signed(tokens, self.shards, self.dtype, lambda: (shard, start_in_shard, start_in_result))
        if loss_reader is None:
            return tokens, None
        return tokens, loss_reader.gather(shard, start_in_shard, start_in_result, length, len(tokens))

    def document(self, number: int) -> Document:
        """Return document `number`, counted from 0. Errors are those of `documents` and `read`."""
        number = operator.index(number)
        if not 0 <= number < len(self.documents):
            raise RowIndexError(f"document {number} of {self!r}: expected 0 to {len(self.documents) - 1}.")
        return next(read_documents(self, number, number + 1))

    def iter_documents(self) -> Iterator[Document]:
        """Yield every document in order. Errors are those of `documents` and `read`."""
        return iter_documents(self)

    def content_hash(self) -> str:
        """Return a hash of all token, loss and boundary files, the dtype and the EOS id, such as "content-sha256:3f9a…".

        The call reads all these files, at about 1 GB/s per core, unless this machine has cached their hashes. It raises a
        CorpusFileError if one is missing or unreadable.
        """
        return content_of_corpus(self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "grain_sft",
        sequence_length: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        """Write an index that `open_corpus` opens without scanning the files again.

        Args:
          path: Path of the JSON file, written atomically. Paths of files below its folder are stored relative to it, so
            that the folder can be moved.
          format: "grain_sft", or "maxtext" for an index that MaxText's `olmo_grain` reads.
          sequence_length: Number of tokens in a row, which a "maxtext" index states; not used by "grain_sft".
          tokenizer: Name of the tokenizer in a "maxtext" index; None for that of the corpus.

        Raises:
          StorageError: `path` can't be written, or is a file of the corpus.
          CorpusError: The format is unknown, or is "maxtext" and `sequence_length` is None.
        """
        index_writer.save(self, path, format, sequence_length, tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __repr__(self) -> str:
        return (
            f"Corpus(shards={len(self.shards)}, num_tokens={self.num_tokens}, dtype={self.dtype.name}, "
            f"eos_token_id={self.eos_token_id}, ends_fingerprint={self.ends_fingerprint!r})"
        )
