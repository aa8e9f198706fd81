"""CorpusFiles: the token files of a corpus, their sidecar files, and the ids that its metadata state."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from grain_sft.corpus.loss import LossFile
from grain_sft.corpus.shard import RowFormat, Shard
from grain_sft.errors import CorpusError
from grain_sft.storage import FileStamp, RemoteOptions, StampedFile

FINGERPRINT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class CorpusFiles:
    """The data of a `Corpus`, which documents its attributes. Nothing here opens a file."""

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
            object.__setattr__(self, name, int(number))  # numpy's integers are not JSON

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def padding_token_id(self) -> int:
        """Token that fills the end of a row: `pad_token_id`, else `eos_token_id`, else 0."""
        return next((number for number in (self.pad_token_id, self.eos_token_id) if number is not None), 0)

    @property
    def has_loss(self) -> bool:
        """Whether loss files select the tokens that take loss. Without them, every token does."""
        return any(shard.loss is not None for shard in self.shards)

    @property
    def loss_files(self) -> list[LossFile | None]:
        """Loss file of each shard."""
        return [shard.loss for shard in self.shards]

    @property
    def has_weights(self) -> bool:
        """Whether some loss files hold weights."""
        return any(shard.loss is not None and shard.loss.values.weighted for shard in self.shards)

    @property
    def has_boundary_files(self) -> bool:
        """Whether files state where documents begin and end. Without them, EOS tokens do."""
        return any(shard.boundaries is not None for shard in self.shards)

    def files(self) -> list[StampedFile]:
        """Return all files: tokens, then their sidecars, then the documents' sources."""
        sidecars = [file for shard in self.shards for file in (shard.loss, shard.boundaries)]
        return [file for file in (*self.shards, *sidecars, self.sources_file) if file is not None]

    def map_files(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy with `change(file)` instead of each file."""

        def changed(file: Any) -> Any:
            return None if file is None else change(file)

        shards = tuple(
            dataclasses.replace(change(shard), loss=changed(shard.loss), boundaries=changed(shard.boundaries))
            for shard in self.shards
        )
        return dataclasses.replace(self, shards=shards, sources_file=changed(self.sources_file))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of lengths and ends: dtype, EOS id, and of each shard its length and its first and last 4 KiB of tokens.

        It is computed without reading the files, and does not hash their content: see `content_hash`. Paths are left
        out, so a copy in another folder or in a bucket has the same fingerprint. A shard of which only the middle
        changed has the same fingerprint too. Loss and boundary files count in the same way, where there are any.
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
            rows = self.rows
            parts = rows.sequence_length, rows.made_of, rows.positions_dtype, rows.segments_dtype, rows.most_segments
            digest.update("\0".join(["\0rows", *map(str, parts)]).encode())
        return f"sha256:{digest.hexdigest()}"

    @property
    def ends_fingerprint(self) -> str:
        """`fingerprint` with the prefix that receipts and commands print, such as "ends-sha256:3f9a…"."""
        return f"ends-{self.fingerprint}"
