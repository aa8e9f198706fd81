"""Text made visible: a sign for every character that shows nothing, or changes how others show."""

from __future__ import annotations

import unicodedata

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")
_BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
)  # that Unicode counts among letters, marks, signs


def visible(text: str) -> str:
    """Return `text` with a sign for each invisible character.

    A space is ·, a newline ⏎, a tab ⇥. Other control characters, marks of direction, characters of no width, unusual
    spaces and unassigned ones are such as ⟨U+202E⟩. A byte that is not UTF-8 (a lone surrogate of the error handler
    "surrogateescape") is ⟨xF0⟩. A combining mark at the start follows a circle.
    """
    if text.isascii() and text.isprintable():
        return text.replace(" ", "·")
    shown = "".join(map(_sign, text))
    return f"◌{shown}" if unicodedata.combining(text[:1] or " ") and not shown.startswith("⟨") else shown


def visible_line(text: str) -> str:
    """Return the same of a name or a path, where spaces stay spaces."""
    return "".join(each if each == " " else _sign(each) for each in text)


def columns(shown: str) -> int:
    """Return the terminal columns of visible text: two for wide characters of East Asia, none for combining marks."""
    if shown.isascii():
        return len(shown)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in shown
    )


def _sign(character: str) -> str:
    sign = _SIGNS.get(character)
    if sign is not None:
        return sign
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"⟨x{code - 0xDC00:02X}⟩"
    selects = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    if selects or character in _BLANK or unicodedata.category(character) in _INVISIBLE_CATEGORIES:
        return f"⟨U+{code:04X}⟩"
    return character
