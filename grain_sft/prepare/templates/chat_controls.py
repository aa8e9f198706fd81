"""Expected control tokens of a rendered chat: those in the template's own text, not in the chat's texts.

In most chats, the template's text depends only on the roles, and only that text is searched. Any other chat is rendered
again with each character of its texts exchanged for a character that the chat does not have: what is left unexchanged is the
template's own text. Exchanging the characters back must give the chat again, unless the template changes texts.
"""

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grain_sft.errors import RecordError
from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.templates.chat_spans import KEPT, RenderedChat, around_contents
from grain_sft.prepare.templates.chat_template import unused_characters
from grain_sft.prepare.templates.template import SpecialText

Control = tuple[int, int, int]
"""Id, start and stop of a control token; start and stop are indices of characters in a text."""

Find = Callable[[str], list[Control]]

_STAND_IN = "\U00020000"  # a letter that replaces a whole text
_LETTERS, _OTHERS = range(0x20001, 0x2A6D0), range(0x100000, 0x10FFFE)
_EXCHANGED = re.compile("[\U00020001-\U0002a6df\U00100000-\U0010fffd]+")
_ESCAPED = frozenset('"\\\x7f') | {chr(code) for code in range(32)}  # characters that JSON escapes


class Expected(NamedTuple):
    """Control tokens that the template writes. Their places are known only if `placed`: the template changes no text."""

    controls: list[Control]
    placed: bool

    @property
    def ids(self) -> list[int]:
        """Their ids."""
        return [number for number, _, _ in self.controls]


def expected_controls(chat: RenderedChat, find: Find, special: SpecialText) -> Expected:
    """Return the control tokens that the template writes; `find` returns those of a text, `special` has their spellings.

    Raises:
      RecordError: The template's control tokens depend on the chat's texts.
    """
    if chat.contents is not None:
        literals = around_contents(chat.template, chat.roles) or []
        starts = [0, *(stop for _, stop in chat.contents)]
        return Expected(_controls_in(literals, starts, functools.partial(_find_once, find)), placed=True)
    exchange = _exchange(chat)
    table, back = str.maketrans(exchange), str.maketrans({after: before for before, after in exchange.items()})
    keys, compared = chat.template.literals
    names = _kept_names(keys, special)

    def exchange_all(text: str) -> str:
        return text.translate(table)

    def exchange_uncompared(text: str) -> str:
        """Exchange a text, but keep the texts that the template compares others with, unless they overlap a control token."""
        spelled = [match.span() for match in special.pattern.finditer(text)]
        parts, stop = [], 0
        for match in compared.finditer(text):
            if not any(first < match.end() and match.start() < last for first, last in spelled):
                parts += [text[stop : match.start()].translate(table), match.group()]
                stop = match.end()
        return "".join([*parts, text[stop:].translate(table)])

    plain = _render_exchanged(chat, names, exchange_all)
    if plain is None:
        raise RecordError("messages: the chat template refuses them with other texts, so its own text is unknown.")
    expected = Expected(_controls_of_template(plain, find), placed=plain.translate(back) == chat.text)
    if expected.placed:
        return expected
    careful = _render_exchanged(chat, names, exchange_uncompared)
    if careful is None or careful.translate(back) != chat.text:
        return expected
    again = Expected(_controls_of_template(careful, find), placed=True)
    return again if again.ids == expected.ids else expected


@functools.lru_cache(maxsize=KEPT)
def _find_once(find: Find, text: str) -> list[Control]:
    """Return `find(text)`. Most chats have the same texts around their contents."""
    return find(text)


def _controls_of_template(exchanged: str, find: Find) -> list[Control]:
    """Return the control tokens of a chat with exchanged texts."""
    starts = [0, *(match.end() for match in _EXCHANGED.finditer(exchanged))]
    return _controls_in(_EXCHANGED.split(exchanged), starts, find)


def _controls_in(literals: Sequence[str], starts: Sequence[int], find: Find) -> list[Control]:
    """Return the control tokens of the template's texts `literals`, which start at `starts` in the chat.

    They are found in the literals joined by one letter for each text of the chat.
    """
    joined = [0, *itertools.accumulate(len(literal) + len(_STAND_IN) for literal in literals)]  # starts there
    found = []
    for number, start, stop in find(_STAND_IN.join(literals)):
        index = bisect.bisect_right(joined, start) - 1
        moved = starts[index] - joined[index]
        found.append((number, start + moved, stop + moved))
    return found


def _exchange(chat: RenderedChat) -> dict[str, str]:
    """Return the replacement of each character in the chat's texts. Letters and digits are replaced by letters."""
    values = [chat.messages, chat.tools]
    used = {char for _, text in strings(values) for char in text if not char.isspace() and char not in _ESCAPED}
    letters = {char for char in used if char.isalnum()}
    exchange: dict[str, str] = {}
    for characters, codes in ((letters, _LETTERS), (used - letters, _OTHERS)):
        others = unused_characters(len(characters), values, chat.template.source, chat.text, codes=codes)
        exchange |= zip(sorted(characters), others, strict=True)
    return exchange


@functools.lru_cache(maxsize=16)
def _kept_names(names: frozenset[str], special: SpecialText) -> frozenset[str]:
    """Return the names that can't overlap a control token, and `content`, which every chat needs."""
    spellings = [spelling.lower() for spelling in special.spellings]

    def overlaps(name: str, spelling: str) -> bool:
        ends = any(spelling.startswith(name[at:]) or spelling.endswith(name[: at + 1]) for at in range(len(name)))
        return ends or name in spelling or spelling in name

    return frozenset(
        name
        for name in names
        if name == "content"
        or (name.isascii() and name.isidentifier() and not any(overlaps(name.lower(), each) for each in spellings))
    )


def _render_exchanged(chat: RenderedChat, names: frozenset[str], exchanged: Callable[[str], str]) -> str | None:
    """Return the chat rendered with exchanged texts and keys, except the keys `names`; None if the template refuses it."""

    def value(entry: Any) -> Any:
        if isinstance(entry, str):
            return exchanged(entry)
        if isinstance(entry, dict):
            return {key if key in names else exchanged(key): value(item) for key, item in entry.items()}
        return [value(item) for item in entry] if isinstance(entry, list | tuple) else entry

    messages = [
        {"role": message["role"], **value({key: message[key] for key in message if key != "role"})}
        for message in chat.messages
    ]
    return chat.template.attempt(messages, None if chat.tools is None else value(chat.tools))
