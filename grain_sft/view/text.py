"""Texts of single tokens for display, with signs for invisible characters."""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from grain_sft.corpus import Corpus
from grain_sft.prepare import Tokenizer
from grain_sft.provenance import find_tokenizer, tokenizer_of

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # invisible, but in other categories


def visible(text: str) -> str:
    """Return `text` with a sign for each character that is invisible or changes the display of other characters.

    - A space becomes ·, a newline ⏎, a tab ⇥.
    - Other control characters, marks of direction, characters without width, unusual spaces and unassigned characters become
      their code, such as ⟨U+202E⟩.
    - A byte that is not UTF-8, decoded by "surrogateescape", becomes its value, such as ⟨xF0⟩.
    - A combining mark at the start of the text gets a circle before it: ◌.
    """
    if text.isascii() and text.isprintable():
        return text.replace(" ", "·")
    shown = "".join(map(_sign, text))
    # a mark that is shown as a code, such as ⟨U+FE0F⟩, needs no circle
    starts_with_mark = unicodedata.category(text[0]).startswith("M") and not shown.startswith("⟨")
    return f"◌{shown}" if starts_with_mark else shown


def visible_line(text: str) -> str:
    """Return a name or a path with the signs of `visible`, except that its spaces stay."""
    return "".join(character if character == " " else _sign(character) for character in text)


def columns(shown: str) -> int:
    """Return the number of terminal columns of `shown`: two for a wide character of East Asia, none for a combining mark."""
    with_width = (character for character in shown if unicodedata.category(character) not in ("Mn", "Me"))
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in with_width)


def _sign(character: str) -> str:
    """Return the sign of a character, as in `visible`, or the character itself."""
    code = ord(character)
    if character in _SIGNS:
        return _SIGNS[character]
    if 0xDC80 <= code <= 0xDCFF:  # decoded by "surrogateescape"
        return f"⟨x{code - 0xDC00:02X}⟩"
    is_variation_selector = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    if is_variation_selector or character in _BLANK or unicodedata.category(character) in _INVISIBLE_CATEGORIES:
        return f"⟨U+{code:04X}⟩"
    return character


class TokenTexts:
    """Texts of token ids. Without a tokenizer, no id has a text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        special = {} if tokenizer is None else tokenizer.special_tokens
        self._special: dict[int, str | None] = {token: text for text, token in special.items()}
        self._tokenizer = tokenizer
        self._texts = dict(self._special)

    def text(self, token: int) -> str | None:
        """Return the text of a token id, with "surrogateescape" for bytes that are not UTF-8; None for an unknown id."""
        if token not in self._texts:
            self._texts[token] = None if self._tokenizer is None else self._tokenizer.token_text(token)
        return self._texts[token]

    def is_special(self, token: int) -> bool:
        return token in self._special


def texts_of(
    corpus: Corpus,
    path: str | os.PathLike[str] | None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    argument: str = "--tokenizer",
) -> TokenTexts:
    """Return the texts of the tokens of a corpus.

    Args:
      path: Path of the tokenizer. None means the folder `tokenizer` next to the corpus, or up to two folders above.
      say: Function that is called with a line for the user if no tokenizer is found.
      argument: How the user gives a tokenizer, such as "--tokenizer". The line for the user names it.

    Raises:
      GrainSftError: The tokenizer cannot be loaded, or the corpus was made with another tokenizer.
    """
    path = find_tokenizer(corpus) if path is None else path
    if path is None:
        say(f"No folder 'tokenizer' is next to the corpus: ids are shown in place of texts. Give {argument}.")
        return TokenTexts(None)
    return TokenTexts(tokenizer_of(corpus, os.fspath(path)))


def split_characters(texts: Sequence[str | None]) -> Iterator[tuple[int, int, str]]:
    """Yield (first, stop, joined text) for each group of tokens [first, stop) that together hold the bytes of a character.

    The texts "a", "\\udcc3" and "\\udcbc", as from `TokenTexts.text`, give (1, 3, "ü"): the last two are the bytes of "ü".
    Tokens whose bytes never complete a character are left out.
    """
    first, collected = 0, b""  # first token of the group so far, and the bytes of its tokens
    for index, text in enumerate(texts):
        # a token without incomplete bytes ends the group
        if text is None or not any("\udc80" <= character <= "\udcff" for character in text):
            collected = b""
            continue
        if not collected:
            first = index
        data = text.encode("utf-8", "surrogateescape")
        collected += data
        try:
            yield first, index + 1, collected.decode()
            collected = b""
        except UnicodeDecodeError as error:
            # If the data end inside a character, the next token may complete it.
            if error.reason != "unexpected end of data":
                first, collected = index, data


def shown_texts(tokens: list[int], texts: TokenTexts) -> list[str]:
    """Return the visible text of every token. An id without a text is shown as ⟨id⟩.

    If several tokens share a character, the first token is shown as the character, and the other tokens as ‿.
    """
    raw = [texts.text(token) for token in tokens]
    shown = [f"⟨{token}⟩" if text is None else visible(text) for token, text in zip(tokens, raw, strict=True)]
    for first, stop, whole in split_characters(raw):
        shown[first] = visible(whole)
        shown[first + 1 : stop] = ["‿"] * (stop - first - 1)
    return shown
