"""`Tokenizer`, the interface that tokenizers of all libraries share."""

import abc
import array
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError

CHAT_TEMPLATE = "chat_template.jinja"  # file of the chat template in a tokenizer's directory

MARKER = re.compile("<[|\uff5c].+[|\uff5c]>|</?myPT_\\w+>", re.DOTALL)
"""Spellings of control tokens, such as `<|eot|>`. A token with such a spelling is a control token, even if the tokenizer's
files declare it ordinary. DeepSeek's files do so with `<\uff5cUser\uff5c>`.
"""

Offsets = npt.NDArray[np.int64]


class Tokenizer(abc.ABC):
    """Converter of text to token ids, and of ids to text. A tokenizer can be pickled.

    Attributes:
      kind: "sentencepiece", "huggingface" or "tiktoken".
      encodes_whole_chats: Whether the library encodes a whole chat, with its control tokens, in one call.
      vocab_size: Largest id + 1, added tokens included.
      eos_token_id, pad_token_id, bos_token_id: Ids of these tokens; None for a token that the tokenizer does not have.
      sha256: Hash of all files of the tokenizer and its chat template (`hash_files`).
      special_tokens: Ids of the special tokens, by spelling.
      control_ids: Ids of all special tokens except the one for unknown characters. No text may become such a token.
      empty_ids: Ids that the tokenizer's library makes of an empty text, such as BOS. `encode` does not add them.
      template_variables: Variables of chat templates, such as `bos_token`.
      chat_template: The tokenizer's own Jinja template; None if it has no template.

    Args:
      contents: Content of the tokenizer's files by name.
      where: Path of the files, for errors.
    """

    kind: ClassVar[str]
    encodes_whole_chats: ClassVar[bool] = False
    vocab_size: int
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    special_tokens: Mapping[str, int]
    control_ids: frozenset[int]
    empty_ids: Sequence[int]
    template_variables: Mapping[str, Any]
    chat_template: str | None

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        self._contents = dict(contents)
        self._where = where
        self.sha256 = hash_files(self._contents)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._contents, self._where)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._where!r}, vocab_size={self.vocab_size}, sha256={self.sha256[:12]!r})"

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. If a text spells a special token, the ids are those of ordinary text."""

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of each text as an array. `array.array` makes this 3 times as fast as `np.array` alone."""
        return [np.asarray(array.array("I", ids)) for ids in self.encode(texts)]

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with the spellings of special tokens."""

    @abc.abstractmethod
    def token_text(self, number: int) -> str | None:
        """Return the text of one token, with its leading space; None for an id outside the vocabulary.

        Bytes that are not UTF-8 become lone surrogates, by Python's error handler "surrogateescape".
        """

    def files(self) -> dict[str, bytes]:
        """Return the content of each file of the tokenizer, by name."""
        return dict(self._contents)

    def token_id(self, text: str) -> int | None:
        """Return the id of the special token with this spelling, if there is one."""
        return self.special_tokens.get(text)

    def description(self) -> dict[str, Any]:
        """Return the entry of the tokenizer in a corpus's manifest."""
        names = ("kind", "sha256", "vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")
        return {**{name: getattr(self, name) for name in names}, "special_tokens": dict(self.special_tokens)}


class OneFileTokenizer(Tokenizer):
    """Tokenizer of one file, perhaps with a `chat_template.jinja` next to it."""

    @abc.abstractmethod
    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        """Return where each token begins and ends in `text`: the result of `character_spans`."""

    def _set_special(self, special_tokens: Mapping[str, int], named: Mapping[str, str]) -> None:
        """Set the attributes of special tokens and chat template. `named` has the spellings of "bos_token", "eos_token", …"""
        self.special_tokens = special_tokens
        self.control_ids = frozenset(special_tokens.values())
        for name, text in named.items():
            setattr(self, f"{name}_id", special_tokens[text])
        self.empty_ids = () if self.bos_token_id is None else (self.bos_token_id,)
        self.template_variables = named
        template = self._contents.get(CHAT_TEMPLATE)
        try:
            self.chat_template = None if template is None else template.decode()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{self._where}: {CHAT_TEMPLATE} is not UTF-8: byte {error.start}. Fix it.") from error


def hash_files(contents: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the content of one file, or of the names and contents of several files."""
    if len(contents) == 1:
        return hashlib.sha256(next(iter(contents.values()))).hexdigest()
    named = (f"{name}\0{len(data)}\0".encode() + data for name, data in sorted(contents.items()))
    return hashlib.sha256(b"".join(named)).hexdigest()


def character_spans(text: str, lengths: Offsets) -> tuple[Offsets, Offsets]:
    """Return the starts and stops of tokens in `text`, int64 [tokens] each, in characters.

    Tokens of one byte can share a character: "é!" with the lengths [1, 1, 1] has starts [0, 0, 1] and stops [1, 1, 2].

    Args:
      text: Text of all tokens together.
      lengths: int64 [tokens], number of UTF-8 bytes of each token, at least 1.

    Raises:
      ValueError: The lengths don't add up to the number of bytes of the text.
    """
    stops = np.cumsum(lengths, dtype=np.int64)
    starts = stops - lengths
    data = np.frombuffer(text.encode(), np.uint8)
    if len(data) != int(lengths.sum()):
        raise ValueError(f"{len(data)} bytes of text, {int(lengths.sum())} of tokens")
    # index of each byte's character: the bytes 0x80 to 0xBF continue a character
    character = np.cumsum((data & 0xC0) != 0x80, dtype=np.int64) - 1
    return character[starts], character[stops - 1] + 1
