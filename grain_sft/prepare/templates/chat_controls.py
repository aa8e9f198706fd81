"""Control tokens that a chat template writes itself, distinguished from those that the chat's texts spell.

A template writes `<|im_start|>user`, the content and `<|im_end|>`. A content that spells `<|im_end|>` must not end the turn. So
control tokens are searched for in the template's own texts only. If `RenderedChat.contents` is set, the template's own texts
are those around the contents. Otherwise, the chat is rendered again with other characters in its texts (`Disguise`), and what
is not replaced is the template's own.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grain_sft.errors import RecordError
from grain_sft.prepare.templates.chat_spans import KEPT, RenderedChat, around_contents
from grain_sft.prepare.templates.disguise import DISGUISED, Disguise
from grain_sft.prepare.templates.template import SpecialText


class Control(NamedTuple):
    """A control token in a text: its id, its first character and the one after its last."""

    id: int
    start: int
    stop: int


Find = Callable[[str], list[Control]]
"""Function that returns the control tokens of a text."""

_STAND_IN = "\U00020000"  # a letter that replaces a whole text


class Expected(NamedTuple):
    """Control tokens that the template writes.

    Attributes:
      controls: Control tokens in the order of the chat.
      placed: Whether `start` and `stop` are right, not only `id`. They may be wrong if the template changes the chat's texts.
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
        return Expected(_controls_in(literals, starts, find), placed=True)
    disguise = Disguise(chat, special)
    rendered = disguise.render()
    if rendered is None:
        raise RecordError("messages: the chat template refuses them with other texts, so its own text is unknown.")
    expected = Expected(_controls_of_disguised(rendered, find), placed=disguise.restores_chat(rendered))
    if expected.placed:
        return expected
    # A template that looks for "</think>" does not find it in disguised texts, and may render a turn without its thoughts. So
    # the chat is rendered once more, with such words unchanged. If the control tokens have the same ids as before, their places
    # are right.
    rendered = disguise.render(keep_compared=True)
    if rendered is None or not disguise.restores_chat(rendered):
        return expected
    placed = Expected(_controls_of_disguised(rendered, find), placed=True)
    return placed if placed.ids == expected.ids else expected


def _controls_of_disguised(rendered: str, find: Find) -> list[Control]:
    """Return the control tokens that the template writes in a disguised chat."""
    starts = [0, *(match.end() for match in DISGUISED.finditer(rendered))]
    return _controls_in(DISGUISED.split(rendered), starts, find)


def _controls_in(literals: Sequence[str], starts: Sequence[int], find: Find) -> list[Control]:
    """Return the control tokens of the template's texts `literals`, which start at `starts` in the chat.

    `find` searches one text: the literals, joined by a letter in place of each text of the chat.
    """
    starts_in_joined = [0, *itertools.accumulate(len(literal) + len(_STAND_IN) for literal in literals)]
    controls = []
    for number, start, stop in _find_once(find, _STAND_IN.join(literals)):
        literal = bisect.bisect_right(starts_in_joined, start) - 1
        shift = starts[literal] - starts_in_joined[literal]  # from the joined literals to the chat
        controls.append(Control(number, start + shift, stop + shift))
    return controls


@functools.lru_cache(maxsize=KEPT)
def _find_once(find: Find, text: str) -> list[Control]:
    """Return `find(text)`, cached: chats with the same roles have the same text of the template."""
    return find(text)
