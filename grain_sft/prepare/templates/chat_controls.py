"""Control tokens that a chat template writes itself, told apart from those that the chat's texts spell.

A template writes `<|im_start|>user`, the content and `<|im_end|>`. A content that spells `<|im_end|>` must not end the turn. So
the chat is rendered again with each character of its texts exchanged for one that the chat does not have, such as "h" for
U+F0000. Every other character is the template's, and so are the control tokens there. Exchanging the characters back must give
the chat again. If it does not, the template changes texts: the ids of its control tokens are known, but not their places.

In most chats the template's text depends on the roles alone, and `RenderedChat.contents` tells it apart without this.
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


class Control(NamedTuple):
    """A control token in a text: its id, its first character and the one after its last."""

    id: int
    start: int
    stop: int


Find = Callable[[str], list[Control]]
"""Function that returns the control tokens of a text."""

_STAND_IN = "\U00020000"  # a letter that replaces a whole text
_EXCHANGED = re.compile("[\U000f0000-\U0010fffd]+")  # what `unused_characters` returns
_ESCAPED = frozenset('"\\\x7f') | {chr(code) for code in range(32)}  # characters that JSON escapes


class Expected(NamedTuple):
    """Control tokens that the template writes. If `placed` is False, the template changes texts and only the ids are right."""

    controls: list[Control]
    placed: bool

    @property
    def ids(self) -> list[int]:
        """Ids of the control tokens."""
        return [control.id for control in self.controls]


def expected_controls(chat: RenderedChat, find: Find, special: SpecialText) -> Expected:
    """Return the control tokens that the template writes.

    Args:
      chat: Rendered chat.
      find: Function that returns the control tokens of a text.
      special: Spellings of the tokenizer's special tokens.

    Raises:
      RecordError: The template's control tokens depend on the chat's texts.
    """
    if chat.contents is not None:
        literals = around_contents(chat.template, chat.roles) or []
        starts = [0, *(stop for _, stop in chat.contents)]
        return Expected(_controls_in(literals, starts, functools.partial(_find_once, find)), placed=True)
    exchange = _exchange(chat)
    table = str.maketrans(exchange)
    back = str.maketrans({after: before for before, after in exchange.items()})
    keys, compared = chat.template.literals

    def exchange_text(text: str) -> str:
        """Exchange a text except for words that the template compares texts with, such as "</think>".

        A word that overlaps the spelling of a control token is exchanged, too.
        """
        spelled = [match.span() for match in special.pattern.finditer(text)]
        parts, stop = [], 0
        for match in compared.finditer(text):
            if not any(first < match.end() and match.start() < last for first, last in spelled):
                parts += [text[stop : match.start()].translate(table), match.group()]
                stop = match.end()
        return "".join([*parts, text[stop:].translate(table)])

    exchanged = _render_exchanged(chat, _kept_keys(keys, special), exchange_text)
    if exchanged is None:
        raise RecordError("messages: the chat template refuses them with other texts, so its own text is unknown.")
    starts = [0, *(match.end() for match in _EXCHANGED.finditer(exchanged))]
    controls = _controls_in(_EXCHANGED.split(exchanged), starts, find)
    return Expected(controls, placed=exchanged.translate(back) == chat.text)


@functools.lru_cache(maxsize=KEPT)
def _find_once(find: Find, text: str) -> list[Control]:
    """Return `find(text)`, cached: chats with the same roles have the same text of the template."""
    return find(text)


def _controls_in(literals: Sequence[str], starts: Sequence[int], find: Find) -> list[Control]:
    """Return the control tokens of the template's texts `literals`, which start at `starts` in the chat.

    They are searched in one text: the literals, joined by a letter in place of each text of the chat.
    """
    starts_in_joined = [0, *itertools.accumulate(len(literal) + len(_STAND_IN) for literal in literals)]
    controls = []
    for number, start, stop in find(_STAND_IN.join(literals)):
        literal = bisect.bisect_right(starts_in_joined, start) - 1
        shift = starts[literal] - starts_in_joined[literal]
        controls.append(Control(number, start + shift, stop + shift))
    return controls


def _exchange(chat: RenderedChat) -> dict[str, str]:
    """Return the character that replaces each character in the chat's texts, except spaces and what JSON escapes."""
    values = [chat.messages, chat.tools]
    used = {char for _, text in strings(values) for char in text if not char.isspace() and char not in _ESCAPED}
    others = unused_characters(len(used), values, chat.template.source, chat.text)
    return dict(zip(sorted(used), others, strict=True))


@functools.lru_cache(maxsize=16)
def _kept_keys(keys: frozenset[str], special: SpecialText) -> frozenset[str]:
    """Return the keys of messages that need no exchange: `content`, and names that can't overlap a control token."""
    spellings = [spelling.lower() for spelling in special.spellings]

    def overlaps(key: str) -> bool:
        return any(key in spelling or spelling in key for spelling in spellings)

    names = {key for key in keys if key.isascii() and key.isidentifier() and not overlaps(key.lower())}
    return frozenset(names | {"content"})


def _render_exchanged(chat: RenderedChat, kept_keys: frozenset[str], exchange: Callable[[str], str]) -> str | None:
    """Return the chat rendered with exchanged texts, and keys except `kept_keys`; None if the template refuses it.

    Roles stay as they are.
    """

    def exchanged(value: Any) -> Any:
        if isinstance(value, str):
            return exchange(value)
        if isinstance(value, dict):
            return {key if key in kept_keys else exchange(key): exchanged(item) for key, item in value.items()}
        return [exchanged(item) for item in value] if isinstance(value, list | tuple) else value

    messages = []
    for message in chat.messages:
        others = {key: value for key, value in message.items() if key != "role"}
        messages.append({"role": message["role"], **exchanged(others)})
    return chat.template.attempt(messages, exchanged(chat.tools))
