"""Hugging Face tokenizers: a `tokenizer.json`, or a directory that `save_pretrained` wrote."""

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from grain_sft.errors import CorpusError, import_extra
from grain_sft.prepare.tokenizers import huggingface_cuts, huggingface_gaps
from grain_sft.prepare.tokenizers.tokenizer import CHAT_TEMPLATE, MARKER, Tokenizer
from grain_sft.storage import ForkSafeLock

# usual spellings of EOS and padding, for a tokenizer.json without the files that name these tokens
_EOS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")
_PAD = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # spelling of the token of one byte
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # codes of the printable characters of Latin-1
_OTHERS = [code for code in range(256) if code not in _PRINTABLE]
_BYTES = {chr(code): code for code in _PRINTABLE} | {chr(256 + index): code for index, code in enumerate(_OTHERS)}
"""Byte of each character in the tokens of byte-level BPE. Printable characters of Latin-1 represent their own bytes. U+0100,
U+0101, … represent the other bytes, in order. Source: openai/gpt-2, encoder.py.
"""
_SPACE = "\u2581"  # the character that Metaspace writes for a space


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer that transformers loads from its files, without network access or remote code.

    Its special tokens are the added tokens that the files declare special or that look like `<|markers|>`. Other added tokens,
    such as `<think>` and runs of spaces, are ordinary text, as in transformers.

    Raises:
      CorpusError: transformers can't load the files, or tokenizer.json is missing (a "slow" tokenizer).
      MissingExtraError: transformers or jinja2 is not installed.
    """

    encodes_whole_chats = True
    kind = "huggingface"

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        super().__init__(contents, where)
        loaded = self.transformers_tokenizer
        self.special_tokens = {
            str(token.content): number
            for number, token in sorted(loaded.added_tokens_decoder.items())
            if token.content and (token.special or MARKER.fullmatch(token.content))
        }
        model = self._content()["model"]
        if model.get("dropout"):
            raise CorpusError(f"{where}: its dropout draws ids at random. Set model.dropout to null in tokenizer.json.")
        # a text may become the token of unknown characters, so this token is not one of `control_ids`
        unknown = {self.special_tokens.get(name) for name in (model.get("unk_token"), loaded.unk_token) if name}
        self.control_ids = frozenset(self.special_tokens.values()) - unknown - {model.get("unk_id")}
        self.vocab_size = max(loaded.get_vocab().values(), default=-1) + 1
        for name, spellings in (("eos_token", _EOS), ("pad_token", _PAD)):
            found = [spelling for spelling in spellings if spelling in self.special_tokens]
            if self._is_alone and len(found) == 1:  # with several spellings, it is unknown which one is meant
                setattr(loaded, name, found[0])
        self.eos_token_id, self.pad_token_id = loaded.eos_token_id, loaded.pad_token_id
        self.bos_token_id = loaded.bos_token_id
        self.empty_ids = tuple(int(number) for number in loaded("")["input_ids"])
        self.template_variables = loaded.special_tokens_map

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer that transformers loads from the files."""
        reason = f"{self._where}: a tokenizer of Hugging Face"
        # without this variable, transformers would advise to install PyTorch
        with _environment("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"):
            import_extra("jinja2", reason, "transformers", "hf")  # chat templates need jinja2
            transformers = import_extra("transformers", reason, "transformers", "hf")
        with tempfile.TemporaryDirectory(prefix="grain_sft-tokenizer-") as folder:
            for name, data in self._contents.items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            try:
                if self._is_alone:
                    file, template = Path(folder, "tokenizer.json"), self._contents.get(CHAT_TEMPLATE, b"").decode()
                    loaded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=template)
                else:
                    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # bad files raise errors of any type; tokenizers raises bare Exceptions
                text = str(error).replace(folder, self._where)
                problem = f"{self._where}: transformers can't load this tokenizer ({text})"
                raise CorpusError(f"{problem}. Copy or save its files again.") from error
        if not getattr(loaded, "is_fast", False):
            problem = f"{self._where}: has no tokenizer.json, so the offsets of tokens in a text are unknown"
            raise CorpusError(f"{problem}. Convert it: AutoTokenizer.from_pretrained(...).save_pretrained(...).")
        return loaded

    @functools.cached_property
    def chat_template(self) -> str | None:  # type: ignore[override]
        """The template that transformers chooses. Raises a CorpusError for several templates without a default."""
        loaded = self.transformers_tokenizer
        if not getattr(loaded, "chat_template", None):
            return None
        try:
            return str(loaded.get_chat_template())
        except ValueError as error:
            raise CorpusError(f"{self._where}: {str(error).rstrip('.')}. Give one with --chat-template.") from error

    @functools.cached_property
    def exact(self) -> Any:
        """`tokenizers.Tokenizer` with the ids of transformers. A token's offsets include its space, as in " the"."""
        return self._load(self._bare_content())

    @functools.cached_property
    def strict(self) -> Any:
        """Like `exact`, but it raises an error for a character without a token, which `exact` may leave out."""
        content = self._bare_content()
        is_changed = huggingface_gaps.refuse(content, _BYTES)
        return self._load(content) if is_changed else self.exact

    @functools.cached_property
    def plain(self) -> Any:
        """Like `strict`, but special tokens are `renamed`: a text that spells one becomes ordinary tokens."""
        content = self._bare_content()
        _rename_tokens(content, self.special_tokens.keys())
        huggingface_gaps.refuse(content, _BYTES)
        tokenizer = self._load(content)
        for text, number in self.special_tokens.items():
            if tokenizer.token_to_id(renamed(text)) != number:
                problem = f"{self._where}: text that spells the special token {text!r} can't be kept apart from it"
                raise CorpusError(f"{problem}. Declare the token in tokenizer.json's added_tokens.")
        return tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode`. One thread encodes, because a preparation has a process for each core.

        Raises:
          RecordError: A text has a character without a token.
        """
        plain = self.plain
        # "fast" computes no offsets; older versions of tokenizers lack it
        encode_batch = getattr(plain, "encode_batch_fast", plain.encode_batch)

        def encode(text: str) -> list[int]:
            """Return the ids of one text. A long text is cut into pieces at places where a cut does not change the ids."""
            ids: list[int] = []
            is_long = len(text) > huggingface_cuts.CUT_CHARACTERS
            for piece in huggingface_cuts.pieces(text, self._cuts) if is_long else [text]:
                try:
                    ids += encode_batch([piece], add_special_tokens=False)[0].ids
                except Exception as error:  # tokenizers raises bare Exceptions
                    raise huggingface_gaps.refusal(plain, piece, error) from error
            return ids

        with _environment("TOKENIZERS_PARALLELISM", "false"):  # the only way to prevent threads
            return [encode(text) for text in texts]

    @functools.cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """Pattern of the places where a long text can be cut; None if no place is safe. See `huggingface_cuts`."""
        return huggingface_cuts.cuts_of(json.loads(self.plain.to_str()))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.exact.decode([int(number) for number in ids], skip_special_tokens=False))

    def token_text(self, number: int) -> str | None:
        """See `Tokenizer.token_text`. "Ġ" and "<0x0A>" become bytes, and Metaspace's "▁" becomes a space."""
        loaded = self.transformers_tokenizer
        text = loaded.convert_ids_to_tokens(number) if 0 <= number < self.vocab_size else None
        if text is None or number in loaded.added_tokens_decoder:
            return text
        if '"ByteLevel"' in self._steps and _BYTES.keys() >= set(text):
            return bytes(_BYTES[character] for character in text).decode("utf-8", "surrogateescape")
        if '"ByteFallback"' in self._steps and (byte := _BYTE.fullmatch(text)):
            return bytes.fromhex(byte[1]).decode("utf-8", "surrogateescape")
        # the JSON of Metaspace has the character that it writes
        return str(text).replace(_SPACE, " ") if _SPACE in self._steps else str(text)

    @functools.cached_property
    def _steps(self) -> str:
        """JSON of the decoder and the pre-tokenizer, to search for steps such as '"ByteLevel"'."""
        content = self._content()
        return json.dumps([content.get("decoder"), content.get("pre_tokenizer")], ensure_ascii=False)

    @property
    def _is_alone(self) -> bool:
        """Whether the tokenizer.json comes without the files that name EOS, padding and BOS."""
        return self._contents.keys() <= {"tokenizer.json", CHAT_TEMPLATE}

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.transformers_tokenizer.backend_tokenizer.to_str())
        return content

    def _bare_content(self) -> dict[str, Any]:
        """Return `_content` without truncation, padding and the post-processor, which adds tokens and trims offsets."""
        return self._content() | dict.fromkeys(("truncation", "padding", "post_processor"))

    def _load(self, content: dict[str, Any]) -> Any:
        import tokenizers  # a dependency of transformers, which is optional

        try:
            return tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
        except Exception as error:  # tokenizers raises bare Exceptions
            problem = f"{self._where}: tokenizers can't load this tokenizer ({error})"
            raise CorpusError(f"{problem}. Copy or save its files again.") from error


_lock = ForkSafeLock()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in this context, which one thread at a time can enter."""
    with _lock.lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def renamed(spelling: str) -> str:
    """Return the spelling of a special token in `HuggingFaceTokenizer.plain`."""
    return f"\0{spelling}\0"  # texts never have NUL, because records with NUL are refused


def _rename_tokens(content: dict[str, Any], special: Set[str]) -> None:
    """Rename the special tokens of a parsed tokenizer.json in place. They keep their ids."""
    names = {spelling: renamed(spelling) for spelling in special}

    def is_kept(merge: Any) -> bool:
        """Return False if a part or the result of a merge is a renamed token, because the vocabulary no longer has it."""
        parts = merge.split(" ") if isinstance(merge, str) else merge  # older versions of tokenizers write "a b" for ["a", "b"]
        return special.isdisjoint(["".join(parts), *parts])

    for token in content["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = content["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if is_kept(merge)]
