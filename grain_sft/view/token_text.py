"""Texts of single tokens, exactly as the tokenizer's vocabulary has them: leading spaces and bytes too."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sentencepiece

from grain_sft.corpus import Corpus
from grain_sft.prepare.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, TiktokenTokenizer, Tokenizer
from grain_sft.prepare.tokenizers.sentencepiece_model import FILE
from grain_sft.provenance.text import find_tokenizer, tokenizer_of
from grain_sft.view.visible import visible

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenTexts:
    """The text of each token id.

    Args:
      tokenizer: None where there is none; then no id has a text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._special = {} if tokenizer is None else {number: text for text, number in tokenizer.special_tokens.items()}
        self._piece: Callable[[int], str | None]
        if isinstance(tokenizer, SentencePieceTokenizer):
            self._piece = _of_sentencepiece(tokenizer)
        elif isinstance(tokenizer, HuggingFaceTokenizer):
            self._piece = _of_huggingface(tokenizer)
        elif isinstance(tokenizer, TiktokenTokenizer):
            self._piece = _of_tiktoken(tokenizer)
        elif tokenizer is None:
            self._piece = lambda number: None
        else:
            self._piece = lambda number: tokenizer.decode([number])
        self._texts: dict[int, str | None] = {}

    def text(self, number: int) -> str | None:
        """The text of a token; bytes of it that are no UTF-8 are lone surrogates, as "surrogateescape" makes them. None
        for an id that the vocabulary does not have."""
        if number not in self._texts:
            special = self._special.get(number)
            self._texts[number] = self._piece(number) if special is None else special
        return self._texts[number]

    def is_special(self, number: int) -> bool:
        """Whether the token has a meaning beyond its spelling."""
        return number in self._special


def texts_of(
    corpus: Corpus,
    path: str | os.PathLike[str] | None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    argument: str = "--tokenizer",
) -> TokenTexts:
    """Return the texts of the corpus's tokens.

    Args:
      corpus: Corpus whose folder `tokenizer` is used unless a path is given.
      path: Path of a tokenizer.
      say: Called with a line, where neither exists and ids have to be shown.
      argument: What that line asks for.

    Raises:
      GrainSftError: the tokenizer cannot be loaded, or is another than the corpus was made with.
    """
    if path is None and (path := find_tokenizer(corpus)) is None:
        say(f"No folder 'tokenizer' is beside the corpus: ids are shown. Give {argument}.")
        return TokenTexts(None)
    return TokenTexts(tokenizer_of(corpus, os.fspath(path)))


def split_characters(texts: Sequence[str | None]) -> Iterator[tuple[int, int, str]]:
    """Where consecutive tokens share a character, of whose bytes each holds some: (first, stop, the text of tokens first
    to stop - 1). Bytes that never become a character are left out."""
    begin, held = 0, b""
    for at, text in enumerate(texts):
        broken = text is not None and any("\udc80" <= each <= "\udcff" for each in text)
        if not broken:
            held = b""
            continue
        assert text is not None
        begin = begin if held else at
        held += text.encode("utf-8", "surrogateescape")
        try:
            whole = held.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                begin, held = at, text.encode("utf-8", "surrogateescape")
            continue
        yield begin, at + 1, whole
        held = b""


def shown_texts(numbers: list[int], texts: TokenTexts) -> list[str]:
    """Every token as it is shown: its visible text; of a character that several tokens hold parts of, the first shows
    it and the others ‿; an id without a text is ⟨id⟩."""
    held = [texts.text(number) for number in numbers]
    shown = [f"⟨{number}⟩" if text is None else visible(text) for number, text in zip(numbers, held, strict=True)]
    for first, stop, whole in split_characters(held):
        shown[first:stop] = [visible(whole), *("‿" * (stop - first - 1))]
    return shown


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> Callable[[int], str | None]:
    model = tokenizer.files()[FILE]
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)

    def piece(number: int) -> str | None:
        if not 0 <= number < tokenizer.vocab_size:
            return None
        text = str(processor.id_to_piece(number))
        if processor.is_byte(number):
            return _of_bytes(bytes.fromhex(text[3:5]))
        return text if processor.is_unknown(number) else text.replace(_SPACE, " ")

    return piece


def _of_tiktoken(tokenizer: TiktokenTokenizer) -> Callable[[int], str | None]:
    def piece(number: int) -> str | None:
        data = tokenizer.token_bytes(number)
        return None if data is None else _of_bytes(data)

    return piece


def _of_huggingface(tokenizer: HuggingFaceTokenizer) -> Callable[[int], str | None]:
    loaded = tokenizer.transformers_tokenizer
    content = json.loads(loaded.backend_tokenizer.to_str())
    steps = json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
    by_byte, fallback = '"ByteLevel"' in steps, bool(content["model"].get("byte_fallback"))
    metaspace = '"Metaspace"' in steps or "\\u2581" in steps
    added = {number: str(token.content) for number, token in loaded.added_tokens_decoder.items()}

    def piece(number: int) -> str | None:
        if number in added:
            return added[number]
        text = loaded.convert_ids_to_tokens(number) if 0 <= number < tokenizer.vocab_size else None
        if text is None:
            return None
        if by_byte and all(each in _bytes_of_characters() for each in text):
            return _of_bytes(bytes(_bytes_of_characters()[each] for each in text))
        byte = _BYTE.fullmatch(text) if fallback else None
        if byte:
            return _of_bytes(bytes.fromhex(byte[1]))
        return str(text).replace(_SPACE, " ") if metaspace else str(text)

    return piece


def _of_bytes(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones of Latin-1 as themselves, the others, in
    order, as U+0100 and up. Source: openai/gpt-2, encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in printable]
    return {chr(code): code for code in printable} | {chr(256 + at): code for at, code in enumerate(others)}
