"""Tokenizer: what templates ask of one, whatever library reads its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

CHAT_TEMPLATE = "chat_template.jinja"
"""Name of a directory's own chat template."""

MARKER = re.compile(r"<\|.+\|>|</?myPT_\w+>", re.DOTALL)
"""Spellings that are control tokens although their tokenizer declares them ordinary: no prose has them."""

Offsets = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Text to token ids and back. It can be pickled, and loads its files again where it is unpickled.

    Attributes:
      kind: "sentencepiece", "huggingface" or "tiktoken".
      vocab_size: the largest id + 1, added tokens included.
      eos_token_id, pad_token_id, bos_token_id: None where it has none.
      sha256: of all that decides ids: the model file, or a directory's files.
      special_tokens: id of every token that has a meaning to a model beyond its spelling.
      control_ids: ids of the special tokens that no text becomes: all but the one for unknown characters.
      empty_ids: what an empty text becomes where the tokenizer adds tokens of its own: its BOS, or nothing.
      template_variables: what chat templates know of it: `bos_token`, `eos_token`, ... and their spellings.
    """

    kind: str
    vocab_size: int
    eos_token_id: int | None
    pad_token_id: int | None
    bos_token_id: int | None
    sha256: str
    special_tokens: Mapping[str, int]
    control_ids: frozenset[int]
    empty_ids: Sequence[int]
    template_variables: Mapping[str, Any]

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja template; None where it has none."""

    def __hash__(self) -> int:
        """By identity: what is kept of a tokenizer is kept of the object."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as ordinary text: what spells a special token never becomes that token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out."""

    def token_id(self, text: str) -> int | None:
        """Id of the special token that is spelled so."""

    def files(self) -> dict[str, bytes]:
        """Name and content of each file that it is loaded from."""

    def description(self) -> dict[str, Any]:
        """What a corpus says of the tokenizer that made it, as JSON."""


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """The description that every kind gives."""
    return {
        "kind": tokenizer.kind,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "special_tokens": dict(tokenizer.special_tokens),
    }


def hash_files(contents: Mapping[str, bytes]) -> str:
    """SHA-256 of one file, or of several with their names."""
    if len(contents) == 1:
        return hashlib.sha256(next(iter(contents.values()))).hexdigest()
    whole = hashlib.sha256()
    for name in sorted(contents):
        whole.update(f"{name}\0{len(contents[name])}\0".encode())
        whole.update(contents[name])
    return whole.hexdigest()


def character_spans(text: str, lengths: Offsets) -> tuple[Offsets, Offsets]:
    """Return the first character and the character after the last of each token.

    Args:
      text: the tokens' text.
      lengths: int64 [tokens], UTF-8 bytes of each token. A token may hold part of a character.

    Raises:
      ValueError: the lengths don't add up to the text's.
    """
    stops = np.cumsum(lengths, dtype=np.int64)
    starts = stops - lengths
    data = np.frombuffer(text.encode(), np.uint8)
    if len(data) != (int(stops[-1]) if len(stops) else 0):
        raise ValueError(f"{len(data)} bytes of text, {int(stops[-1]) if len(stops) else 0} of tokens")
    if len(data) == len(text):
        return starts, stops
    character = np.cumsum((data & 0xC0) != 0x80, dtype=np.int64) - 1
    return character[starts], character[stops - 1] + 1
