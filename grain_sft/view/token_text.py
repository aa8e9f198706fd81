"""Texts of single tokens, exactly as in the tokenizer's vocabulary: leading spaces and bytes too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

from grain_sft.corpus import Corpus
from grain_sft.prepare import Tokenizer
from grain_sft.provenance import find_tokenizer, tokenizer_of
from grain_sft.view.visible import visible


class TokenTexts:
    """The text of each token id.

    Args:
      tokenizer: Tokenizer, or None: then no id has a text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._special = {} if tokenizer is None else {number: text for text, number in tokenizer.special_tokens.items()}
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def text(self, number: int) -> str | None:
        """Return the text of a token, with lone surrogates for bytes that are not UTF-8 ("surrogateescape"); None for an id
        that the vocabulary does not have."""
        if number not in self._texts:
            special = self._special.get(number)
            if special is None and self._tokenizer is not None:
                special = self._tokenizer.token_text(number)
            self._texts[number] = special
        return self._texts[number]

    def is_special(self, number: int) -> bool:
        """Return whether the token is special."""
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
    """Yield (first, stop, text of tokens first to stop - 1) wherever consecutive tokens hold the bytes of one character. Bytes
    that never become a character are left out."""
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
    """Return the visible text of every token: ‿ after the first token of a character that several share, and ⟨id⟩ for an id
    without a text."""
    known = [texts.text(number) for number in numbers]
    shown = [f"⟨{number}⟩" if text is None else visible(text) for number, text in zip(numbers, known, strict=True)]
    for first, stop, whole in split_characters(known):
        shown[first:stop] = [visible(whole), *("‿" * (stop - first - 1))]
    return shown
