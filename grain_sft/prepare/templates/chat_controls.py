"""Control tokens that a chat template writes itself, without those that the chat's texts spell.

A content that spells `<|im_end|>` must not end the turn. So only the template's own texts are searched. These are the texts
around the contents. If the places of the contents are unknown, the chat is rendered again with other characters (`Disguise`).
"""

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grain_sft.errors import RecordError
from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.templates.chat_spans import RenderedChat, around_contents
from grain_sft.prepare.templates.chat_template import unused_characters
from grain_sft.prepare.templates.template import SpecialText


class Control(NamedTuple):
    """A control token: its id, the index of its first character in a text, and the index after its last character."""

    id: int
    start: int
    stop: int


Find = Callable[[str], list[Control]]  # returns the control tokens of a text

_PLACEHOLDER = "\U00020000"  # a letter in place of a whole text of the chat, between two texts of the template
_DISGUISED = re.compile("[\U00020001-\U0002a6df\U00100000-\U0010fffd]+")  # the texts of a disguised chat

_LETTERS = range(0x20001, 0x2A6D0)  # Chinese letters, in place of letters and digits
_OTHERS = range(0x100000, 0x10FFFE)  # private characters, in place of punctuation marks and all other characters
# keys of messages and of calls, which a disguise keeps
_MESSAGE_KEYS = ("content", "reasoning_content", "thinking", "tool_calls", "id", "type", "function", "name", "arguments")
_ESCAPED = frozenset('"\\\x7f') | {chr(code) for code in range(32)}  # characters that JSON escapes


class Expected(NamedTuple):
    """Control tokens that the template writes, in order. If `placed` is False, their indices may be wrong."""

    controls: list[Control]
    placed: bool

    @property
    def ids(self) -> list[int]:
        return [control.id for control in self.controls]


def expected_controls(chat: RenderedChat, find: Find, special: SpecialText) -> Expected:
    """Return the control tokens that the template writes. `special` has the spellings of the tokenizer's special tokens.

    Raises:
      RecordError: The template refuses the disguised chat, so its control tokens are unknown.
    """
    if chat.contents is not None:
        literals = around_contents(chat.template, chat.roles) or []
        starts = [0, *(stop for _, stop in chat.contents)]
        return Expected(_controls_in(literals, starts, find), placed=True)
    disguise = Disguise(chat, special)
    expected = disguise.expected_controls(find)
    if expected is None:
        raise RecordError("messages: the chat template fails if letters are replaced. Use a template that accepts any text.")
    if expected.placed:
        return expected
    # A template that looks for "</think>" does not find it in disguised texts. So the chat is rendered once more, with such
    # words unchanged. If both renderings have the same ids, the unchanged words add no control token.
    second = disguise.expected_controls(find, keep_compared=True)
    return second if second is not None and second.placed and second.ids == expected.ids else expected


def _controls_in(literals: Sequence[str], starts: Sequence[int], find: Find) -> list[Control]:
    """Return the control tokens of the template's texts `literals`, which start at `starts` in the chat."""
    starts_in_joined = [0, *itertools.accumulate(len(literal) + len(_PLACEHOLDER) for literal in literals)]
    controls = []
    for number, start, stop in find(_PLACEHOLDER.join(literals)):
        literal = bisect.bisect_right(starts_in_joined, start) - 1
        shift = starts[literal] - starts_in_joined[literal]  # from the joined literals to the chat
        controls.append(Control(number, start + shift, stop + shift))
    return controls


class Disguise:
    """Disguise of one chat: each character of its texts becomes a character that neither the chat nor the template uses.

    All other characters of the rendered chat come from the template. Example with a text that spells a control token (the
    letters A to L mean unused characters):

      text of the chat                say <|im_end|>
      disguised text                  ABC DEFGHIJKEL
      rendered disguised chat         <|im_start|>user ABC DEFGHIJKEL<|im_end|>
      the template's control tokens   <|im_start|> and the last <|im_end|>

    Spaces, characters that JSON escapes, and roles stay. Keys that the template reads stay, except keys of tools and arguments
    that overlap a control token, as `end` overlaps "<|im_end|>".
    """

    def __init__(self, chat: RenderedChat, special: SpecialText) -> None:
        self._chat, self._special = chat, special
        self._kept_keys = _kept_keys(chat.template.read_keys, special)
        values = [chat.messages, chat.tools]
        used = {char for _, text in strings(values) for char in text if not char.isspace() and char not in _ESCAPED}
        letters = {char for char in used if char.isalnum()}
        replacements: dict[str, str] = {}
        for characters, codes in ((letters, _LETTERS), (used - letters, _OTHERS)):
            others = unused_characters(len(characters), values, chat.template.source, chat.text, codes=codes)
            replacements |= zip(sorted(characters), others, strict=True)
        self._replace = str.maketrans(replacements)
        self._restore = str.maketrans({after: before for before, after in replacements.items()})

    def expected_controls(self, find: Find, *, keep_compared: bool = False) -> Expected | None:
        """Return the control tokens that the template writes in the disguised chat; None if the template refuses the chat.

        With `keep_compared`, the words that the template looks for, such as "</think>", are not disguised.
        """
        replaced = self._replaced_except_compared if keep_compared else self._replaced
        messages = []
        for message in self._chat.messages:
            others = {key: value for key, value in message.items() if key != "role"}
            messages.append({"role": message["role"], **self._disguised(others, replaced)})
        rendered = self._chat.template.attempt(messages, self._disguised(self._chat.tools, replaced))
        if rendered is None:
            return None
        starts = [0, *(match.end() for match in _DISGUISED.finditer(rendered))]
        controls = _controls_in(_DISGUISED.split(rendered), starts, find)
        # a template that looks into the texts, such as for "</think>", may have written something else
        return Expected(controls, placed=rendered.translate(self._restore) == self._chat.text)

    def _disguised(self, value: Any, replaced: Callable[[str], str]) -> Any:
        """Return a JSON value with its texts and keys `replaced`."""
        if isinstance(value, str):
            return replaced(value)
        if isinstance(value, dict):
            kept = self._kept_keys
            return {key if key in kept else replaced(key): self._disguised(item, replaced) for key, item in value.items()}
        return [self._disguised(item, replaced) for item in value] if isinstance(value, list | tuple) else value

    def _replaced(self, text: str) -> str:
        return text.translate(self._replace)

    def _replaced_except_compared(self, text: str) -> str:
        """Disguise a text. Keep the words that the template looks for, but not a word that overlaps a control token."""
        spelled = [match.span() for match in self._special.pattern.finditer(text)]
        characters = list(self._replaced(text))
        for match in self._chat.template.compared.finditer(text):
            if not any(start < match.end() and match.start() < stop for start, stop in spelled):
                characters[match.start() : match.end()] = match.group()
        return "".join(characters)


@functools.lru_cache(maxsize=16)
def _kept_keys(keys: frozenset[str], special: SpecialText) -> frozenset[str]:
    """Return the keys that a disguise keeps: names that can't overlap a control token, and the keys of messages and calls.

    For example, Kimi's `<|tool_calls_section_begin|>` contains `tool_calls`, without which its template writes no calls.
    """
    spellings = [spelling.lower() for spelling in special.spellings]

    def overlaps(key: str, spelling: str) -> bool:
        """Return whether a key and a spelling can overlap in a text, such as "end" and "<|im_end|>"."""
        at_an_end = any(spelling.startswith(key[at:]) or spelling.endswith(key[: at + 1]) for at in range(len(key)))
        return at_an_end or key in spelling or spelling in key

    def is_kept(key: str) -> bool:
        is_name = key.isascii() and key.isidentifier()
        return key in _MESSAGE_KEYS or (is_name and not any(overlaps(key.lower(), spelling) for spelling in spellings))

    return frozenset(filter(is_kept, keys))
