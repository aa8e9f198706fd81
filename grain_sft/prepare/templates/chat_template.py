"""Jinja chat templates: rendering, with the same text as transformers, and the ends of turns in the text."""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grain_sft.errors import RecordError, import_extra
from grain_sft.prepare.records.conversation import REASONING
from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.templates.template import any_of
from grain_sft.prepare.tokenizers import Tokenizer

Messages = Sequence[Mapping[str, Any]]  # messages as chat templates read them
Tools = Sequence[Any] | None
Spans = list[tuple[int, int]]  # pairs (start, stop) of indices of characters in a text

# Markup that templates write around turns, as special tokens or as ordinary text.
_MARKUP = re.compile(r"<\|[^|<>\s]+\|>|</?[A-Za-z_]\w*>|\[/?[A-Z_]+\]")


class ChatTemplate:
    """A chat template with a tokenizer's special tokens.

    It runs in a sandbox, with the functions that transformers gives to templates, except today's date (`strftime_now`).

    Attributes:
      source: Text of the template.
      marks_turns: Whether the template itself marks the assistant's texts, with {% generation %}.
      read_keys: Keys that the template may read.
      compared: Pattern of the words that the template may look for, such as "</think>".

    Raises:
      PrepareError: The text is not a Jinja template.
      MissingExtraError: jinja2 is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, name: str = "hf") -> None:
        self.source = text
        self._jinja = import_extra("grain_sft.prepare.templates.jinja", "a chat template", "jinja2", "chat")
        self._compiled = self._jinja.compile_template(text, name)
        self.marks_turns: bool = self._jinja.marks_turns(text)
        self.read_keys, compared = self._jinja.literals_of(text)
        self.compared = any_of(compared)
        self._variables = {**tokenizer.template_variables, "documents": None, "strftime_now": self._jinja.NO_DATE}
        eos = self._variables.get("eos_token")
        self._eos = {eos} if isinstance(eos, str) else set()  # spelling of EOS
        # whitespace and a special token, whose spelling is group 1
        self._special_next = any_of({*tokenizer.special_tokens, *_MARKUP.findall(text), *self._eos}, r"\s*({})")

    def attempt(self, messages: Messages, tools: Tools = None, *, prompt: bool = False) -> str | None:
        """Return the result of `render`; None if the template refuses. `prompt` adds the beginning of the assistant's turn."""
        try:
            return self.render(messages, tools, add_generation_prompt=prompt)
        except RecordError:
            return None

    def render(self, messages: Messages, tools: Tools = None, **variables: Any) -> str:
        """Return the text of a conversation, rendered with further `variables`.

        Raises:
          RecordError: The template refuses the conversation, or fails on it.
        """
        tools = list(tools) if tools else None
        variables = {"add_generation_prompt": False, **self._variables, **variables}
        try:
            return str(self._compiled.render(messages=messages, tools=tools, **variables))
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            if "strftime_now" in reason:
                reason = "it asks for today's date, so tomorrow's corpus would differ; give one with a fixed date"
            raise RecordError(f"messages: the chat template can't render them: {reason}.") from error

    def marked_spans(self, messages: Messages, tools: Tools, text: str) -> Spans:
        """Return the spans that the template itself marks with {% generation %} in the `text` of a conversation.

        Raises:
          RecordError: The template changes a text that it has marked.
        """
        # render the conversation again, with an unused character before and after each marked text
        opening, closing = unused_characters(2, messages, tools, self.source, text)
        marked = self.render(messages, tools, **{self._jinja.MARKS: (opening, closing)})
        parts = re.split(f"{opening}([^{opening}{closing}]*){closing}", marked)
        if "".join(parts) != text:
            problem = "messages: the chat template changes a text that it has marked with {% generation %}"
            raise RecordError(f"{problem}, so the place of that text is unknown. Mark the text where it is written.")
        # the parts alternate: unmarked, marked, ..., unmarked
        stops = list(itertools.accumulate(map(len, parts)))
        return list(zip(stops[:-1:2], stops[1::2], strict=True))

    def end_of_turn(self, text: str, stop: int) -> int:
        """Return the end of a turn whose content ends at `stop`: after the token that ends the turn, or else `stop`."""
        token = self._special_next.match(text, stop)
        return token.end() if token and token.group(1) in self._ends else stop

    def end_with_eos(self, text: str, end: int) -> int:
        """Return the end of an EOS that follows the turn's last token, as in Cohere's template; else `end`.

        A second EOS does not count. An EOS that is also BOS does not count either, because it may begin the next turn.
        """
        # without such an EOS, `eos` is "", and every text ends with it at `end`, so `is_next` is False
        eos = next(iter(self._eos - {self._variables.get("bos_token")}), "")
        is_next = text.startswith(eos, end) and not text.endswith(eos, 0, end)
        return end + len(eos) if is_next else end

    def leaves_turns_open(self) -> bool:
        """Return whether the template writes nothing after the last turn, as GLM's does.

        Return False if `marks_turns`: then the template itself states what takes loss.
        """
        user, assistant = unused_characters(2, self.source)
        turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return not self.marks_turns and (self.attempt(turns) or "").rstrip().endswith(assistant)

    def trim_end(self, text: str, start: int, stop: int) -> int:
        """Return where the content of the turn text[start:stop] ends: before whitespace and the token that ends the turn."""
        stop = start + len(text[start:stop].rstrip())
        return min((stop - len(end) for end in self._ends if text.endswith(end, start, stop)), default=stop)

    @functools.cached_property
    def _ends(self) -> frozenset[str]:
        """The special tokens that end a turn of the assistant.

        The token after an earlier turn may end that turn, as `<|im_end|>` does, or begin the next turn, as `[INST]` does. The
        token counts as an end if it also follows the user's turns.
        """
        user, other, assistant = unused_characters(3, self.source)
        one_turn = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        two_turns = [*one_turn, {"role": "user", "content": other}, {"role": "assistant", "content": other}]
        ends = {"<|eom_id|>", *self._eos, self._token_after(assistant, one_turn)}  # Llama 3 ends calls with <|eom_id|>
        after_earlier_turn = self._token_after(assistant, two_turns)
        if after_earlier_turn == self._token_after(user, two_turns):
            ends.add(after_earlier_turn)
        return frozenset(end for end in ends if end is not None)

    def _token_after(self, content: str, messages: Messages) -> str | None:
        """Return the special token that follows the text `content` in the rendered messages, perhaps after whitespace."""
        _, content, following = (self.attempt(messages) or "").partition(content)
        token = self._special_next.match(following) if content else None
        return token.group(1) if token else None


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its thoughts under `thinking` and `reasoning_content`. Templates read only one of the two."""
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def unused_characters(count: int, *values: Any, codes: Iterable[int] = range(0xF0000, 0x10FFFE)) -> list[str]:
    """Return `count` characters that occur in no string of `values`, by default from the private-use planes."""
    used = {character for _, text in strings(list(values)) for character in set(text)}
    usable = (chr(code) for code in codes if code & 0xFFFE != 0xFFFE)  # U+nFFFE and U+nFFFF are not characters
    unused = list(itertools.islice((character for character in usable if character not in used), count))
    if len(unused) < count:
        problem = "contain too many different characters: none is left to mark places in the text"
        raise RecordError(f"messages: {problem}. Split the record.")
    return unused


class Marks:
    """Markers that occur in no string of `values`. `mark(3)` returns marker 3. `pattern` matches a marker; group 1 is "3"."""

    def __init__(self, *values: Any) -> None:
        opening, closing = unused_characters(2, *values)
        self.mark = f"{opening}{{}}{closing}".format
        self.pattern = re.compile(f"{opening}([0-9]+){closing}")
