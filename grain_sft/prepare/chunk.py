"""Chunk: the documents of one unit, rendered and cut, as one file that is there whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError

RECORD = np.dtype(
    [
        ("line", "<i8"),  # of the record in its input, from 1
        ("length", "<u4"),  # tokens kept; 0 where the document was dropped
        ("trainable", "<u4"),  # of these, tokens that take loss
        ("cut", "<u4"),  # tokens that fell out
        ("cut_trainable", "<u4"),
        ("dropped", "<u4"),  # number of the reason in DROPPED; 0: kept
    ]
)
DROPPED = ("", "no trainable token", "fewer than {min_tokens} tokens")

_MAGIC = b"GSFTCHK1"

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Loss = npt.NDArray[Any]
"""bool [tokens], or float32 [tokens] where the template gives weights."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a chunk holds, and where in its file.

    Attributes:
      key: hash of all that its content depends on.
      records: valid records, dropped ones included.
      tokens: of all kept documents.
      token_dtype, loss_dtype: "uint16" or "uint32"; "bool" or "float32".
      rejected: records that were left out: {"file", "line", "reason", "record"} each.
      binary: every weight is 0 or 1.
      first_weights: some document's first token has a weight.
      unended: documents whose last token is not the tokenizer's EOS.
      inner_eos: documents with an EOS before their last token.
    """

    key: str
    records: int
    tokens: int
    token_dtype: str
    loss_dtype: str
    rejected: tuple[dict[str, Any], ...]
    binary: bool
    first_weights: bool
    unended: int
    inner_eos: int
    size: int = 0  # of the header in the file

    @property
    def tokens_at(self) -> int:
        """Byte at which the tokens begin."""
        return self.size + self.records * RECORD.itemsize

    @property
    def loss_at(self) -> int:
        """Byte at which the loss begins."""
        return self.tokens_at + self.tokens * np.dtype(self.token_dtype).itemsize

    @property
    def end(self) -> int:
        """Bytes of the whole file."""
        return self.loss_at + self.tokens * np.dtype(self.loss_dtype).itemsize


def encode(
    key: str,
    records: npt.NDArray[Any],
    tokens: Sequence[Tokens],
    loss: Sequence[Loss],
    rejected: Sequence[dict[str, Any]],
    *,
    token_dtype: np.dtype[Any],
    loss_dtype: np.dtype[Any],
    eos_token_id: int | None,
) -> bytes:
    """A chunk as the bytes of its file."""
    all_tokens = np.concatenate([np.empty(0, token_dtype), *tokens], dtype=token_dtype, casting="unsafe")
    all_loss = np.concatenate([np.empty(0, loss_dtype), *loss], dtype=loss_dtype, casting="unsafe")
    header = Header(
        key=key,
        records=len(records),
        tokens=len(all_tokens),
        token_dtype=token_dtype.name,
        loss_dtype=loss_dtype.name,
        rejected=tuple(rejected),
        binary=loss_dtype == np.bool_ or bool(((all_loss == 0) | (all_loss == 1)).all()),
        first_weights=any(len(part) > 0 and bool(part[0]) for part in loss),
        unended=sum(int(part[-1]) != eos_token_id for part in tokens),
        inner_eos=sum(_has_inner(part, eos_token_id) for part in tokens),
    )
    text = json.dumps({**dataclasses.asdict(header), "size": 0}).encode()
    prefix = _MAGIC + len(text).to_bytes(8, "little") + text
    return b"".join([prefix, records.tobytes(), all_tokens.tobytes(), all_loss.tobytes()])


def _has_inner(tokens: Tokens, eos_token_id: int | None) -> bool:
    return eos_token_id is not None and bool((tokens[:-1] == eos_token_id).any())


def prefix_size(start: bytes, where: str) -> int:
    """Bytes of the header, from the file's first 16 bytes.

    Raises:
      StorageError: this is no chunk.
    """
    if len(start) < 16 or not start.startswith(_MAGIC):
        raise StorageError(f"{where}: is no chunk of a preparation. Delete the folder it is in, and prepare again.")
    return 16 + int.from_bytes(start[8:16], "little")


def decode_header(data: bytes, file_size: int, where: str) -> Header:
    """The header in the first bytes of a chunk's file.

    Raises:
      StorageError: damaged, or not of the size that it says.
    """
    try:
        fields = json.loads(data[16:])
        header = Header(**{**fields, "rejected": tuple(fields["rejected"]), "size": len(data)})
        complete = header.end == file_size
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{where}: damaged ({error}). Delete it, and prepare again.") from error
    if not complete:
        raise StorageError(f"{where}: has {file_size} bytes, expected {header.end}. Delete it, and prepare again.")
    return header
