"""tiktoken files: a token in base64 and its rank in each line."""

from __future__ import annotations

import base64
import binascii
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sft.errors import CorpusError, MissingExtraError, RecordError
from grain_sft.prepare.tokenizers.tokenizer import (
    CHAT_TEMPLATE,
    Offsets,
    Tokenizer,
    character_spans,
    hash_files,
    text_of_bytes,
)

FILE = "tokenizer.tiktoken"
SIDECAR = "tokenizer.tiktoken.json"
_KEYS = ("pattern", "special_tokens", "bos_token", "eos_token", "pad_token")

_LLAMA3_RANKS = 128_000
_LLAMA3_PROBES = {b" the": 279, b"Hello": 9906}
_LLAMA3_NAMED = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
)
_LLAMA3_SPECIAL = (*_LLAMA3_NAMED, *(f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(_LLAMA3_NAMED))))
_LLAMA3: Mapping[str, Any] = {
    "pattern": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "special_tokens": {text: _LLAMA3_RANKS + place for place, text in enumerate(_LLAMA3_SPECIAL)},
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "pad_token": "<|finetune_right_pad_id|>",
}


class TiktokenTokenizer(Tokenizer):
    """A tiktoken file with its split pattern and special tokens.

    The file itself has neither. They are in a JSON sidecar, named like the file with `.json` at its end, under the keys
    pattern, special_tokens (spelling to id), bos_token, eos_token, pad_token. Llama 3's file needs no sidecar.

    Args:
      ranks: Content of the tiktoken file.
      where: Path of the file, for errors.
      sidecar: Content of the JSON sidecar.
      chat_template: Content of the `chat_template.jinja` in the file's directory.

    Raises:
      CorpusError: The bytes are not a tiktoken file, or pattern and special tokens are unknown or wrong.
      MissingExtraError: tiktoken is not installed.
    """

    kind = "tiktoken"

    def __init__(
        self, ranks: bytes, where: str = FILE, sidecar: bytes | None = None, chat_template: bytes | None = None
    ) -> None:
        self._files = {FILE: ranks}
        self._where = where
        if sidecar is not None:
            self._files[SIDECAR] = sidecar
        if chat_template is not None:
            self._files[CHAT_TEMPLATE] = chat_template
        self.chat_template = None if chat_template is None else chat_template.decode()
        self.sha256 = hash_files(self._files)
        self._ranks = _parse_ranks(ranks, where)
        settings = self._settings(sidecar)
        self.special_tokens = settings["special_tokens"]
        self.control_ids = frozenset(self.special_tokens.values())
        self._pattern: str = settings["pattern"]
        self.vocab_size = max([*self._ranks.values(), *self.special_tokens.values()]) + 1
        named = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        self.template_variables = {name: text for name, text in named.items() if text is not None}
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            None if text is None else self.special_tokens[text] for text in named.values()
        )
        self.empty_ids = () if self.bos_token_id is None else (self.bos_token_id,)
        _ = self._encoding

    def __reduce__(self) -> tuple[Any, ...]:
        files = self._files
        return type(self), (files[FILE], self._where, files.get(SIDECAR), files.get(CHAT_TEMPLATE))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`. A RecordError names a text that the pattern can't split, such as a million spaces."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._encoding.encode_ordinary(text)
        except BaseException as error:  # tiktoken panics, which is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise RecordError(
                f"messages: tiktoken can't split a text of {len(text):,} characters ({error}). Break up its longest run of "
                "spaces or letters."
            ) from error
        return ids

    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        return character_spans(text, self._lengths[np.asarray(ids, np.int64)])

    def token_text(self, number: int) -> str | None:
        data = self._tokens.get(number)
        return None if data is None else text_of_bytes(data)

    @functools.cached_property
    def _tokens(self) -> dict[int, bytes]:
        return {rank: token for token, rank in self._ranks.items()}

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(number) for number in ids]))

    def files(self) -> dict[str, bytes]:
        """Return the file, and the sidecars that were read."""
        return dict(self._files)

    @functools.cached_property
    def _encoding(self) -> Any:
        try:
            tiktoken = importlib.import_module("tiktoken")
        except ImportError as error:
            raise MissingExtraError.of(f"{self._where}: a tiktoken file", "tiktoken", "tiktoken") from error
        try:
            return tiktoken.Encoding(
                name=self.sha256,
                pat_str=self._pattern,
                mergeable_ranks=self._ranks,
                special_tokens=dict(self.special_tokens),
            )
        except Exception as error:  # of its regular expressions, and of ranks that are not whole
            raise CorpusError(f"{self._where}: tiktoken can't load this tokenizer ({error}).") from error

    @functools.cached_property
    def _lengths(self) -> Offsets:
        """int64 [vocab_size], bytes of each token."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, rank in self._ranks.items():
            lengths[rank] = len(token)
        return lengths

    def _settings(self, sidecar: bytes | None) -> Mapping[str, Any]:
        if sidecar is None:
            if len(self._ranks) == _LLAMA3_RANKS and all(
                self._ranks.get(token) == rank for token, rank in _LLAMA3_PROBES.items()
            ):
                return _LLAMA3
            raise CorpusError(
                f"{self._where}: a tiktoken file of {len(self._ranks):,} ranks. Expected its split pattern and special "
                f"tokens in a JSON sidecar, found none. Write {self._where}.json with the keys "
                f"{', '.join(_KEYS)}."
            )
        where = f"{self._where}.json"
        try:
            settings = json.loads(sidecar)
        except ValueError as error:
            raise CorpusError(f"{where}: is not valid JSON ({error}). Fix the file.") from error
        if not isinstance(settings, dict) or not isinstance(settings.get("pattern"), str):
            raise CorpusError(f"{where}: expected an object with the key 'pattern', the regular expression. Add it.")
        if unknown := sorted(settings.keys() - set(_KEYS)):
            raise CorpusError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(_KEYS)}. Remove it.")
        special = settings.setdefault("special_tokens", {})
        if not isinstance(special, dict) or not all(type(number) is int and number >= 0 for number in special.values()):
            raise CorpusError(f"{where}: special_tokens: expected an object of spellings and ids. Fix it.")
        taken = set(self._ranks.values()) & set(special.values())
        if taken or len(set(special.values())) < len(special):
            raise CorpusError(f"{where}: special_tokens: an id is used twice or is a rank of the file. Fix the ids.")
        for name in ("bos_token", "eos_token", "pad_token"):
            if settings.get(name) is not None and settings[name] not in special:
                raise CorpusError(f"{where}: {name}: {settings[name]!r} is not in special_tokens. Add it there.")
        return settings


def _parse_ranks(content: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CorpusError(
                f"{where}: line {number} of the tiktoken file: expected base64 and a rank, found {line[:40]!r}. "
                "Download the file again."
            ) from error
    missing = 256 - sum(bytes([byte]) in ranks for byte in range(256))
    if missing:
        raise CorpusError(
            f"{where}: a tiktoken file without {missing} of the 256 single bytes, so some texts have no tokens. "
            "Download the file again."
        )
    return ranks
