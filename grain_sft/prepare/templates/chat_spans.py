"""Where in a rendered chat the assistant speaks.

Contents are never searched for: a user may quote the assistant. Instead a chat is rendered with markers for contents,
which shows the text around every turn; that text must be what stands around the turn in the chat itself. Most chats
are nothing but their contents between the texts that chats of their roles have, so these are kept.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.templates.chat_template import REASONING, ChatTemplate, Messages, Spans

_MARKER = re.compile("\ue000([0-9]+)\ue001")
_THINK, _THINK_END = "<think>", "</think>"
_KEPT = 1000  # sequences of roles


def find_turns(
    chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turns: Sequence[int]
) -> tuple[str, Spans]:
    """The text of a chat, and the (start, stop) of what the assistant says in each of `turns`, with its end of turn.

    Args:
      turns: places of the assistant's messages in `messages`, in order.

    Raises:
      RecordError: the template can't render them, or what it makes of a turn can't be determined.
    """
    text = chat.render(messages, tools)
    spans = _by_roles(chat, messages, tools, turns, text)
    if spans is None:
        spans = _by_turns(chat, messages, tools, turns, text)
    if spans is None:
        spans = [span for turn in turns if (span := _one(chat, messages, tools, turn, text)) is not None]
    return text, [(start, chat.end_of_turn(text, stop)) for start, stop in spans]


def _by_roles(
    chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turns: Sequence[int], text: str
) -> Spans | None:
    """Spans by the text around contents in any chat of these roles, rendered once for all of them; None where this chat
    is more than its contents, or is rendered otherwise."""
    if tools or any(message.keys() - {"role", "content"} for message in messages):
        return None
    roles = tuple(message["role"] for message in messages)
    if roles not in chat.around_roles:
        if len(chat.around_roles) >= _KEPT:
            chat.around_roles.clear()
        marked = [{"role": role, "content": _mark(place)} for place, role in enumerate(roles)]
        chat.around_roles[roles] = _split(chat, marked, None, range(len(roles)))
    around = chat.around_roles[roles]
    return None if around is None else _filled(around, messages, range(len(messages)), turns, text)


def _by_turns(
    chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turns: Sequence[int], text: str
) -> Spans | None:
    """Spans by one more rendering of this chat; None where turns are more than their contents, or are changed."""
    if any(messages[turn].keys() - {"role", "content"} for turn in turns):
        return None
    marked = list(messages)
    for turn in turns:
        marked[turn] = {**messages[turn], "content": _mark(turn)}
    around = _split(chat, marked, tools, turns)
    return None if around is None else _filled(around, messages, turns, turns, text)


def _mark(place: int) -> str:
    return f"\ue000{place}\ue001"


def _split(
    chat: ChatTemplate, marked: Messages, tools: Sequence[Any] | None, places: Sequence[int]
) -> list[str] | None:
    """The texts around the marked contents; None if not each of them is there once, in order."""
    try:
        parts = _MARKER.split(chat.render(marked, tools))
    except RecordError:
        return None
    return parts[::2] if parts[1::2] == [str(place) for place in places] else None


def _filled(
    around: list[str], messages: Messages, places: Sequence[int], turns: Sequence[int], text: str
) -> Spans | None:
    """Spans of `turns` if `text` is `around` with the contents at `places` between, trimmed as templates do."""
    contents = [messages[place]["content"] for place in places]
    for change in (str, str.strip, str.lstrip, str.rstrip):
        pieces = list(itertools.chain(*zip(around, map(change, contents), strict=False), around[-1:]))
        if "".join(pieces) == text:
            ends = list(itertools.accumulate(map(len, pieces)))
            wanted = set(turns)
            return [(ends[2 * i], ends[2 * i + 1]) for i, place in enumerate(places) if place in wanted]
    return None


def _one(
    chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turn: int, text: str
) -> tuple[int, int] | None:
    """Span of one turn by the text around it; None for a turn that the template leaves out.

    Raises:
      RecordError: it can't be determined.
    """
    before, after = list(messages[:turn]), list(messages[turn + 1 :])
    starts: list[int] = []
    stops: list[int] = []
    for replacement in _replacements(messages[turn]):
        rendered = _try(chat, [*before, replacement, *after], tools)
        if rendered is None or (around := _around(rendered)) is None:
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
        f"messages[{turn}]: what the chat template makes of this message can't be told from the text around it, so there "
        "is no saying which tokens take loss. Mark the turns in the template with {% generation %}."
    )


def _replacements(message: Any) -> list[dict[str, Any]]:
    """Messages whose content shows where it stands: a plain one, and one that thinks, if this one does."""
    plain = {"role": message["role"], "content": "\ue0000\ue001"}
    content = message.get("content")
    if isinstance(content, str) and _THINK_END in content:
        thought = f"{_THINK}\n\ue0001\ue001\n{_THINK_END}\n\n\ue0000\ue001"
        return [plain, {**plain, "content": thought}]
    reasoning = [key for key in REASONING if message.get(key)]
    if reasoning:
        return [plain, {**plain, **dict.fromkeys(reasoning, "\ue0001\ue001")}]
    return [plain]


def _around(rendered: str) -> tuple[str, str] | None:
    """What stands before and after the marked content, whose thoughts are part of it."""
    found = {match.group(1): match for match in _MARKER.finditer(rendered)}
    count = sum(1 for _ in _MARKER.finditer(rendered))
    if "0" not in found or count != len(found):
        return None
    start = found["0"].start()
    if "1" in found:
        start = max(0, rendered.rfind(_THINK, 0, found["1"].start()))
    return rendered[:start], rendered[found["0"].end() :]


def _try(chat: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool = False) -> str | None:
    try:
        return chat.render(messages, tools, prompt=prompt)
    except RecordError:
        return None
