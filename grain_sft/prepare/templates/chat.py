"""hf, olmo: chats as a tokenizer's own chat template renders them.

Token ids are those of `tokenizer.apply_chat_template`. What the assistant says takes loss, and so does the special token
that ends its turn; what the template writes around that doesn't. A template that marks its turns with {% generation %}
is taken at its word.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.conversation import Conversation, Message
from grain_sft.prepare.special_text import SpecialText, special_text_of
from grain_sft.prepare.strict_json import strings
from grain_sft.prepare.templates.chat_spans import find_turns
from grain_sft.prepare.templates.chat_template import ChatTemplate, Spans
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
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer
from grain_sft.prepare.tokenizers.huggingface_json import renamed
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

_ASSISTANT = ("assistant", "assistant_toolcall")
_ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment"),
    *("assistant_toolcall", "toolresult"),
)


def _render(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions, *, name: str
) -> list[Result]:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise PrepareError(
            f"template {name}: needs a tokenizer of Hugging Face (tokenizer.json), this one is {tokenizer.kind}. "
            "Choose another template (primer, openchat, episode), or another tokenizer."
        )
    chat = _chat_template(tokenizer, options.chat_template, name)
    special = special_text_of(tuple(tokenizer.special_tokens))
    results: list[Result] = []
    for conversation in conversations:
        try:
            check_conversation(conversation, name, _ROLES, special if options.special_text == "error" else None)
            results.append(_render_one(conversation, tokenizer, chat, special, encode=options.special_text == "encode"))
        except RecordError as error:
            results.append(error)
    return results


def _render_one(
    conversation: Conversation,
    tokenizer: HuggingFaceTokenizer,
    chat: ChatTemplate,
    special: SpecialText,
    *,
    encode: bool,
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
    mark = _unused_character(messages, tools) if encode and _has_special((messages, tools), special) else ""
    if mark:
        messages, tools = _marked(messages, special, mark), _marked(tools, special, mark)
    messages = chat.plain_data(messages)
    if not chat.marks_turns:
        text, spans = find_turns(chat, messages, tools, turns)
    else:
        text, spans = chat.render_marked(messages, tools)
        if len(turns) < assistants:
            spans = _of_turns(spans, messages, turns)
    if mark:
        text, spans = _unmarked(text, spans, special, mark)
    encoded = (tokenizer.plain if mark else tokenizer.exact).encode(text, add_special_tokens=False)
    return Rendered(np.array(encoded.ids, np.uint32), _mask(encoded, spans))


def _mask(encoded: Any, spans: Spans) -> Any:
    """bool [tokens]: from the first token that overlaps a span to the last that does.

    Asks for the tokens at a span's two ends; all offsets at once would cost as much as half the tokenization.
    """
    loss = np.zeros(len(encoded), np.bool_)
    for start, stop in spans:
        if start == stop:
            continue
        first, last = encoded.char_to_token(start), encoded.char_to_token(stop - 1)
        if first is None or last is None:  # a character that the tokenizer's normalizer drops
            first, last = _overlapping(encoded.offsets, start, stop)
        while last + 1 < len(loss) and encoded.token_to_chars(last + 1)[0] < stop:  # more bytes of the same character
            last += 1
        loss[first : last + 1] = True
    return loss


def _overlapping(offsets: Any, start: int, stop: int) -> tuple[int, int]:
    """First and last token that overlap a span; the last is before the first where none does."""
    starts, stops = np.maximum.accumulate(np.array(offsets, np.int64).reshape(-1, 2), axis=0).T
    return int(np.searchsorted(stops, start, "right")), int(np.searchsorted(starts, stop, "left")) - 1


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


def _has_special(values: Any, special: SpecialText) -> bool:
    return any(special.find(text) for _, text in strings(values))


def _unused_character(*values: Any) -> str:
    """A character of the private use area that stands in none of the texts."""
    used = {character for _, text in strings(values) for character in set(text)}
    return next(chr(code) for code in range(0xE100, 0xF8FF) if chr(code) not in used)


def _marked(value: Any, special: SpecialText, mark: str) -> Any:
    """A value whose texts spell no special token any more: `mark` stands in each, after its first character."""
    if isinstance(value, str):
        while found := special.find(value):
            place = found[1] + 1
            value = value[:place] + mark + value[place:]
        return value
    if isinstance(value, dict):
        return {_marked(key, special, mark): _marked(entry, special, mark) for key, entry in value.items()}
    return [_marked(entry, special, mark) for entry in value] if isinstance(value, list) else value


def _unmarked(text: str, spans: Spans, special: SpecialText, mark: str) -> tuple[str, Spans]:
    """The chat for the plain tokenizer: the template's own special tokens renamed, the marks gone; and its spans."""
    cuts = sorted({0, len(text), *(place for span in spans for place in span)})
    moved = {0: 0}
    parts: list[str] = []
    for start, stop in itertools.pairwise(cuts):
        part = special.pattern.sub(lambda found: renamed(found.group()), text[start:stop]).replace(mark, "")
        parts.append(part)
        moved[stop] = moved[start] + len(part)
    return "".join(parts), [(moved[start], moved[stop]) for start, stop in spans]


def _chat_template(tokenizer: HuggingFaceTokenizer, chosen: str | None, name: str) -> ChatTemplate:
    loaded = tokenizer.transformers_tokenizer
    text = chosen
    if text is None and getattr(loaded, "chat_template", None):
        try:
            text = loaded.get_chat_template()
        except ValueError as error:
            raise PrepareError(f"template {name}: {error} Give one with --chat-template.") from error
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
def _compiled(tokenizer: HuggingFaceTokenizer, text: str) -> ChatTemplate:
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
