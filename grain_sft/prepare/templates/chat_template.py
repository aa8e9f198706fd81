"""ChatTemplate: a Jinja chat template as transformers renders it, and what ends a turn in it."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which templates look for what the assistant thought."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_ENDS = ("<|eom_id|>",)  # of a turn that calls a tool, in Llama 3


class ChatTemplate:
    """A chat template with a tokenizer's special tokens.

    It is compiled by transformers, so in a sandbox and with the same functions, except for today's date: a template that
    can do without it takes its own fallback, and one that can't is an error.

    Attributes:
      prompts: it can ask the assistant for its turn.
      marks_turns: it says itself what the assistant generates.
      around_roles: what `chat_spans` remembers of it.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, text: str) -> None:
        """Compiles the template.

        Raises:
          PrepareError: it is no Jinja template.
        """
        self.around_roles: dict[tuple[str, ...], list[str] | None] = {}
        self._jinja: Any = importlib.import_module("jinja2")
        self._utils: Any = importlib.import_module("transformers.utils.chat_template_utils")
        compiler = getattr(self._utils, "_compile_jinja_template", None)  # of a tokenizer, before transformers 4.45
        compile_text = compiler or tokenizer.transformers_tokenizer._compile_jinja_template
        try:
            self._compiled = compile_text(text)
        except self._jinja.TemplateError as error:
            raise PrepareError(
                f"the chat template is no valid Jinja template: {error} (line {error.lineno})."
            ) from error
        names = tokenizer.transformers_tokenizer.special_tokens_map
        self._variables = {
            **{name: str(value) if isinstance(value, str) else value for name, value in names.items()},
            "documents": None,
            "strftime_now": self._jinja.Undefined(name="strftime_now"),
        }
        self.prompts = "add_generation_prompt" in text
        self.marks_turns = _GENERATION.search(text) is not None
        eos = self._variables.get("eos_token")
        specials = {*tokenizer.special_tokens, *([eos] if isinstance(eos, str) else [])}
        longest_first = sorted(specials, key=lambda special: (-len(special), special))
        self._special_next = re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._eos = eos

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
            with self._compiled.environment.activate_tracker(blocks, spans):
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
        user, other, assistant = "\ue000u\ue001", "\ue000v\ue001", "\ue000a\ue001"
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

    def plain_data(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as this version of transformers hands them to templates: reasoning under every name that it has."""
        alias = getattr(self._utils, "_alias_reasoning_fields", None)
        if alias is None or not any(key in message for message in messages for key in REASONING):
            return messages
        aliased: list[dict[str, Any]] = alias(messages)
        return aliased
