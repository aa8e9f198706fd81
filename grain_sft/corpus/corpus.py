"""Corpus: the tokens that are on disk, in order."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import content
from grain_sft.corpus.document_keys import content_of_corpus
from grain_sft.corpus.documents import Document, Documents, as_uint32, find_documents, iterate, read_sources
from grain_sft.corpus.eos_scan import count_token
from grain_sft.corpus.ranges import RangeReader
from grain_sft.corpus.row_format import RowFormat
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError, RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.storage import FileStamp, RemoteOptions, StampedFile

FINGERPRINT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of one dtype in a fixed order, and what is said of their tokens beside them: which take loss, and
    where documents end. Made by `grain_sft.open_corpus`; opens files when first read, and pickles without them.

    Attributes:
      shards: the files, in the order that rows follow.
      dtype: of the tokens on disk: uint8, uint16, uint32 or uint64.
      eos_token_id: the token that ends a document, where it is known.
      tokenizer: name of the tokenizer, where it is known. Decides no row.
      tokenizer_sha256: hash of the tokenizer's file, where the corpus says it.
      pad_token_id: for padding, where the corpus says it.
      sources_file: where each document comes from, as int64 pairs; see `sources`.
      source_names: of the inputs that `sources` counts.
      rows: where the tokens are laid out as rows (`grain-sft pack --materialize`), what these have beside.
      remote: how remote files are read; None: as the environment says. Decides no value.
      ignores_loss: loss files exist, and `use_loss_mask=False` says that every token takes loss all the same.

    Raises:
      CorpusError: an `eos_token_id` or `pad_token_id` that `dtype` can't hold.
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
    remote: RemoteOptions | None = dataclasses.field(default=None, compare=False)
    ignores_loss: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        highest = np.iinfo(self.dtype).max
        for name in ("eos_token_id", "pad_token_id"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number <= highest:
                raise CorpusError(f"{name}={number!r}: expected an id that {self.dtype.name} holds, 0 to {highest}.")

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    def _repr_html_(self) -> str:
        loss = {shard.loss.kind for shard in self.shards if shard.loss is not None}
        facts = {
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "shards": len(self.shards),
            "first shard": self.shards[0].path if self.shards else None,
            "documents": vars(self).get("num_documents"),  # once they were counted: that may read all tokens
            "loss": " and ".join(sorted(loss)) or "on all tokens",
            "EOS id": self.eos_token_id,
            "padding id": self.padding_token_id,
            "tokenizer": self.tokenizer,
        }
        return html_facts(type(self).__name__, facts)

    def files(self) -> list[StampedFile]:
        """All files: of tokens, what stands beside them, and where documents come from."""
        beside = [file for shard in self.shards for file in (shard.loss, shard.boundaries)]
        return [file for file in (*self.shards, *beside, self.sources_file) if file is not None]

    @functools.cached_property
    def num_documents(self) -> int | None:
        """Documents in all shards: of the boundary files, or `eos_token_id`s; None where neither is known.

        Without boundary files, reads every token the first time, at the speed of memory or of the disk.

        Raises:
          CorpusFileError: a file is missing or is not the one that was indexed.
          CorpusError: damaged boundary files.
        """
        if any(shard.boundaries is not None for shard in self.shards):
            return len(self.documents)
        return None if self.eos_token_id is None else count_token(self, self.eos_token_id)

    @functools.cached_property
    def documents(self) -> Documents:
        """Where each document begins, counted in the tokens of all shards, and its length; in order.

        From the boundary files; without any, a document ends at each EOS, EOS included, and tokens after a shard's
        last EOS are no document. Read the first time.

        Raises:
          CorpusFileError: a file is missing or is not the one that was indexed.
          CorpusError: damaged boundary files, or none and no `eos_token_id`.
        """
        return find_documents(self)

    @property
    def padding_token_id(self) -> int:
        """The token that stands where a row holds none: `pad_token_id`, else `eos_token_id`, else 0."""
        return int(next((number for number in (self.pad_token_id, self.eos_token_id) if number is not None), 0))

    @property
    def has_loss(self) -> bool:
        """Whether files say which tokens take loss; without, all do."""
        return any(shard.loss is not None for shard in self.shards)

    @property
    def has_weights(self) -> bool:
        """Whether some of these hold weights, not only yes or no."""
        return any(shard.loss is not None and shard.loss.kind == "float32" for shard in self.shards)

    @functools.cached_property
    def sources(self) -> npt.NDArray[np.int64] | None:
        """int64 [documents, 2]: number of the input (see `source_names`) and line or row in it, from 1; None where
        the corpus does not say.

        Raises:
          CorpusFileError, CorpusError: a file of sources that is missing, or not of these documents.
        """
        return None if self.sources_file is None else read_sources(self.sources_file, len(self.documents))

    @functools.cached_property
    def _ranges(self) -> RangeReader:
        return RangeReader(self)

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Tokens `start` to `stop`, counted through all shards, as `dtype` [stop - start]; and their loss: bool, or
        float32 where the corpus has weights; None where all tokens take it.

        Raises:
          RowIndexError: beyond the tokens.
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        return self._ranges.read(operator.index(start), operator.index(stop))

    def document(self, number: int) -> Document:
        """Document `number`, from 0.

        Raises:
          RowIndexError: no such document.
          CorpusFileError, CorpusError: as `documents` and `read`.
        """
        number = operator.index(number)
        if not 0 <= number < len(self.documents):
            raise RowIndexError(f"document {number} of {self!r}: expected 0 to {len(self.documents) - 1}.")
        start = int(self.documents.start[number])
        tokens, loss = self.read(start, start + int(self.documents.length[number]))
        source = None if self.sources is None else (int(self.sources[number, 0]), int(self.sources[number, 1]))
        return Document(as_uint32(tokens), np.ones(len(tokens), np.bool_) if loss is None else loss, source)

    def iter_documents(self) -> Iterator[Document]:
        """Every document in order, read some MB at a time; its arrays are parts of such a block.

        Raises:
          CorpusFileError, CorpusError: as `documents` and `read`.
        """
        return iterate(self)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of lengths and ends: dtype, EOS id, and of each shard in order its length and its first and last 4 KiB of
        tokens. It opens a corpus of any size at once, and is not a hash of its content: see `content_hash`.

        Paths are left out: the same files under another folder, or in a bucket, have the same fingerprint. A shard whose
        middle alone changed has it too. Loss and boundary files are in it in the same way, where there are any.
        """
        digest = hashlib.sha256(
            f"grain_sft corpus {FINGERPRINT_VERSION}\0{self.dtype.name}\0{self.eos_token_id}".encode()
        )
        for shard in self.shards:
            digest.update(f"\0{shard.num_tokens}\0{shard.digest}".encode())
            if shard.loss is not None:
                digest.update(f"\0loss\0{shard.loss.kind}\0{shard.loss.digest}".encode())
            if shard.boundaries is not None:
                file = shard.boundaries
                digest.update(f"\0boundaries\0{file.kind}\0{file.continues}\0{file.size}\0{file.digest}".encode())
        if self.rows is not None:
            digest.update(f"\0rows\0{self.rows.sequence_length}\0{self.rows.made_of}".encode())
            kinds = self.rows.positions_dtype, self.rows.segments_dtype, self.rows.most_segments
            digest.update("".join(f"\0{kind}" for kind in kinds).encode())
        return f"sha256:{digest.hexdigest()}"

    @property
    def ends_fingerprint(self) -> str:
        """`fingerprint` by a name that says what it is of, such as "ends-sha256:3f9a…": what receipts and commands print."""
        return f"ends-{self.fingerprint}"

    def content_hash(self) -> str:
        """Hash of every byte of all files, in order, with dtype, EOS id and lengths, such as "content-sha256:3f9a…".

        Reads all files, some 1 GB/s a core, unless this machine remembers what they hold.

        Raises:
          CorpusFileError: a file is missing or unreadable.
        """
        of_files = [file for shard in self.shards for file in (shard, shard.loss, shard.boundaries) if file is not None]
        return content_of_corpus(self, content.hashes_of(of_files))

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
          path: of the JSON file, which appears whole or not at all. Shards below its folder are stored relative to
            it, so that the folder can be moved.
          format: "grain_sft", or "maxtext" for an index that MaxText's `olmo_grain` reads.
          sequence_length: with "maxtext", whose index is made for one length.
          tokenizer: with "maxtext", a name for its index; the corpus's own where none is given.

        Raises:
          StorageError: `path` can't be written.
          CorpusError: an unknown format, or "maxtext" without a sequence length.
        """
        from grain_sft.corpus import index

        index.save(self, path, format=format, sequence_length=sequence_length, tokenizer=tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __repr__(self) -> str:
        return (
            f"Corpus(shards={len(self.shards)}, num_tokens={self.num_tokens}, dtype={self.dtype.name}, "
            f"eos_token_id={self.eos_token_id}, ends_fingerprint={self.ends_fingerprint!r})"
        )
