"""Functions that find the contents of messages, and the turns of the assistant, in the text of a rendered chat.

The chat is rendered again with markers in place of the contents. The text around the markers comes from the template. A search
for the contents themselves could find the wrong place, because a user may quote the assistant.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.records.conversation import CALLS, REASONING
from grain_sft.prepare.templates.chat_template import ChatTemplate, Marks, Messages, Spans, Tools

_THINK, _THINK_END = "<think>", "</think>"
_THINK_BEFORE = re.compile(rf"{_THINK}\s*\Z")
CACHED_RESULTS = 1000  # size of caches of results that depend on a chat's roles; chats have few different sequences of roles


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """A chat template, its input, and the text that it renders."""

    template: ChatTemplate
    messages: Messages
    tools: Tools
    text: str

    @functools.cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(message["role"] for message in self.messages)

    @functools.cached_property
    def contents(self) -> Spans | None:
        """Span of each message's content.

        None if the chat has tools, a message has keys other than `role` and `content`, or the template leaves out or changes a
        content. A template may trim whitespace at the ends of the contents.
        """
        if self.tools or any(message.keys() - {"role", "content"} for message in self.messages):
            return None
        around = around_contents(self.template, self.roles)
        contents = [message["content"] for message in self.messages]
        return None if around is None else _spans_between(around, contents, self.text)


@functools.lru_cache(maxsize=CACHED_RESULTS)
def around_contents(template: ChatTemplate, roles: tuple[str, ...]) -> list[str] | None:
    """Return the texts before, between and after the contents of messages with these roles and no other keys.

    Return None unless the template writes each content once, in order.
    """
    return _around_turns(template, [{"role": role, "content": ""} for role in roles], None, range(len(roles)))


def find_turns(chat: RenderedChat, turns: Sequence[int]) -> Spans:
    """Return the spans of what the assistant wrote in some messages, without the token that ends a turn.

    `turns` has the indices of these messages. A message that the template leaves out has no span.

    Raises:
      RecordError: The span of a turn can't be determined.
    """
    if chat.contents is not None:
        return [chat.contents[turn] for turn in turns]
    # As many turns as possible are found together, and the others one by one: some templates treat the last turn differently.
    spans = _spans_together(chat, turns)
    if spans is None:
        spans = _spans_together(chat, turns[:-1]) or []
    marks = Marks(chat.messages, chat.tools, chat.template.source)
    others = turns[len(spans) :]
    return spans + [span for turn in others if (span := _by_surroundings(chat, turn, marks)) is not None]


def _around_turns(
    template: ChatTemplate, messages: Messages, tools: Tools, turns: Sequence[int], *, whole: bool = False
) -> list[str] | None:
    """Return the texts before, between and after marks in place of the contents of `turns`. See `around_contents`.

    With `whole`, the marks replace also the other keys of `turns`, such as calls.
    """
    marks = Marks(messages, tools, template.source)
    marked = list(messages)
    for turn in turns:
        kept = {"role": messages[turn]["role"]} if whole else messages[turn]
        marked[turn] = {**kept, "content": marks.mark(turn)}
    parts = marks.pattern.split(template.attempt(marked, tools) or "")  # texts at even indices, numbers of marks at odd ones
    return parts[::2] if parts[1::2] == [str(turn) for turn in turns] else None


def _spans_between(around: list[str], contents: Sequence[str], text: str) -> Spans | None:
    """Return the spans of `contents` in `text`: [(3, 5)] for ["Hi"] in "<u>Hi</u>" and `around` ["<u>", "</u>"].

    The template may have trimmed the contents. Return None if `around` and the contents don't make up `text`.
    """
    for trim in (str, str.strip, str.lstrip, str.rstrip):  # `str` trims nothing
        pieces = [*itertools.chain(*zip(around, map(trim, contents), strict=False)), around[-1]]
        if "".join(pieces) == text:
            ends = list(itertools.accumulate(map(len, pieces)))  # pieces 1, 3, … are the contents
            return list(zip(ends[:-1:2], ends[1::2], strict=True))
    return None


def _spans_together(chat: RenderedChat, turns: Sequence[int]) -> Spans | None:
    """Return the same spans as `_by_surroundings`; None if only that function can find them, one turn at a time.

    The chat is rendered at most six times, whatever the number of turns. A chat with 200 calls takes 0.2 s; one turn at a
    time, it takes 6 s.
    """
    spans = _spans_of(chat, turns, whole=True)
    if spans is None:
        return None
    # Gemma 4's template writes the result of a call into the turn that calls. The result, which is the next message, must
    # not take loss. `stops` maps the index of each result to the end of the turn that calls.
    stops = {turn + 1: stop for turn, (_, stop) in zip(turns, spans, strict=True) if any(map(chat.messages[turn].get, CALLS))}
    results = [result for result in stops if result < len(chat.messages)]
    places = _spans_of(chat, results, whole=False) if results else []
    if places is None or any(start < stops[result] for result, (start, _) in zip(results, places, strict=True)):
        return None
    return spans


def _spans_of(chat: RenderedChat, turns: Sequence[int], *, whole: bool) -> Spans | None:
    """Return the spans of what the template writes for the contents of `turns`; None if they can't be determined.

    The chat is rendered with marks in place of all contents, of every second one, and of the others. The first rendering gives
    the gaps between the contents. The other two give the contents as the template writes them, between gaps.

    With `whole`, a span also has what the template writes for the other keys of a turn, such as calls.
    """
    around = functools.partial(_around_turns, chat.template, chat.messages, chat.tools, whole=whole)
    gaps, even, odd = around(turns), around(turns[::2]), around(turns[1::2])
    if gaps is None or even is None or odd is None:
        return None
    # `turns[1]` is not marked in `even`. There, the text between the marks of `turns[0]` and `turns[2]` is a gap, the turn, and
    # a gap.
    parts = [(odd if number % 2 else even)[number // 2] for number in range(1, len(turns) + 1)]
    two_gaps = itertools.pairwise(gaps)
    texts = [part[len(gap) : len(part) - len(next_gap)] for part, (gap, next_gap) in zip(parts, two_gaps, strict=True)]
    return _spans_between(gaps, texts, chat.text)


def _by_surroundings(chat: RenderedChat, turn: int, marks: Marks) -> tuple[int, int] | None:
    """Return the span of one turn; None if the template leaves the turn out.

    First, the chat is rendered with a mark in place of the content. The span is between the texts before and after the mark. If
    the chat does not begin or end with these texts, a shorter chat is rendered. For the start, it consists of the messages
    before the turn, and of a prompt such as "<|im_start|>assistant". For the stop, it ends with the turn. The span does not
    include the token that ends the turn.
    """
    template, tools, text, message = chat.template, chat.tools, chat.text, chat.messages[turn]
    before, after = list(chat.messages[:turn]), list(chat.messages[turn + 1 :])
    start = stop = None
    for replacement in _replacements(message, marks):
        prefix, suffix = _text_around(template.attempt([*before, replacement, *after], tools), marks)
        if start is None and prefix is not None and text.startswith(prefix):
            start = len(prefix)
        if stop is None and suffix is not None and text.endswith(suffix):
            stop = len(text) - len(suffix)
    if start is None and "add_generation_prompt" in template.source:
        prompt = template.attempt(before, tools, prompt=True)
        if prompt and text.startswith(prompt):
            start = len(prompt)
    if start is not None and stop is None:
        up_to_turn = template.attempt([*before, message], tools)
        if up_to_turn is not None and text.startswith(up_to_turn):
            stop = template.trim_end(text, start, len(up_to_turn))
    if stop is not None and after and any(map(message.get, CALLS)):
        # Gemma 4's template writes the result of a call into the turn that calls. The result must not take loss.
        marked = [*before, message, {**after[0], "content": marks.mark(0)}, *after[1:]]
        result = marks.pattern.search(template.attempt(marked, tools) or "")
        stop = stop if result is None or result.start() >= stop else None
    if start is not None and stop is not None and start <= stop:
        return start, stop
    # if the text is the same without this message, the template wrote nothing for it
    if not message.get("content") and template.attempt([*before, *after], tools) == text:
        return None
    problem = f"messages[{turn}]: its start or end can't be found in the rendered chat, so its tokens are unknown"
    raise RecordError(f"{problem}. Mark the turns in the template with {{% generation %}}.")


def _replacements(message: Any, marks: Marks) -> list[dict[str, Any]]:
    """Return one or two messages to render in place of `message`. They have mark 0 as content.

    If `message` has thoughts, the second one has mark 1 in their place. In place of the first one, which has no thoughts, a
    template may write "<think></think>".
    """
    plain = {"role": message["role"], "content": marks.mark(0)}
    if _THINK_END in (message.get("content") or ""):
        thought = f"{_THINK}\n{marks.mark(1)}\n{_THINK_END}\n\n{marks.mark(0)}"
        return [plain, {**plain, "content": thought}]
    if reasoning := [key for key in REASONING if message.get(key)]:
        return [plain, plain | dict.fromkeys(reasoning, marks.mark(1))]
    return [plain]


def _text_around(rendered: str | None, marks: Marks) -> tuple[str, str] | tuple[None, None]:
    """Return the text before the marked thoughts (before the content if there are none), and the text after the content.

    Return (None, None) if mark 0, that of the content, is missing, or if a mark occurs twice.
    """
    matches = list(marks.pattern.finditer(rendered or ""))
    by_mark = {match[1]: match for match in matches}
    if rendered is None or "0" not in by_mark or len(by_mark) != len(matches):
        return None, None
    content = by_mark["0"]
    first = content
    if thought := by_mark.get("1"):
        # the <think> before the thoughts belongs to the assistant's text, too
        first = _THINK_BEFORE.search(rendered[: thought.start()]) or thought
    return rendered[: first.start()], rendered[content.end() :]
