"""`CorpusData`, the description of a corpus."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from grain_sft.corpus.loss import LossFile
from grain_sft.corpus.row_format import RowFormat
from grain_sft.corpus.shard import Shard, as_token_id
from grain_sft.storage import FileStamp, RemoteOptions
from grain_sft.types import Ints

FINGERPRINT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class CorpusData:
    """The files of a corpus, the dtype of its tokens and its special token ids. Nothing here reads a file.

    Attributes:
      shards: Token files, in the order of the corpus.
      dtype: Dtype of the tokens on disk: uint8, uint16, uint32 or uint64.
      eos_token_id: Token that ends a document; None if unknown.
      tokenizer: Name or path of the tokenizer; None if unknown.
      tokenizer_sha256: Hash of the tokenizer's files; None if unknown.
      pad_token_id: Token for padding; None if unknown.
      sources_file: File that `Corpus.sources` reads; None for a corpus without such a file.
      source_names: Names of the files or data sets that the documents were made from. `Corpus.sources` has indices into them.
      rows: Format of the rows that `grain-sft pack --materialize` stored; None if the files hold tokens alone.
      weights: Weight of each shard if the corpus was opened as a Megatron blend, such as "0.3 A 0.7 B"; else ().
      signed: Whether the files store signed integers. They are read as unsigned integers, and a negative token is an error.
      remote: Options for reading remote files; None to take them from environment variables.
      ignores_loss: Whether `open_corpus` got `use_loss_mask=False` although loss files exist, or got `label_mask_paths`. Loss
        files that are found by name are then ignored.

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
    # not compared, because these two decide neither a token nor whether it takes loss
    remote: RemoteOptions | None = dataclasses.field(default=None, compare=False)
    ignores_loss: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("eos_token_id", "pad_token_id"):
            object.__setattr__(self, name, as_token_id(name, getattr(self, name), self.dtype, self.signed))

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @functools.cached_property
    def shard_borders(self) -> Ints:
        """int64 [shards + 1], the number of tokens before each shard, then `num_tokens`."""
        return np.cumsum([0, *(shard.num_tokens for shard in self.shards)], dtype=np.int64)

    @functools.cached_property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        """Path, byte of the first token, and number of tokens of each shard. Subsets of a split differ in the last two."""
        return tuple((shard.path, shard.data_offset, shard.num_tokens) for shard in self.shards)

    @property
    def padding_token_id(self) -> int:
        """Token that fills the end of a row: `pad_token_id`, else `eos_token_id`, else 0."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return 0 if self.eos_token_id is None else self.eos_token_id

    @property
    def has_loss(self) -> bool:
        """Whether loss files exist. Without loss files, every token takes loss."""
        return any(shard.loss is not None for shard in self.shards)

    @property
    def loss_files(self) -> list[LossFile | None]:
        """Loss file of each shard; None for a shard without one."""
        return [shard.loss for shard in self.shards]

    @property
    def has_weights(self) -> bool:
        """Whether a loss file holds weights instead of a mask."""
        return any(shard.loss is not None and shard.loss.encoding.weighted for shard in self.shards)

    @property
    def of_pairs(self) -> bool:
        """Whether documents are preference pairs: a prompt and two responses."""
        return any(shard.boundaries is not None and shard.boundaries.kind == "preference" for shard in self.shards)

    @property
    def has_boundary_files(self) -> bool:
        """Whether boundary files exist. Without boundary files, EOS tokens end documents."""
        return any(shard.boundaries is not None for shard in self.shards)

    def files(self) -> list[FileStamp]:
        """Return all files: token files, then their sidecar files, then `sources_file`."""
        sidecars = [file for shard in self.shards for file in (shard.loss, shard.boundaries)]
        return [file for file in (*self.shards, *sidecars, self.sources_file) if file is not None]

    def map_files(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy of the corpus with `change(file)` in place of each file that `files` returns."""

        def changed(file: Any) -> Any:
            return None if file is None else change(file)

        shards = tuple(
            dataclasses.replace(change(shard), loss=changed(shard.loss), boundaries=changed(shard.boundaries))
            for shard in self.shards
        )
        return dataclasses.replace(self, shards=shards, sources_file=changed(self.sources_file))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the dtype, the EOS id, the sizes of the shards, and the first and last 4 KiB of all files but `sources_file`.

        It includes `signed`, `weights` and `rows` if they are set, but no paths. A change in the middle of a file changes only
        `Corpus.content_hash`.
        """
        head = f"grain_sft corpus {FINGERPRINT_VERSION}\0{self.dtype.name}\0{self.eos_token_id}"
        digest = hashlib.sha256(head.encode())
        for shard in self.shards:
            digest.update(f"\0{shard.num_tokens}\0{shard.digest}".encode())
            if shard.loss is not None:
                digest.update(f"\0loss\0{shard.loss.kind}\0{shard.loss.digest}".encode())
            if shard.boundaries is not None:
                file = shard.boundaries
                digest.update(f"\0boundaries\0{file.kind}\0{file.continues}\0{file.size}\0{file.digest}".encode())
                if file.sequences is not None:  # the shard is a range of a Megatron file, from byte `data_offset` on
                    first, stop = file.sequences
                    digest.update(f"\0sequences\0{first}\0{stop}\0{shard.data_offset}".encode())
        if self.signed:
            digest.update(b"\0signed")
        if self.weights:
            digest.update("\0".join(["\0weights", *map(repr, self.weights)]).encode())
        if self.rows is not None:
            rows = self.rows
            parts = rows.sequence_length, rows.made_of, rows.positions_dtype, rows.segments_dtype, rows.most_segments
            digest.update("\0".join(["\0rows", *map(str, parts)]).encode())
        return f"sha256:{digest.hexdigest()}"

    @property
    def ends_fingerprint(self) -> str:
        """`fingerprint` as commands print it, such as "ends-sha256:3f9a…": a hash of only the ends of the files."""
        return f"ends-{self.fingerprint}"
