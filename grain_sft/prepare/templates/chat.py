"""hf, olmo: chats rendered by a Jinja chat template, the tokenizer's own or another.

With a tokenizer of Hugging Face, token ids are those of `tokenizer.apply_chat_template`. The assistant's texts take loss,
and so does the control token or markup that ends its turn; the rest of the template's own text does not. In a template
with {% generation %}, the marked text takes loss.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.messages import Conversation, Message
from grain_sft.prepare.records.strict_json import shown, strings
from grain_sft.prepare.templates.chat_ids import UnexpectedControlError, encoder_of
from grain_sft.prepare.templates.chat_source import Expected, expected_controls
from grain_sft.prepare.templates.chat_spans import content_spans, find_turns
from grain_sft.prepare.templates.chat_template import ChatTemplate, Spans, with_reasoning
from grain_sft.prepare.templates.template import (
    Rendered,
    Result,
    Template,
    TemplateOptions,
    no_assistant,
    special_text_of,
    takes_loss,
)
from grain_sft.prepare.tokenizers import Tokenizer

_ASSISTANT = ("assistant", "assistant_toolcall")


class Chat(Template):
    """A Jinja chat template: the user's, the class's `jinja`, or the tokenizer's own."""

    name = "hf"
    roles = (
        *("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment"),
        *("assistant_toolcall", "toolresult"),
    )
    options = ("chat_template",)
    jinja: ClassVar[str | None] = None

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        text = self.jinja if options.chat_template is None else options.chat_template
        text = tokenizer.chat_template if text is None else text
        self._chat = ChatTemplate(tokenizer, self.default() if text is None else text)
        self._encoder = encoder_of(tokenizer)
        self._spellings = special_text_of(tuple(tokenizer.special_tokens))

    def default(self) -> str:
        """Return the template for a tokenizer that has none."""
        raise PrepareError(
            f"template {self.name}: the tokenizer has no chat template. Give one with --chat-template, or choose another "
            "template."
        )

    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        results: list[Result] = []
        for conversation in conversations:
            try:
                self.check(conversation)
                results.append(self._render(conversation))
            except RecordError as error:
                results.append(error)
        return results

    def _render(self, conversation: Conversation) -> Rendered:
        chat = self._chat
        messages: list[dict[str, Any]] = []
        turns: list[int] = []
        assistants = 0
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        for index, message in enumerate(conversation.messages):
            assistants += message.role in _ASSISTANT
            if takes_loss(conversation, index, by=_ASSISTANT):
                turns.append(len(messages))
            messages.append(_as_dict(message))
        if not assistants:
            raise no_assistant()
        tools: Any = list(conversation.tools) if conversation.tools else None
        messages = with_reasoning(messages)
        spans: Spans | None
        if chat.marks_turns:
            text, spans = chat.render_marked(messages, tools)
            if len(turns) < assistants:
                spans = _of_turns(spans, messages, turns)
        else:
            text, spans = chat.render(messages, tools), None
        contents = content_spans(chat, messages, tools, text)
        expected = expected_controls(chat, messages, tools, text, contents, self._encoder.find, self._spellings)
        if spans is None:
            spans = [
                (start, self._end_of_turn(text, stop, expected))
                for start, stop in find_turns(chat, messages, tools, turns, text, contents)
            ]
        plain = self.special is None
        try:
            return self._encoder.encode(text, spans, expected, plain=plain)
        except UnexpectedControlError as error:
            raise _refusal(error, conversation, plain) from error

    def _end_of_turn(self, text: str, stop: int, expected: Expected) -> int:
        """Return the end of a turn whose content ends at `stop`. A text that spells a control token does not end it."""
        end = self._chat.end_of_turn(text, stop)
        token = text[stop:end].lstrip()
        spelled = token in self._spellings.spellings and expected.spans is not None
        if spelled and (end - len(token), end) not in (expected.spans or ()):
            return stop
        return end


class Olmo(Chat):
    """Chats with OLMo's template, unless the tokenizer has one of its own."""

    name = "olmo"

    def default(self) -> str:
        missing = [token for token in OLMO_TOKENS if self.tokenizer.token_id(token) is None]
        if self.tokenizer.eos_token_id is None:
            missing.append("an EOS token")
        if missing:
            raise PrepareError(
                f"template olmo: the tokenizer has no chat template of its own, and OLMo's needs {', '.join(missing)}, "
                "which it lacks. Give a template with --chat-template, or choose another tokenizer."
            )
        return OLMO_TEMPLATE


def as_template(entry: Any) -> Any:
    """Return the template of a table's entry, which may be the text of a Jinja chat template."""
    if isinstance(entry, str):
        return type("JinjaText", (Chat,), {"jinja": entry, "name": "of Jinja text", "options": ()})
    return entry


def _refusal(error: UnexpectedControlError, conversation: Conversation, plain: bool) -> RecordError:
    """Return the error with the path of the text in the record."""
    texts = [("system", conversation.system or ""), *strings(conversation.tools, "tools")]
    for index, message in enumerate(conversation.messages):
        texts.append((f"messages[{index}].content", message.content))
        texts += strings(dict(message.extra or {}), f"messages[{index}]")
    whole = [path for path, text in texts if error.text and error.text in text]
    cut = tuple(error.text[:size] for size in range(1, len(error.text)))
    begins = [path for path, text in texts if cut and text.rstrip().endswith(cut)]
    way = "" if plain else ", or have it tokenized as ordinary text with --special-text encode"
    if whole:
        return RecordError(f"{whole[0]}: {shown(error.text)} {error}. Remove it{way}.")
    if error.text and begins:
        return RecordError(
            f"{begins[0]}: with the chat template's text around it, {shown(error.text)} {error}. Remove it{way}."
        )
    return RecordError(f"messages: a text {error}. Remove the spelling of special tokens{way}.")


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a message in the terms of chat templates, without keys that have no value."""
    extra = dict(message.extra or {})
    if message.role == "assistant_toolcall":
        call = {"type": "function", "function": {"name": extra["name"], "arguments": extra["arguments"]}}
        return {"role": "assistant", "content": message.content, "tool_calls": [call]}
    content: Any = message.content
    role = message.role
    if role == "toolresult":
        role = "tool"
        if "content" in extra:
            extra["content"] = json.dumps(extra["content"], ensure_ascii=False)
    found = {"role": role, "content": content, **extra}
    return {key: value for key, value in found.items() if value is not None}


def _of_turns(spans: Spans, messages: list[dict[str, Any]], turns: list[int]) -> Spans:
    """Return the spans of these turns among those that the template marked."""
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(assistants) != len(spans):
        raise RecordError(
            f"messages: the chat template marks {len(spans)} spans in {len(assistants)} turns of the assistant, so "
            "the spans of weight 0 are unknown."
        )
    return [span for index, span in zip(assistants, spans, strict=True) if index in turns]


OLMO_TOKENS = ("<|im_start|>", "<|im_end|>")

OLMO_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is defined and message['content'] is not none -%}
        {{- message['content'] -}}
    {%- endif -%}
    {%- if message['functions'] is defined -%}
        {%- set functions = message['functions'] -%}
        {{- '<functions>' + (functions if functions is string else functions | tojson) + '</functions>' -}}
    {%- endif -%}
    {%- if message['function_calls'] is defined -%}
        {%- set calls = message['function_calls'] -%}
        {{- '<function_calls>' + (calls if calls is string else calls | tojson) + '</function_calls>' -}}
    {%- elif message['tool_calls'] is defined -%}
        {{- '<function_calls>' + message['tool_calls'] | tojson + '</function_calls>' -}}
    {%- endif -%}
    {%- if loop.last and message['role'] == 'assistant' -%}
        {{- eos_token -}}
    {%- else -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML in the form of OLMo's post-training.

It differs from plain ChatML in two things: the last turn of the assistant ends in EOS, not in `<|im_end|>`; and functions,
function calls and their results ("environment") have a place. No system text is added.
"""
