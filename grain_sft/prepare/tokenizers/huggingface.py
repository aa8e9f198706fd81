"""Tokenizers of Hugging Face: a `tokenizer.json`, or a directory that `save_pretrained` wrote."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.errors import CorpusError, MissingExtraError
from grain_sft.prepare.tokenizers.huggingface_json import exact_json, plain_json, renamed
from grain_sft.prepare.tokenizers.tokenizer import (
    CHAT_TEMPLATE,
    MARKER,
    Offsets,
    Tokenizer,
    hash_files,
    text_of_bytes,
)

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_EOS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")
_PAD = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how Metaspace writes a space


class HuggingFaceTokenizer(Tokenizer):
    """A fast tokenizer, loaded by transformers from local copies of its files, with no network and no remote code.

    Its special tokens are the added tokens that it declares special, and those that look like `<|markers|>`. Other added
    tokens (runs of spaces, `<think>`) are ordinary text, as they are to transformers.

    Args:
      contents: Content of the tokenizer's files by name.
      where: Path of the files, for errors.

    Raises:
      CorpusError: transformers can't load the files, or the tokenizer is not of the fast kind.
      MissingExtraError: transformers or jinja2 is not installed.
    """

    encodes_whole_chats = True
    kind = "huggingface"

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        self._contents = dict(contents)
        self._where = where
        self.sha256 = hash_files(self._contents)
        loaded = self.transformers_tokenizer
        added = {number: str(token.content) for number, token in loaded.added_tokens_decoder.items()}
        declared = {number for number, token in loaded.added_tokens_decoder.items() if token.special}
        self.special_tokens = {
            text: number
            for number, text in sorted(added.items())
            if text and (number in declared or MARKER.fullmatch(text))
        }
        model = json.loads(self._serialized())["model"]
        unknown = {self.special_tokens.get(name) for name in (model.get("unk_token"), loaded.unk_token) if name}
        self.control_ids = frozenset(self.special_tokens.values()) - unknown - {model.get("unk_id")}
        self.vocab_size = max(loaded.get_vocab().values(), default=-1) + 1
        self.eos_token_id = _id_or_none(loaded.eos_token_id, self._guess(_EOS))
        self.pad_token_id = _id_or_none(loaded.pad_token_id, self._guess(_PAD))
        self.bos_token_id = _id_or_none(loaded.bos_token_id, None)
        self.empty_ids = tuple(int(number) for number in loaded("")["input_ids"])
        self.template_variables = {
            name: str(value) if isinstance(value, str) else value for name, value in loaded.special_tokens_map.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._contents, self._where)

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        transformers = _import("transformers", self._where)
        with _folder_of(self._contents) as folder:
            try:
                if self._lone:
                    loaded = transformers.PreTrainedTokenizerFast(
                        tokenizer_file=os.path.join(folder, "tokenizer.json"),
                        chat_template=self._contents[CHAT_TEMPLATE].decode()
                        if CHAT_TEMPLATE in self._contents
                        else None,
                    )
                else:
                    loaded = transformers.AutoTokenizer.from_pretrained(
                        folder, local_files_only=True, trust_remote_code=False, use_fast=True
                    )
            except Exception as error:  # whatever its files do to it; tokenizers raises bare Exceptions
                text = str(error).replace(folder, self._where)
                raise CorpusError(f"{self._where}: transformers can't load this tokenizer ({text}).") from error
        if not getattr(loaded, "is_fast", False):
            raise CorpusError(
                f"{self._where}: is a tokenizer without tokenizer.json, which gives no offsets of tokens in the text. "
                "Convert it: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        return loaded

    @functools.cached_property
    def chat_template(self) -> str | None:  # type: ignore[override]
        """The template that transformers chooses; None where the tokenizer has none. It may have several, and no default."""
        loaded = self.transformers_tokenizer
        if not getattr(loaded, "chat_template", None):
            return None
        try:
            return str(loaded.get_chat_template())
        except ValueError as error:
            raise CorpusError(f"{self._where}: {error} Give one with --chat-template.") from error

    @functools.cached_property
    def exact(self) -> Any:
        """The `tokenizers.Tokenizer` whose ids are those of transformers, and whose offsets are untrimmed."""
        return self._from_json(exact_json(self._serialized()))

    @functools.cached_property
    def plain(self) -> Any:
        """The same, except that a text which spells a special token is ordinary; see `huggingface_json.renamed`."""
        made = self._from_json(plain_json(exact_json(self._serialized()), self.special_tokens.keys()))
        for text, number in self.special_tokens.items():
            if made.token_to_id(renamed(text)) != number:
                raise CorpusError(
                    f"{self._where}: text that spells the special token {text!r} can't be kept apart from it in this "
                    "tokenizer. Have its special tokens declared in tokenizer.json's added_tokens."
                )
        return made

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`. One text after the other: encode_batch would start threads of its own."""
        encode = self.plain.encode
        return [encode(text, add_special_tokens=False).ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.exact.decode([int(number) for number in ids], skip_special_tokens=False))

    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        starts, stops = np.array(self.plain.encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2).T
        return starts, stops

    def token_text(self, number: int) -> str | None:
        return self._token_text(number)

    @functools.cached_property
    def _token_text(self) -> Callable[[int], str | None]:
        loaded = self.transformers_tokenizer
        content = json.loads(self._serialized())
        steps = json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
        by_byte, fallback = '"ByteLevel"' in steps, bool(content["model"].get("byte_fallback"))
        metaspace = '"Metaspace"' in steps or "\\u2581" in steps
        added = {number: str(token.content) for number, token in loaded.added_tokens_decoder.items()}

        def token_text(number: int) -> str | None:
            if number in added:
                return added[number]
            text = loaded.convert_ids_to_tokens(number) if 0 <= number < self.vocab_size else None
            if text is None:
                return None
            if by_byte and all(each in _bytes_of_characters() for each in text):
                return text_of_bytes(bytes(_bytes_of_characters()[each] for each in text))
            byte = _BYTE.fullmatch(text) if fallback else None
            if byte:
                return text_of_bytes(bytes.fromhex(byte[1]))
            return str(text).replace(_SPACE, " ") if metaspace else str(text)

        return token_text

    def files(self) -> dict[str, bytes]:
        return dict(self._contents)

    def _guess(self, names: Sequence[str]) -> int | None:
        """Return the one special token with such a name, for a lone tokenizer.json, which names none itself."""
        found = [self.special_tokens[name] for name in names if name in self.special_tokens]
        return found[0] if len(found) == 1 and self._lone else None

    @property
    def _lone(self) -> bool:
        """Whether no file names the special tokens' roles."""
        return self._contents.keys() <= {"tokenizer.json", CHAT_TEMPLATE}

    def _serialized(self) -> str:
        return str(self.transformers_tokenizer.backend_tokenizer.to_str())

    def _from_json(self, content: str) -> Any:
        tokenizers = _import("tokenizers", self._where)
        try:
            return tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise CorpusError(f"{self._where}: tokenizers can't load this tokenizer ({error}).") from error


@contextlib.contextmanager
def _folder_of(contents: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a temporary folder with these files."""
    with tempfile.TemporaryDirectory(prefix="grain_sft-tokenizer-") as folder:
        for name, data in contents.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        yield folder


def _import(package: str, where: str) -> Any:
    try:
        importlib.import_module("jinja2")
        with _no_advice():
            return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError.of(f"{where}: a tokenizer of Hugging Face", "transformers", "hf") from error


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Keep transformers from advising to install PyTorch, which tokenizers do not need."""
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = before


def _id_or_none(number: Any, otherwise: int | None) -> int | None:
    return int(number) if isinstance(number, int) else otherwise


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character by which byte-level BPE writes bytes. Source: openai/gpt-2, encoder.py.

    Printable characters of Latin-1 stand for themselves, and U+0100 and up for the others, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in printable]
    return {chr(code): code for code in printable} | {chr(256 + at): code for at, code in enumerate(others)}
