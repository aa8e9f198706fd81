"""The spans of contents and of the assistant's turns in a rendered chat.

The chat is rendered again with markers in place of contents, and the text around the markers gives the spans. Searching for
the contents would go wrong where a user quotes the assistant.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.templates.chat_template import REASONING, ChatTemplate, Marks, Messages, Spans

_THINK, _THINK_END = "<think>", "</think>"
_THINK_BEFORE = re.compile(rf"{_THINK}\s*\Z")
KEPT = 1000  # templates with a sequence of roles, for which `around_contents` is cached


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """The input of a chat template, and the text that it renders."""

    template: ChatTemplate
    messages: Messages
    tools: Sequence[Any] | None
    text: str

    @functools.cached_property
    def roles(self) -> tuple[str, ...]:
        """Role of each message."""
        return tuple(message["role"] for message in self.messages)

    @functools.cached_property
    def contents(self) -> Spans | None:
        """Span of every message's content; None if other text than the contents depends on more than the roles."""
        if self.tools or any(message.keys() - {"role", "content"} for message in self.messages):
            return None
        return _spans_between(around_contents(self.template, self.roles), self.messages, self.text)


@functools.lru_cache(maxsize=KEPT)
def around_contents(template: ChatTemplate, roles: tuple[str, ...]) -> list[str] | None:
    """Return `_around_contents` of all messages of a chat in which they have only these roles and contents."""
    return _around_contents(template, [{"role": role, "content": ""} for role in roles], None, range(len(roles)))


def find_turns(chat: RenderedChat, turns: Sequence[int]) -> Spans:
    """Return the spans of the assistant's text in the messages `turns`, without the token that ends a turn.

    A turn that the template leaves out has no span.

    Raises:
      RecordError: The span of a turn can't be determined.
    """
    if chat.contents is not None:
        return [chat.contents[turn] for turn in turns]
    messages = [chat.messages[turn] for turn in turns]
    if not any(message.keys() - {"role", "content"} for message in messages):
        around = _around_contents(chat.template, chat.messages, chat.tools, turns)
        if (spans := _spans_between(around, messages, chat.text)) is not None:
            return spans
    marks = Marks(chat.messages, chat.tools, chat.template.source)
    return [span for turn in turns if (span := _by_surroundings(chat, turn, marks)) is not None]


def _around_contents(
    template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turns: Sequence[int]
) -> list[str] | None:
    """Return the texts before, between and after the contents of `turns`; None unless each is rendered once, in order."""
    marks, marked = Marks(messages, tools, template.source), list(messages)
    for turn in turns:
        marked[turn] = {**marked[turn], "content": marks.mark(turn)}
    parts = marks.pattern.split(template.attempt(marked, tools) or "")
    return parts[::2] if parts[1::2] == [str(turn) for turn in turns] else None


def _spans_between(around: list[str] | None, messages: Messages, text: str) -> Spans | None:
    """Return the spans of the contents if putting them, trimmed or not, between the texts `around` makes `text`; else None."""
    if around is None:
        return None
    for change in (str, str.strip, str.lstrip, str.rstrip):
        contents = [change(message["content"]) for message in messages]
        pieces = [*itertools.chain(*zip(around, contents, strict=False)), around[-1]]
        if "".join(pieces) == text:
            ends = list(itertools.accumulate(map(len, pieces)))
            return list(zip(ends[:-1:2], ends[1::2], strict=True))
    return None


def _by_surroundings(chat: RenderedChat, turn: int, marks: Marks) -> tuple[int, int] | None:
    """Return the span of one turn, from renderings with other content in it; None if the template leaves the turn out."""
    template, tools, text, message = chat.template, chat.tools, chat.text, chat.messages[turn]
    before, after = list(chat.messages[:turn]), list(chat.messages[turn + 1 :])
    starts: list[int] = []
    stops: list[int] = []
    for replacement in _replacements(message, marks):
        prefix, suffix = _text_around(template.attempt([*before, replacement, *after], tools), marks)
        if prefix is not None and text.startswith(prefix):
            starts.append(len(prefix))
        if suffix is not None and text.endswith(suffix):
            stops.append(len(text) - len(suffix))
    if not starts and "add_generation_prompt" in template.source:
        prompt = template.attempt(before, tools, prompt=True)
        starts += [len(prompt)] if prompt and text.startswith(prompt) else []
    if starts and not stops:
        upto = template.attempt([*before, message], tools)
        stops += [template.trim_end(text, starts[0], len(upto))] if upto is not None and text.startswith(upto) else []
    if starts and stops and starts[0] <= stops[0]:
        return starts[0], stops[0]
    if not message.get("content") and template.attempt([*before, *after], tools) == text:
        return None
    raise RecordError(
        f"messages[{turn}]: the chat template renders this message so that its start or end can't be found in the text, so "
        "the tokens that take loss are unknown. Mark the turns in the template with {% generation %}."
    )


def _replacements(message: Any, marks: Marks) -> list[dict[str, Any]]:
    """Return messages with marked content: a plain one and, if `message` has thoughts, one with thoughts."""
    plain = {"role": message["role"], "content": marks.mark(0)}
    if _THINK_END in (message.get("content") or ""):
        thought = f"{_THINK}\n{marks.mark(1)}\n{_THINK_END}\n\n{marks.mark(0)}"
        return [plain, {**plain, "content": thought}]
    reasoning = [key for key in REASONING if message.get(key)]
    return [plain, {**plain, **dict.fromkeys(reasoning, marks.mark(1))}] if reasoning else [plain]


def _text_around(rendered: str | None, marks: Marks) -> tuple[str, str] | tuple[None, None]:
    """Return the texts before and after the marked content and its thoughts; None for both if it is not rendered once."""
    matches = list(marks.pattern.finditer(rendered or ""))
    found = {match[1]: match for match in matches}
    if rendered is None or "0" not in found or len(found) != len(matches):
        return None, None
    start = found["0"].start()
    if thought := found.get("1"):
        start = (_THINK_BEFORE.search(rendered[: thought.start()]) or thought).start()
    return rendered[:start], rendered[found["0"].end() :]
