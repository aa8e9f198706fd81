"""Rendering of chats in disguise: each character of a chat's texts is replaced by one that neither chat nor template has.

"hi" may become U+20001 U+20002. Then all other characters of the rendered text come from the template.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.templates.chat_spans import RenderedChat
from grain_sft.prepare.templates.chat_template import unused_characters
from grain_sft.prepare.templates.template import SpecialText

DISGUISED = re.compile("[\U00020001-\U0002a6df\U00100000-\U0010fffd]+")
"""Pattern of the replaced texts in a chat that `Disguise.render` returns."""

_LETTERS = range(0x20001, 0x2A6D0)  # Chinese letters, in place of letters and digits
_OTHERS = range(0x100000, 0x10FFFE)  # private characters, in place of punctuation marks and all others
_ESCAPED = frozenset('"\\\x7f') | {chr(code) for code in range(32)}  # characters that JSON escapes


class Disguise:
    """The characters that replace those of one chat's texts.

    These stay: spaces, characters that JSON escapes, roles, the key `content`, and the other keys that the template reads.
    Of the latter, one that can overlap a control token, such as "end" with "<|im_end|>", is replaced.

    Args:
      chat: Rendered chat.
      special: Spellings of the tokenizer's special tokens.
    """

    def __init__(self, chat: RenderedChat, special: SpecialText) -> None:
        self._chat, self._special = chat, special
        keys, self._compared = chat.template.literals
        self._kept_keys = _kept_keys(keys, special)
        values = [chat.messages, chat.tools]
        used = {char for _, text in strings(values) for char in text if not char.isspace() and char not in _ESCAPED}
        letters = {char for char in used if char.isalnum()}
        replacements: dict[str, str] = {}
        for characters, codes in ((letters, _LETTERS), (used - letters, _OTHERS)):
            others = unused_characters(len(characters), values, chat.template.source, chat.text, codes=codes)
            replacements |= zip(sorted(characters), others, strict=True)
        self._replace = str.maketrans(replacements)
        self._restore = str.maketrans({after: before for before, after in replacements.items()})

    def render(self, *, keep_compared: bool = False) -> str | None:
        """Return the text of the disguised chat; None if the template refuses the chat.

        Args:
          keep_compared: Whether words that the template looks for are not replaced. A template with
            `{% if '</think>' in message.content %}` looks for "</think>".
        """
        replaced = self._replaced_except_compared if keep_compared else self._replaced
        messages = []
        for message in self._chat.messages:
            others = {key: value for key, value in message.items() if key != "role"}
            messages.append({"role": message["role"], **self._disguised(others, replaced)})
        return self._chat.template.attempt(messages, self._disguised(self._chat.tools, replaced))

    def restores_chat(self, rendered: str) -> bool:
        """Return whether `rendered`, without its disguise, is the text of the chat. If not, the template changes texts."""
        return rendered.translate(self._restore) == self._chat.text

    def _disguised(self, value: Any, replaced: Callable[[str], str]) -> Any:
        """Return a JSON value with its texts and keys replaced by the function `replaced`."""
        if isinstance(value, str):
            return replaced(value)
        if isinstance(value, dict):
            return {
                key if key in self._kept_keys else replaced(key): self._disguised(item, replaced)
                for key, item in value.items()
            }
        return [self._disguised(item, replaced) for item in value] if isinstance(value, list | tuple) else value

    def _replaced(self, text: str) -> str:
        return text.translate(self._replace)

    def _replaced_except_compared(self, text: str) -> str:
        """Replace a text, except the words that the template looks for.

        If such a word overlaps the spelling of a control token in the text, the word is replaced, too.
        """
        spelled = [match.span() for match in self._special.pattern.finditer(text)]
        characters = list(self._replaced(text))
        for match in self._compared.finditer(text):
            if not any(start < match.end() and match.start() < stop for start, stop in spelled):
                characters[match.start() : match.end()] = match.group()
        return "".join(characters)


@functools.lru_cache(maxsize=16)
def _kept_keys(keys: frozenset[str], special: SpecialText) -> frozenset[str]:
    """Return the keys that are not replaced: `content`, and names that can't overlap a control token."""
    spellings = [spelling.lower() for spelling in special.spellings]

    def overlaps(key: str, spelling: str) -> bool:
        """Return whether `key` and `spelling` can overlap in a text: "end" is inside "<|im_end|>", so they can."""
        # the key's end may begin the spelling, and the key's beginning may end it
        at_an_end = any(spelling.startswith(key[at:]) or spelling.endswith(key[: at + 1]) for at in range(len(key)))
        return at_an_end or key in spelling or spelling in key

    def is_kept(key: str) -> bool:
        is_name = key.isascii() and key.isidentifier()
        return key == "content" or (is_name and not any(overlaps(key.lower(), spelling) for spelling in spellings))

    return frozenset(filter(is_kept, keys))
