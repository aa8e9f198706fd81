"""The spans of the assistant's turns in a rendered chat.

Contents are never searched for: a user may quote the assistant. Instead a chat is rendered with markers for contents,
which shows the text around every turn. The same text must be around the turn in the chat itself. Most chats are their
contents between texts that all chats of their roles share, so these texts are cached. Markers are made of characters that
occur neither in the chat nor in its template.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.templates.chat_template import REASONING, ChatTemplate, Marks, Messages, Spans

_THINK, _THINK_END = "<think>", "</think>"
_THINK_BEFORE = re.compile(rf"{_THINK}\s*\Z")
KEPT = 1000  # sequences of roles


def around_contents(chat: ChatTemplate, roles: tuple[str, ...]) -> list[str] | None:
    """Return the texts around contents in any chat of these roles; None if some content is not rendered once, in order."""
    if roles not in chat.around_roles:
        if len(chat.around_roles) >= KEPT:
            chat.around_roles.clear()
        marks = Marks(chat.source)
        marked = [{"role": role, "content": marks.mark(place)} for place, role in enumerate(roles)]
        chat.around_roles[roles] = _split(chat, marked, None, range(len(roles)), marks)
    return chat.around_roles[roles]


def content_spans(chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, text: str) -> Spans | None:
    """Return the span of every message's content, if the rest of the text is the same in any chat of these roles."""
    if tools or any(message.keys() - {"role", "content"} for message in messages):
        return None
    around = around_contents(chat, tuple(message["role"] for message in messages))
    places = range(len(messages))
    return None if around is None else _filled(around, messages, places, places, text)


def find_turns(
    chat: ChatTemplate,
    messages: Messages,
    tools: Sequence[Any] | None,
    turns: Sequence[int],
    text: str,
    contents: Spans | None,
) -> Spans:
    """Return start and stop of the assistant's text in each of `turns`, without its end of turn.

    Args:
      chat: Template.
      messages: Messages of the chat.
      tools: Tools of the chat.
      turns: Indices of the assistant's messages, in order.
      text: Rendered chat.
      contents: Result of `content_spans`.

    Raises:
      RecordError: The span of a turn can't be determined.
    """
    if contents is not None:
        return [contents[turn] for turn in turns]
    marks = Marks(messages, tools, chat.source)
    spans = _by_turns(chat, messages, tools, turns, text, marks)
    if spans is None:
        spans = [span for turn in turns if (span := _one(chat, messages, tools, turn, text, marks)) is not None]
    return spans


def _by_turns(
    chat: ChatTemplate,
    messages: Messages,
    tools: Sequence[Any] | None,
    turns: Sequence[int],
    text: str,
    marks: Marks,
) -> Spans | None:
    """Return spans by one more rendering of this chat; None where turns are more than contents, or are changed."""
    if any(messages[turn].keys() - {"role", "content"} for turn in turns):
        return None
    marked = list(messages)
    for turn in turns:
        marked[turn] = {**messages[turn], "content": marks.mark(turn)}
    around = _split(chat, marked, tools, turns, marks)
    return None if around is None else _filled(around, messages, turns, turns, text)


def _split(
    chat: ChatTemplate, marked: Messages, tools: Sequence[Any] | None, places: Sequence[int], marks: Marks
) -> list[str] | None:
    """Return the texts around the marked contents; None if some content does not occur once, in order."""
    try:
        parts = marks.pattern.split(chat.render(marked, tools))
    except RecordError:
        return None
    return parts[::2] if parts[1::2] == [str(place) for place in places] else None


def _filled(
    around: list[str], messages: Messages, places: Sequence[int], turns: Sequence[int], text: str
) -> Spans | None:
    """Return spans of `turns` if `text` is `around` with the contents of `places` between, trimmed as templates do."""
    contents = [messages[place]["content"] for place in places]
    for change in (str, str.strip, str.lstrip, str.rstrip):
        pieces = list(itertools.chain(*zip(around, map(change, contents), strict=False), around[-1:]))
        if "".join(pieces) == text:
            ends = list(itertools.accumulate(map(len, pieces)))
            wanted = set(turns)
            return [(ends[2 * i], ends[2 * i + 1]) for i, place in enumerate(places) if place in wanted]
    return None


def _one(
    chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turn: int, text: str, marks: Marks
) -> tuple[int, int] | None:
    """Return the span of one turn by the text around it; None for a turn that the template leaves out."""
    before, after = list(messages[:turn]), list(messages[turn + 1 :])
    starts: list[int] = []
    stops: list[int] = []
    for replacement in _replacements(messages[turn], marks):
        rendered = _try(chat, [*before, replacement, *after], tools)
        if rendered is None or (around := _around(rendered, marks)) is None:
            continue
        prefix, suffix = around
        if text.startswith(prefix):
            starts.append(len(prefix))
        if text.endswith(suffix):
            stops.append(len(text) - len(suffix))
    upto = _try(chat, [*before, messages[turn]], tools)
    if not starts and chat.prompts and (prompt := _try(chat, before, tools, prompt=True)) and text.startswith(prompt):
        starts.append(len(prompt))
    if not stops and starts and upto is not None and text.startswith(upto):
        stops.append(chat.trim_end(text, starts[0], len(upto)))
    if starts and stops and starts[0] <= stops[0]:
        return starts[0], stops[0]
    if not messages[turn].get("content") and _try(chat, [*before, *after], tools) == text:
        return None
    raise RecordError(
        f"messages[{turn}]: what the chat template makes of this message does not show in the text around it, so which "
        "tokens take loss is unknown. Mark the turns in the template with {% generation %}."
    )


def _replacements(message: Any, marks: Marks) -> list[dict[str, Any]]:
    """Return messages with marked content: a plain one, and one with thoughts, if this one has some."""
    plain = {"role": message["role"], "content": marks.mark(0)}
    content = message.get("content")
    if isinstance(content, str) and _THINK_END in content:
        thought = f"{_THINK}\n{marks.mark(1)}\n{_THINK_END}\n\n{marks.mark(0)}"
        return [plain, {**plain, "content": thought}]
    reasoning = [key for key in REASONING if message.get(key)]
    if reasoning:
        return [plain, {**plain, **dict.fromkeys(reasoning, marks.mark(1))}]
    return [plain]


def _around(rendered: str, marks: Marks) -> tuple[str, str] | None:
    """Return the text before and after the marked content with its thoughts."""
    found = {match.group(1): match for match in marks.pattern.finditer(rendered)}
    count = sum(1 for _ in marks.pattern.finditer(rendered))
    if "0" not in found or count != len(found):
        return None
    start = found["0"].start()
    if "1" in found:
        tag = _THINK_BEFORE.search(rendered[: found["1"].start()])
        start = tag.start() if tag else found["1"].start()
    return rendered[:start], rendered[found["0"].end() :]


def _try(chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool = False) -> str | None:
    try:
        return chat.render(messages, tools, prompt=prompt)
    except RecordError:
        return None
