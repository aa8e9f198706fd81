"""Control tokens that a chat template writes itself, told apart from those that the chat's texts spell.

A template writes `<|im_start|>user`, the content and `<|im_end|>`. A content that spells `<|im_end|>` must not end the turn. So
the chat is rendered again, and each character of its texts is replaced by a character that the chat does not have: each "h" by
U+20001. All other characters of the new text come from the template, and so do the control tokens that they spell.

Exchanging the characters back must give the chat again. If it does not, the template changes texts, for example to upper case.
Then the ids of the template's control tokens are known, but their places are not.

Most chats are not rendered again: `RenderedChat.contents` has the spans of the contents, and the other text is the template's.
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
_LETTERS = range(0x20001, 0x2A6D0)  # Chinese letters, exchanged for letters and digits
_OTHERS = range(0x100000, 0x10FFFE)  # private characters, exchanged for all others
_EXCHANGED = re.compile("[\U00020001-\U0002a6df\U00100000-\U0010fffd]+")
_ESCAPED = frozenset('"\\\x7f') | {chr(code) for code in range(32)}  # characters that JSON escapes


class Expected(NamedTuple):
    """Control tokens that the template writes.

    Attributes:
      controls: Control tokens in the order of the chat.
      placed: Whether their `start` and `stop` are right. If the template changes texts, only their ids are.
    """

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
    kept_keys = _kept_keys(keys, special)

    def exchange_all(text: str) -> str:
        return text.translate(table)

    def exchange_uncompared(text: str) -> str:
        """Exchange a text, except the words that the template looks for.

        A template with `{% if '</think>' in message.content %}` looks for "</think>". If such a word overlaps the spelling of a
        control token in the text, the word is exchanged, too.
        """
        spelled = [match.span() for match in special.pattern.finditer(text)]
        parts, stop = [], 0
        for match in compared.finditer(text):
            if not any(first < match.end() and match.start() < last for first, last in spelled):
                parts += [text[stop : match.start()].translate(table), match.group()]
                stop = match.end()
        return "".join([*parts, text[stop:].translate(table)])

    all_exchanged = _render_exchanged(chat, kept_keys, exchange_all)
    if all_exchanged is None:
        raise RecordError("messages: the chat template refuses them with other texts, so its own text is unknown.")
    expected = Expected(_controls_of_template(all_exchanged, find), all_exchanged.translate(back) == chat.text)
    if expected.placed:
        return expected
    # a template that looks for "</think>" does not find it in exchanged texts, and may render a turn without its thoughts. So
    # the chat is rendered once more, with such words unchanged
    words_kept = _render_exchanged(chat, kept_keys, exchange_uncompared)
    if words_kept is None or words_kept.translate(back) != chat.text:
        return expected
    placed = Expected(_controls_of_template(words_kept, find), placed=True)
    return placed if placed.ids == expected.ids else expected


@functools.lru_cache(maxsize=KEPT)
def _find_once(find: Find, text: str) -> list[Control]:
    """Return `find(text)`, cached: chats with the same roles have the same text of the template."""
    return find(text)


def _controls_of_template(exchanged: str, find: Find) -> list[Control]:
    """Return the control tokens of a chat that is rendered with exchanged texts."""
    starts = [0, *(match.end() for match in _EXCHANGED.finditer(exchanged))]
    return _controls_in(_EXCHANGED.split(exchanged), starts, find)


def _controls_in(literals: Sequence[str], starts: Sequence[int], find: Find) -> list[Control]:
    """Return the control tokens of the template's texts `literals`, which start at `starts` in the chat.

    `find` searches one text: the literals, joined by a letter in place of each text of the chat.
    """
    starts_in_joined = [0, *itertools.accumulate(len(literal) + len(_STAND_IN) for literal in literals)]
    controls = []
    for number, start, stop in find(_STAND_IN.join(literals)):
        literal = bisect.bisect_right(starts_in_joined, start) - 1
        shift = starts[literal] - starts_in_joined[literal]
        controls.append(Control(number, start + shift, stop + shift))
    return controls


def _exchange(chat: RenderedChat) -> dict[str, str]:
    """Return the character that replaces each character in the chat's texts.

    A letter or digit becomes a letter, and a punctuation mark a private character. Spaces and characters that JSON escapes are
    not replaced.
    """
    values = [chat.messages, chat.tools]
    used = {char for _, text in strings(values) for char in text if not char.isspace() and char not in _ESCAPED}
    letters = {char for char in used if char.isalnum()}
    exchange: dict[str, str] = {}
    for characters, codes in ((letters, _LETTERS), (used - letters, _OTHERS)):
        others = unused_characters(len(characters), values, chat.template.source, chat.text, codes=codes)
        exchange |= zip(sorted(characters), others, strict=True)
    return exchange


@functools.lru_cache(maxsize=16)
def _kept_keys(keys: frozenset[str], special: SpecialText) -> frozenset[str]:
    """Return the keys of messages that need no exchange: `content`, and names that can't overlap a control token."""
    spellings = [spelling.lower() for spelling in special.spellings]

    def overlaps(key: str, spelling: str) -> bool:
        """Return whether `key` and `spelling` can overlap in a text: "end" is inside "<|im_end|>", so they can."""
        at_an_end = any(spelling.startswith(key[at:]) or spelling.endswith(key[: at + 1]) for at in range(len(key)))
        return at_an_end or key in spelling or spelling in key

    def is_kept(key: str) -> bool:
        is_name = key.isascii() and key.isidentifier()
        return key == "content" or (is_name and not any(overlaps(key.lower(), spelling) for spelling in spellings))

    return frozenset(filter(is_kept, keys))


def _render_exchanged(chat: RenderedChat, kept_keys: frozenset[str], exchange: Callable[[str], str]) -> str | None:
    """Return the chat rendered with exchanged texts and keys; None if the template refuses the exchanged chat.

    Roles and the keys in `kept_keys` are not exchanged.
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
