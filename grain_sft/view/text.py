"""Texts of single tokens, exactly as in the tokenizer's vocabulary, and signs for invisible characters."""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from grain_sft.corpus import Corpus
from grain_sft.prepare import Tokenizer
from grain_sft.provenance import find_tokenizer, tokenizer_of

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # letters, marks and signs of Unicode


def visible(text: str) -> str:
    """Return `text` with a sign for each character that is invisible or changes the display of others.

    A space is ·, a newline ⏎, a tab ⇥. Other control characters, marks of direction, characters of no width, unusual
    spaces and unassigned ones are shown by their code, such as ⟨U+202E⟩. A byte that is not UTF-8 (a lone surrogate of the
    error handler "surrogateescape") is shown by its value, such as ⟨xF0⟩. A combining mark at the start follows a circle.
    """
    if text.isascii() and text.isprintable():
        return text.replace(" ", "·")
    shown = "".join(map(_sign, text))
    return f"◌{shown}" if unicodedata.category(text[0]).startswith("M") and not shown.startswith("⟨") else shown


def visible_line(text: str) -> str:
    """Return a name or a path with the signs of `visible`, but with its spaces."""
    return "".join(each if each == " " else _sign(each) for each in text)


def columns(shown: str) -> int:
    """Return the terminal columns of visible text: two for wide characters of East Asia, none for marks without a width."""
    if shown.isascii():
        return len(shown)
    spacing = (each for each in shown if unicodedata.category(each) not in ("Mn", "Me"))
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in spacing)


def _sign(character: str) -> str:
    code = ord(character)
    if character in _SIGNS:
        return _SIGNS[character]
    if 0xDC80 <= code <= 0xDCFF:
        return f"⟨x{code - 0xDC00:02X}⟩"
    selects = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    if selects or character in _BLANK or unicodedata.category(character) in _INVISIBLE_CATEGORIES:
        return f"⟨U+{code:04X}⟩"
    return character


class TokenTexts:
    """The text of each token id.

    Args:
      tokenizer: Tokenizer; with None, no id has a text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        special = {} if tokenizer is None else tokenizer.special_tokens
        self._special: dict[int, str | None] = {number: text for text, number in special.items()}
        self._tokenizer = tokenizer
        self._texts = dict(self._special)

    def text(self, number: int) -> str | None:
        """Return the text of a token, with lone surrogates for bytes that are not UTF-8 ("surrogateescape"); None for an id
        that the vocabulary does not have."""
        if number not in self._texts:
            self._texts[number] = None if self._tokenizer is None else self._tokenizer.token_text(number)
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
    """Return the texts of the tokens by the tokenizer at `path`, by default the folder `tokenizer` of the corpus.

    Where neither exists, so that ids have to be shown, `say` is called with a line that asks for `argument`.

    Raises:
      GrainSftError: the tokenizer cannot be loaded, or is another than the corpus was made with.
    """
    if path is None and (path := find_tokenizer(corpus)) is None:
        say(f"No folder 'tokenizer' is next to the corpus: ids are shown. Give {argument}.")
        return TokenTexts(None)
    return TokenTexts(tokenizer_of(corpus, os.fspath(path)))


def split_characters(texts: Sequence[str | None]) -> Iterator[tuple[int, int, str]]:
    """Yield (first, stop, text of tokens first to stop - 1) wherever consecutive tokens hold the bytes of one character. Bytes
    that never become a character are left out."""
    begin, collected = 0, b""
    for at, text in enumerate(texts):
        if text is None or not any("\udc80" <= each <= "\udcff" for each in text):
            collected = b""
            continue
        begin = begin if collected else at
        collected += text.encode("utf-8", "surrogateescape")
        try:
            yield begin, at + 1, collected.decode()
            collected = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                begin, collected = at, text.encode("utf-8", "surrogateescape")


def shown_texts(numbers: list[int], texts: TokenTexts) -> list[str]:
    """Return the visible text of every token: ‿ after the first token of a character that several share, and ⟨id⟩ for an id
    without a text."""
    found = [texts.text(number) for number in numbers]
    shown = [f"⟨{number}⟩" if text is None else visible(text) for number, text in zip(numbers, found, strict=True)]
    for first, stop, whole in split_characters(found):
        shown[first:stop] = [visible(whole), *("‿" * (stop - first - 1))]
    return shown
