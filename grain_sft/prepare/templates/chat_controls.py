"""The expected control tokens of a rendered chat: those of the same chat with harmless texts.

Most chats are contents between text that all chats of their roles share. Any other is rendered once more with every
character of its texts exchanged for one that occurs nowhere in it: translated back, that must be the chat itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.templates.chat_spans import KEPT, RenderedChat, around_contents
from grain_sft.prepare.templates.chat_template import ChatTemplate, Spans, unused_characters
from grain_sft.prepare.templates.template import SpecialText

Control = tuple[int, int, int]
"""Id, start and stop of a control token in a text."""

Find = Callable[[str], list[Control]]

_STAND_IN = "\U00020000"  # a letter in place of a text
_LETTERS, _OTHERS = range(0x20001, 0x2A6D0), range(0x100000, 0x10FFFE)
_EXCHANGED = re.compile("[\U00020001-\U0002a6df\U00100000-\U0010fffd]+")
_ESCAPED = frozenset('"\\\x7f') | {chr(code) for code in range(32)}  # JSON escapes them


@dataclasses.dataclass(frozen=True)
class Expected:
    """Ids of the control tokens of a chat, and their characters; None where the template changes texts."""

    ids: list[int]
    spans: Spans | None


def expected_controls(chat: RenderedChat, find: Find, special: SpecialText) -> Expected:
    """Return the control tokens of a chat with harmless texts; `find` gives those of a text, `special` their spellings.

    Raises:
      RecordError: The template's control tokens depend on the chat's texts.
    """
    if chat.contents is not None:
        starts = [0, *(stop for _, stop in chat.contents)]
        return _moved(_of_roles(chat.template, chat.roles, find), starts)
    exchange = _exchange(chat)
    table, back = str.maketrans(exchange), str.maketrans({after: before for before, after in exchange.items()})
    names = _kept_names(chat.template.names, special)

    def without_words(text: str) -> str:
        return text.translate(table)

    def with_words(text: str) -> str:
        """Exchange a text, except the words that the template compares texts with and that touch no control token."""
        spelled = [match.span() for match in special.pattern.finditer(text)]
        parts, stop = [], 0
        for match in chat.template.compared.finditer(text):
            if not any(first < match.end() and match.start() < last for first, last in spelled):
                parts += [text[stop : match.start()].translate(table), match.group()]
                stop = match.end()
        return "".join([*parts, text[stop:].translate(table)])

    plain = _render_exchanged(chat, names, without_words)
    if plain is None:
        raise RecordError("messages: the chat template renders them only with these texts, so its own text is unknown.")
    expected = _of_literals(plain, find)
    if plain.translate(back) == chat.text:
        return expected
    careful = _render_exchanged(chat, names, with_words)
    if careful is not None and careful.translate(back) == chat.text:
        again = _of_literals(careful, find)
        if again.ids == expected.ids:
            return again
    return Expected(expected.ids, None)


@functools.lru_cache(maxsize=KEPT)
def _of_roles(template: ChatTemplate, roles: tuple[str, ...], find: Find) -> list[tuple[int, Control]]:
    return _between(around_contents(template, roles) or [], find)


def _of_literals(exchanged: str, find: Find) -> Expected:
    """Return the control tokens of a chat whose texts were exchanged."""
    starts = [0, *(match.end() for match in _EXCHANGED.finditer(exchanged))]
    return _moved(_between(_EXCHANGED.split(exchanged), find), starts)


def _between(literals: Sequence[str], find: Find) -> list[tuple[int, Control]]:
    """Return the control tokens of a template's own texts, a letter for each text between: index of the text, token."""
    starts = [0]
    for literal in literals[:-1]:
        starts.append(starts[-1] + len(literal) + len(_STAND_IN))
    found = []
    for number, start, stop in find(_STAND_IN.join(literals)):
        index = bisect.bisect_right(starts, start) - 1
        found.append((index, (number, start - starts[index], stop - starts[index])))
    return found


def _moved(controls: list[tuple[int, Control]], starts: list[int]) -> Expected:
    """Return the control tokens of texts that begin at these characters of a chat."""
    spans = [(starts[index] + start, starts[index] + stop) for index, (_, start, stop) in controls]
    return Expected([number for _, (number, _, _) in controls], spans)


def _exchange(chat: RenderedChat) -> dict[str, str]:
    """Return the character that replaces each character of the chat's texts: letters for letters and digits."""
    values = [chat.messages, chat.tools]
    used = {each for _, text in strings(values) for each in text if not each.isspace() and each not in _ESCAPED}
    letters = {each for each in used if each.isalnum()}
    exchange: dict[str, str] = {}
    for characters, codes in ((letters, _LETTERS), (used - letters, _OTHERS)):
        others = unused_characters(len(characters), values, chat.template.source, chat.text, codes=codes)
        exchange |= zip(sorted(characters), others, strict=True)
    return exchange


@functools.lru_cache(maxsize=16)
def _kept_names(names: frozenset[str], special: SpecialText) -> frozenset[str]:
    """Return the names that can't be part of a control token, and `content`, which every chat needs."""
    spellings = [spelling.lower() for spelling in special.spellings]
    return frozenset(
        name
        for name in names
        if name == "content"
        or (name.isascii() and name.isidentifier() and not any(_touches(name.lower(), each) for each in spellings))
    )


def _touches(name: str, spelling: str) -> bool:
    """Return whether a name can be part of a spelling."""
    return (
        name in spelling
        or any(spelling.startswith(name[start:]) for start in range(len(name)))
        or any(spelling.endswith(name[:stop]) for stop in range(1, len(name)))
    )


def _render_exchanged(chat: RenderedChat, names: frozenset[str], exchanged: Callable[[str], str]) -> str | None:
    """Return the text of a chat whose texts are exchanged, except keys of these names; None where it is refused."""

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
