"""A Jinja chat template, rendered as transformers renders it, and what ends a turn in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.templates import jinja
from grain_sft.prepare.templates.marks import unused_characters
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which templates look for what the assistant thought."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKUP = re.compile(r"<\|[^|<>\s]+\|>|</?[A-Za-z_]\w*>|\[/?[A-Z_]+\]")
"""What templates write around turns. A tokenizer that lacks such a token has it as ordinary text."""

_OTHER_ENDS = ("<|eom_id|>",)  # of a turn that calls a tool, in Llama 3


class ChatTemplate:
    """A chat template with a tokenizer's special tokens.

    It runs in a sandbox with the functions that transformers gives to templates, except for today's date: a template that
    can do without it takes its own fallback, and one that can't is an error.

    Attributes:
      source: the template's text.
      prompts: it can ask the assistant for its turn.
      marks_turns: it says itself what the assistant generates.
      around_roles: the text around contents in any chat of these roles; kept by `chat_spans`.
      controls_of_roles: the control tokens in that text; kept by `chat_source`.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        """Compiles the template.

        Raises:
          PrepareError: it is not a Jinja template.
          MissingExtraError: jinja2 is not installed.
        """
        self.source = text
        self.around_roles: dict[tuple[str, ...], list[str] | None] = {}
        self.controls_of_roles: dict[tuple[str, ...], Any] = {}
        self._compiled = jinja.compile_template(text)
        self._variables = {
            **tokenizer.template_variables,
            "documents": None,
            "strftime_now": jinja.undefined("strftime_now"),
        }
        self.prompts = "add_generation_prompt" in text
        self.marks_turns = _GENERATION.search(text) is not None
        eos = self._variables.get("eos_token")
        specials = {*tokenizer.special_tokens, *_MARKUP.findall(text), *([eos] if isinstance(eos, str) else [])}
        longest_first = sorted(specials, key=lambda special: (-len(special), special))
        self._special_next = re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._eos = eos

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names under which the template looks for values."""
        return jinja.words_of(self.source)[0]

    @functools.cached_property
    def compared(self) -> re.Pattern[str]:
        """The words that the template compares texts with."""
        words = sorted(jinja.words_of(self.source)[1], key=lambda word: (-len(word), word))
        return re.compile("|".join(map(re.escape, words)) or "(?!)")

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, followed by what asks the assistant for its turn.

        Raises:
          RecordError: the template refuses the conversation, or fails on it.
        """
        try:
            return str(self._compiled.render(messages=messages, **self._arguments(tools, prompt)))
        except Exception as error:  # templates are programs, and raise whatever Python does
            raise self._failure(error) from error

    def render_marked(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, Spans]:
        """The text, and the spans that the template itself says the assistant generates ({% generation %}).

        Raises:
          RecordError: as of `render`.
        """
        blocks: list[str] = []
        spans: Spans = []
        try:
            with self._compiled.environment.track_generation(blocks, spans):
                for block in self._compiled.generate(messages=messages, **self._arguments(tools, False)):
                    blocks.append(block)
        except Exception as error:
            raise self._failure(error) from error
        return "".join(blocks), spans

    def end_of_turn(self, text: str, stop: int) -> int:
        """Where a turn ends whose content ends at `stop`: after the special token that ends it, if there is one."""
        found = self._special_next.match(text, stop)
        return found.end() if found and found.group(1) in self._ends else stop

    def trim_end(self, text: str, start: int, stop: int) -> int:
        """Where the content ends of a turn that was rendered to text[start:stop]."""
        stop = start + len(text[start:stop].rstrip())
        for end in self._ends:
            if text.endswith(end, start, stop):
                return stop - len(end)
        return stop

    @functools.cached_property
    def _ends(self) -> frozenset[str]:
        """The special tokens that end a turn of the assistant.

        EOS; what follows a last turn; and what follows one in the middle, if it is not the start of the next: that is,
        if it also ends the user's turns.
        """
        user, other, assistant = list(unused_characters(3, self.source))
        first = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        more = [{"role": "user", "content": other}, {"role": "assistant", "content": other}]
        ends = {*_OTHER_ENDS, *([self._eos] if isinstance(self._eos, str) else [])}
        last = self._after(first, assistant)
        if last is not None:
            ends.add(last)
        middle = self._after([*first, *more], assistant)
        if middle is not None and middle == self._after([*first, *more], user):
            ends.add(middle)
        return frozenset(ends)

    def _after(self, messages: Messages, content: str) -> str | None:
        """The special token that follows a content, whitespace aside."""
        try:
            text = self.render(messages)
        except RecordError:
            return None
        place = text.find(content)
        found = self._special_next.match(text, place + len(content)) if place >= 0 else None
        return found.group(1) if found else None

    def _arguments(self, tools: Sequence[Any] | None, prompt: bool) -> dict[str, Any]:
        return {**self._variables, "tools": list(tools) if tools else None, "add_generation_prompt": prompt}

    def _failure(self, error: Exception) -> RecordError:
        reason = str(error) or type(error).__name__
        if "strftime_now" in reason:
            reason = (
                "it asks for today's date, and the corpus would be another one tomorrow; give one without, with a date"
            )
        return RecordError(f"messages: the chat template can't render them: {reason}.")


def with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with what the assistant thought under the two names that templates read, as transformers gives them."""
    if not any(key in message for message in messages for key in REASONING):
        return messages
    found = []
    for message in messages:
        thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
        if thought is not None:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        found.append(message)
    return found
