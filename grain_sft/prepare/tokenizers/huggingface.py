"""Tokenizers of Hugging Face: a `tokenizer.json`, or a directory as `save_pretrained` writes it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grain_sft.errors import CorpusError, CorpusFileError, MissingExtraError
from grain_sft.prepare.tokenizers.huggingface_json import exact_json, plain_json, renamed
from grain_sft.prepare.tokenizers.tokenizer import CHAT_TEMPLATE, MARKER, describe, hash_files
from grain_sft.storage import files

_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
    *(CHAT_TEMPLATE, "chat_template.json", "vocab.json", "merges.txt", "vocab.txt"),
)
_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_MORE_TEMPLATES = "additional_chat_templates"
_EOS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")
_PAD = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>")


class HuggingFaceTokenizer:
    """A fast tokenizer, loaded by transformers from local copies of its files, with no network and no remote code.

    Its special tokens are the added tokens that it declares special, and those that look like `<|markers|>`. Other added
    tokens (runs of spaces, `<think>`) are ordinary text, as they are to transformers.
    """

    kind = "huggingface"

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        """Reads a tokenizer from the contents of its files by name; `where` is their path, for errors.

        Raises:
          CorpusError: transformers can't load it, or it is not of the fast kind.
          MissingExtraError: transformers or jinja2 is not installed.
        """
        self._contents = dict(contents)
        self._where = where
        self.sha256 = hash_files(self._contents)
        loaded = self.transformers_tokenizer
        added = {number: str(token.content) for number, token in loaded.added_tokens_decoder.items()}
        declared = {number for number, token in loaded.added_tokens_decoder.items() if token.special}
        self.special_tokens: Mapping[str, int] = {
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
        self.empty_ids: Sequence[int] = tuple(int(number) for number in loaded("")["input_ids"])
        self.template_variables: Mapping[str, Any] = {
            name: str(value) if isinstance(value, str) else value for name, value in loaded.special_tokens_map.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._contents, self._where)

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({self._where!r}, vocab_size={self.vocab_size}, sha256={self.sha256[:12]!r})"

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """As transformers loads it."""
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
    def chat_template(self) -> str | None:
        """The template that transformers chooses; None where the tokenizer has none.

        Raises:
          CorpusError: it has several, and none of them is the default.
        """
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
        """As `exact`, but what spells a special token is ordinary text; see `huggingface_json.renamed`.

        Raises:
          CorpusError: this tokenizer can't be made so.
        """
        made = self._from_json(plain_json(exact_json(self._serialized()), self.special_tokens.keys()))
        for text, number in self.special_tokens.items():
            if made.token_to_id(renamed(text)) != number:
                raise CorpusError(
                    f"{self._where}: text that spells the special token {text!r} can't be kept apart from it in this "
                    "tokenizer. Have its special tokens declared in tokenizer.json's added_tokens."
                )
        return made

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; see `Tokenizer`. One after the other: encode_batch would start threads of its own."""
        encode = self.plain.encode
        return [encode(text, add_special_tokens=False).ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; see `Tokenizer`."""
        return str(self.exact.decode([int(number) for number in ids], skip_special_tokens=False))

    def token_id(self, text: str) -> int | None:
        """Id of a special token."""
        return self.special_tokens.get(text)

    def files(self) -> dict[str, bytes]:
        """The files that it was loaded from."""
        return dict(self._contents)

    def description(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return describe(self)

    def _guess(self, names: Sequence[str]) -> int | None:
        """Of a lone tokenizer.json, which doesn't say: the one special token with such a name."""
        found = [self.special_tokens[name] for name in names if name in self.special_tokens]
        return found[0] if len(found) == 1 and self._lone else None

    @property
    def _lone(self) -> bool:
        """Whether no file says which special token is which."""
        return self._contents.keys() <= {"tokenizer.json", CHAT_TEMPLATE}

    def _serialized(self) -> str:
        return str(self.transformers_tokenizer.backend_tokenizer.to_str())

    def _from_json(self, content: str) -> Any:
        tokenizers = _import("tokenizers", self._where)
        try:
            return tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise CorpusError(f"{self._where}: tokenizers can't load this tokenizer ({error}).") from error


def read_folder(folder: str) -> dict[str, bytes]:
    """Name and content of a folder's files that belong to a tokenizer, local or remote.

    Raises:
      CorpusFileError: no such folder.
    """
    if not files.is_remote(folder) and not os.path.isdir(folder):
        raise CorpusFileError(
            f"{folder}: no such directory. Tokenizers are read from local or gs:// files, not by name."
        )
    found = {}
    for name in list_folder(folder):
        top, _, rest = name.partition("/")
        if (
            name in _NAMES
            or (not rest and name.endswith(".model"))
            or (top == _MORE_TEMPLATES and rest.endswith(".jinja"))
        ):
            found[name] = files.read_bytes(files.join(folder, name))
    return found


def list_folder(folder: str) -> list[str]:
    """Names in a folder and in its folder of templates, sorted."""
    if files.is_remote(folder):
        with files.remote(folder) as client:
            root = client._strip_protocol(folder).rstrip("/")
            return sorted(path[len(root) + 1 :] for path in client.find(folder, maxdepth=2))
    root = folder
    return sorted(
        [entry.name for entry in os.scandir(root) if entry.is_file()]
        + [f"{_MORE_TEMPLATES}/{path.name}" for path in Path(root, _MORE_TEMPLATES).glob("*.jinja")]
    )


@contextlib.contextmanager
def _folder_of(contents: Mapping[str, bytes]) -> Iterator[str]:
    """A temporary folder with these files."""
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
