"""The expected control tokens of a rendered chat: those of the same chat with harmless texts.

To find them, the template's own characters must be told from those of the chat's texts. Most chats are contents between
text that all chats of their roles share. Any other is rendered once more with every character of its texts exchanged for
one that occurs nowhere in it: translated back, that must be the chat itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.templates.chat_spans import KEPT, around_contents
from grain_sft.prepare.templates.chat_template import ChatTemplate, Messages, Spans, unused_characters
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
    """The control tokens that a rendered chat must have.

    Attributes:
      ids: Ids in order.
      spans: Their characters in the chat; None where the template changes texts, so that only the ids are known.
    """

    ids: list[int]
    spans: Spans | None


def expected_controls(
    chat: ChatTemplate,
    messages: Messages,
    tools: Sequence[Any] | None,
    text: str,
    contents: Spans | None,
    find: Find,
    special: SpecialText,
) -> Expected:
    """Return the control tokens of a chat with harmless texts.

    Args:
      chat: Template.
      messages: Messages of the chat.
      tools: Tools of the chat.
      text: Rendered chat.
      contents: Span of every message's content, if the rest of the text is the same in any chat of these roles.
      find: Function that returns the control tokens of a text.
      special: Spellings of control tokens.

    Raises:
      RecordError: The template's control tokens depend on the chat's texts.
    """
    if contents is not None:
        return _of_roles(chat, tuple(message["role"] for message in messages), contents, find)
    exchange = _exchange(messages, tools, chat.source, text)
    back = str.maketrans({after: before for before, after in exchange.items()})
    names = _kept_names(chat.names, special)
    plain = _Exchange(chat, names, str.maketrans(exchange), None).render(messages, tools)
    if plain is None:
        raise RecordError("messages: the chat template renders them only with these texts, so its own text is unknown.")
    found = _of_literals(plain, find)
    if plain.translate(back) == text:
        return found
    careful = _Exchange(chat, names, str.maketrans(exchange), special).render(messages, tools)
    if careful is not None and careful.translate(back) == text:
        again = _of_literals(careful, find)
        if again.ids == found.ids:
            return again
    return Expected(found.ids, None)


def _of_roles(chat: ChatTemplate, roles: tuple[str, ...], contents: Spans, find: Find) -> Expected:
    """Return the control tokens between contents, found once for all chats of these roles."""
    kept = chat.controls_of_roles.get(roles)
    if kept is None:
        around = around_contents(chat, roles) or []
        starts = [0]
        for before in around[:-1]:
            starts.append(starts[-1] + len(before) + len(_STAND_IN))
        kept = []
        for number, start, stop in find(_STAND_IN.join(around)):
            part = bisect.bisect_right(starts, start) - 1
            kept.append((number, part, start - starts[part], stop - starts[part]))
        if len(chat.controls_of_roles) >= KEPT:
            chat.controls_of_roles.clear()
        chat.controls_of_roles[roles] = kept
    begins = [0, *(stop for _, stop in contents)]
    return Expected(
        [number for number, _, _, _ in kept],
        [(begins[part] + start, begins[part] + stop) for _, part, start, stop in kept],
    )


def _of_literals(exchanged: str, find: Find) -> Expected:
    """Return the control tokens of a chat whose texts were exchanged. A letter replaces each run of exchanged characters."""
    starts, places, length, stop = [0], [0], 0, 0
    parts: list[str] = []
    for match in _EXCHANGED.finditer(exchanged):
        part = exchanged[stop : match.start()] + _STAND_IN
        parts.append(part)
        length, stop = length + len(part), match.end()
        starts.append(length)
        places.append(stop)
    controls = find("".join([*parts, exchanged[stop:]]))
    spans = []
    for _, first, last in controls:
        part_number = bisect.bisect_right(starts, first) - 1
        moved = places[part_number] - starts[part_number]
        spans.append((first + moved, last + moved))
    return Expected([number for number, _, _ in controls], spans)


def _exchange(messages: Messages, tools: Sequence[Any] | None, source: str, text: str) -> dict[str, str]:
    """Return the character that replaces each character of the chat's texts: letters for letters and digits."""
    values = [messages, tools]
    used = {each for _, string in strings(values) for each in string if not each.isspace() and each not in _ESCAPED}
    letters = sorted(each for each in used if each.isalnum())
    others = sorted(used - set(letters))
    return {
        **dict(zip(letters, unused_characters(len(letters), values, source, text, codes=_LETTERS), strict=True)),
        **dict(zip(others, unused_characters(len(others), values, source, text, codes=_OTHERS), strict=True)),
    }


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


class _Exchange:
    """Renders chats whose texts are exchanged.

    Args:
      chat: Template.
      names: Keys that stay, because the template reads them.
      table: Replacement of each character.
      special: Spellings of control tokens. If given, words that the template compares texts with stay, unless they touch
        such a spelling.
    """

    def __init__(
        self, chat: ChatTemplate, names: frozenset[str], table: Mapping[int, str], special: SpecialText | None
    ) -> None:
        self._chat = chat
        self._names = names
        self._table = table
        self._special = special

    def render(self, messages: Messages, tools: Sequence[Any] | None) -> str | None:
        """Return the text of the chat; None where the template refuses it."""
        changed = [
            {"role": message["role"], **self._value({key: message[key] for key in message if key != "role"})}
            for message in messages
        ]
        try:
            return self._chat.render(changed, None if tools is None else self._value(tools))
        except RecordError:
            return None

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            names = self._names
            return {key if key in names else self._text(key): self._value(entry) for key, entry in value.items()}
        return [self._value(entry) for entry in value] if isinstance(value, list | tuple) else value

    def _text(self, text: str) -> str:
        if self._special is None or not self._chat.compared.search(text):
            return text.translate(self._table)
        spelled = [match.span() for match in self._special.pattern.finditer(text)]
        parts: list[str] = []
        stop = 0
        for match in self._chat.compared.finditer(text):
            if any(first < match.end() and match.start() < last for first, last in spelled):
                continue
            parts += [text[stop : match.start()].translate(self._table), match.group()]
            stop = match.end()
        return "".join([*parts, text[stop:].translate(self._table)])
