"""hf, olmo: chats as a Jinja chat template renders them, the tokenizer's own or another.

With a tokenizer of Hugging Face, token ids are those of `tokenizer.apply_chat_template`. What the assistant says takes
loss, and so does the control token, or the markup, that ends its turn; what the template writes around that doesn't. In a
template with {% generation %}, the marked text takes loss.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.conversation import Conversation, Message
from grain_sft.prepare.special_text import SpecialText, special_text_of
from grain_sft.prepare.strict_json import shown, strings
from grain_sft.prepare.templates.chat_ids import Encoder, UnexpectedControlError, encoder_of
from grain_sft.prepare.templates.chat_source import Expected, expected_controls
from grain_sft.prepare.templates.chat_spans import content_spans, find_turns
from grain_sft.prepare.templates.chat_template import ChatTemplate, Spans, with_reasoning
from grain_sft.prepare.templates.olmo_template import OLMO_TEMPLATE, OLMO_TOKENS
from grain_sft.prepare.templates.template import (
    Rendered,
    Result,
    Template,
    TemplateOptions,
    check_conversation,
    no_assistant,
    takes_loss,
)
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

_ASSISTANT = ("assistant", "assistant_toolcall")
_ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment"),
    *("assistant_toolcall", "toolresult"),
)


def _render(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions, *, name: str
) -> list[Result]:
    chat = _chat_template(tokenizer, options.chat_template, name)
    encoder = encoder_of(tokenizer)
    special = special_text_of(tuple(tokenizer.special_tokens))
    results: list[Result] = []
    for conversation in conversations:
        try:
            check_conversation(conversation, name, _ROLES, special if options.special_text == "error" else None)
            results.append(_render_one(conversation, chat, encoder, special, plain=options.special_text == "encode"))
        except RecordError as error:
            results.append(error)
    return results


def _render_one(
    conversation: Conversation, chat: ChatTemplate, encoder: Encoder, special: SpecialText, *, plain: bool
) -> Rendered:
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
    expected = expected_controls(chat, messages, tools, text, contents, encoder.find, special)
    if spans is None:
        spans = [
            (start, _end_of_turn(chat, text, stop, expected, special))
            for start, stop in find_turns(chat, messages, tools, turns, text, contents)
        ]
    try:
        return encoder.encode(text, spans, expected, plain=plain)
    except UnexpectedControlError as error:
        raise _refusal(error, conversation, plain) from error


def _end_of_turn(chat: ChatTemplate, text: str, stop: int, expected: Expected, special: SpecialText) -> int:
    """Where a turn ends whose content ends at `stop`. A text that spells a control token does not end it."""
    end = chat.end_of_turn(text, stop)
    token = text[stop:end].lstrip()
    if token in special.spellings and expected.spans is not None and (end - len(token), end) not in expected.spans:
        return stop
    return end


def _refusal(error: UnexpectedControlError, conversation: Conversation, plain: bool) -> RecordError:
    """The error with the place of the text in the record."""
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
            f"{begins[0]}: with the text that the chat template writes beside it, {shown(error.text)} {error}. "
            f"Remove it{way}."
        )
    return RecordError(f"messages: a text {error}. Remove the spelling of special tokens{way}.")


def _as_dict(message: Message) -> dict[str, Any]:
    """A message as templates expect it: keys without a value left out, tool records in the terms of chat templates."""
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
    """The template's own spans of these turns, where some turn takes no loss."""
    assistants = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if len(assistants) != len(spans):
        raise RecordError(
            f"messages: the chat template marks {len(spans)} spans in {len(assistants)} turns of the assistant, so there "
            "is no saying which of them have weight 0."
        )
    return [span for place, span in zip(assistants, spans, strict=True) if place in turns]


def _chat_template(tokenizer: Tokenizer, chosen: str | None, name: str) -> ChatTemplate:
    text = tokenizer.chat_template if chosen is None else chosen
    if text is None and name == "olmo":
        missing = [token for token in OLMO_TOKENS if tokenizer.token_id(token) is None]
        if missing or tokenizer.eos_token_id is None:
            raise PrepareError(
                f"template olmo: the tokenizer has no chat template of its own, and OLMo's needs "
                f"{', '.join([*missing, *(['an EOS token'] if tokenizer.eos_token_id is None else [])])}, which it lacks. "
                "Give a template with --chat-template, or choose another tokenizer."
            )
        text = OLMO_TEMPLATE
    if text is None:
        raise PrepareError(
            f"template {name}: the tokenizer has no chat template. Give one with --chat-template, or choose another template."
        )
    return _compiled(tokenizer, text)


@functools.lru_cache(maxsize=8)
def _compiled(tokenizer: Tokenizer, text: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, text)


OLMO = Template(
    name="olmo",
    render=functools.partial(_render, name="olmo"),
    schemas=("chat", "messages", "prompt_completion", "tools"),
    roles=_ROLES,
    truncation="first",
    options=("chat_template",),
)
HF = dataclasses.replace(OLMO, name="hf", render=functools.partial(_render, name="hf"))
