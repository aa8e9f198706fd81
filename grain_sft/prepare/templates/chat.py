"""The templates hf and olmo, which render chats with a Jinja chat template.

Token ids are those of transformers' `apply_chat_template`. The assistant's texts take loss, and so does the control token or
markup that ends a turn of the assistant. If the template marks texts with {% generation %}, only the marked texts take loss.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from absl import logging

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import CALLS, REASONING, Conversation, Message
from grain_sft.prepare.records.strict_json import shown, strings
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.chat_controls import Expected, expected_controls
from grain_sft.prepare.templates.chat_ids import ChatPieces, UnexpectedControlError, WholeChats
from grain_sft.prepare.templates.chat_spans import CACHED_RESULTS, RenderedChat, find_turns
from grain_sft.prepare.templates.chat_template import ChatTemplate, Marks, Messages, Spans, Tools, with_reasoning
from grain_sft.prepare.templates.template import RENDER_IT, Rendered, Result, Template, result_of, unread
from grain_sft.prepare.tokenizers import Tokenizer

# keys that templates often ignore: each tuple has the alternative keys of one thing, which are calls, tools and thoughts
_OFTEN_UNREAD = (CALLS, ("functions",), ("think",))


class Chat(Template):
    """Chats rendered by a Jinja template.

    The Jinja template is the first of these that exists:

    - the option `chat_template`;
    - the attribute `jinja` of the class;
    - the tokenizer's own template;
    - the result of `default()`.
    """

    name = "hf"
    roles = (
        "system", "developer", "user", "assistant", "tool", "function", "ipython", "environment",
        "assistant_toolcall", "toolresult",
    )  # fmt: skip
    options = ("chat_template",)
    learned = ("assistant", "assistant_toolcall")

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        text = self.jinja if options.chat_template is None else options.chat_template
        text = tokenizer.chat_template if text is None else text
        self._chat = ChatTemplate(tokenizer, self.default() if text is None else text, self.name)
        # The tokenizer adds a BOS, because even an empty text has ids (`empty_ids`). But if no file names the BOS, the template
        # writes nothing for `bos_token`.
        if tokenizer.bos_token_id is None and tokenizer.empty_ids and "bos_token" in self._chat.source:
            problem = "the chat template writes a BOS, which no file of the tokenizer names"
            raise PrepareError(f"template {self.name}: {problem}. Give its folder with the tokenizer_config.json.")
        # `encodes_whole_chats`: the library (Hugging Face's) finds the control tokens in a chat itself
        self._encoder = WholeChats(tokenizer) if tokenizer.encodes_whole_chats else ChatPieces(tokenizer)
        # chats with the same roles often have the same texts around their contents, so the results are cached
        self._find = functools.lru_cache(maxsize=CACHED_RESULTS)(self._encoder.find)
        # `ChatPieces` needs no warning, because it may add an EOS that takes loss
        if tokenizer.encodes_whole_chats and self._chat.leaves_turns_open():
            problem = f"template {self.name}: the chat template writes no token after the assistant's last turn"
            logging.warning("%s, so a model does not learn to end its turn. Give a template that ends turns.", problem)

    def default(self) -> str:
        """Return the template for a tokenizer that has none, or raise a PrepareError."""
        raise PrepareError(f"template {self.name}: the tokenizer has no chat template. Give one with --chat-template.")

    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        return [result_of(self._render, conversation) for conversation in conversations]

    def _render(self, conversation: Conversation) -> Rendered:
        """Return the document of one conversation, or raise the RecordError that explains why it has none."""
        self.check(conversation)
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        messages = [*system, *map(_as_dict, conversation.messages)]
        # indices in `messages` of the messages that take loss
        learned = [len(system) + index for index, loss in enumerate(self.losses(conversation)) if loss]
        tools = conversation.tools
        text = self._chat.render(messages, tools)
        chat = RenderedChat(self._chat, messages, tools, text)
        if chat.contents is None:  # not all contents were found in `text`, so the template may ignore a part of the chat
            self._refuse_unread(messages, tools, text)
        _refuse_quoted(conversation, text)
        expected = expected_controls(chat, self._find, self._encoder.special)
        if self._chat.marks_turns:
            spans = _spans_of_turns(self._chat.marked_spans(messages, tools, text), chat, learned)
        else:
            spans = [(start, self._end_of_turn(text, stop, expected)) for start, stop in find_turns(chat, learned)]
        is_plain = self.chosen.special_text == "encode"
        try:
            return self._encoder.encode(text, spans, expected, plain=is_plain)
        except UnexpectedControlError as error:
            raise _refusal(error, conversation, is_plain) from error

    def _refuse_unread(self, messages: Messages, tools: Tools, text: str) -> None:
        """Refuse a chat if the template ignores its calls, thoughts, tools, or the content of a message.

        For example, the template ignores the tools if the chat without tools is rendered to the same `text`.
        """
        # A template that reads thoughts may leave out those of earlier turns, as Qwen 3's does. So only the last are checked.
        reads_thoughts = not self._chat.read_keys.isdisjoint(REASONING)
        unread_keys = _OFTEN_UNREAD if reads_thoughts else (*_OFTEN_UNREAD, REASONING)
        # tuples of (what may be ignored, messages that lack or change it, tools, fix)
        changed = [(" or ".join(keys), _without(messages, keys), tools, unread(keys[0])) for keys in unread_keys]
        changed.append(("tools", messages, None, unread("tools")))
        marked, marks = list(messages), Marks(messages, tools, self._chat.source)
        [last] = _without(messages[-1:], REASONING)
        thoughts, _, answer = last.get("content", "").rpartition("</think>")
        if thoughts.replace("<think>", "").strip():
            last = {**last, "content": f"<think>{marks.mark(0)}</think>{answer}"}
        changed.append(("the last thoughts", [*messages[:-1], last], tools, f"{RENDER_IT} Or remove the thoughts."))
        # Render once with marks around the contents. A content whose mark appears is written. Each of the other contents is
        # changed alone. A content next to calls is not checked, because the template of Llama 3.1 leaves it out.
        texts = [i for i, each in enumerate(messages) if each.get("content", "").strip() and not any(map(each.get, CALLS))]
        for index in texts:
            mark = marks.mark(index)
            marked[index] = {**messages[index], "content": f"{mark}{messages[index]['content']}{mark}"}
        written = marks.pattern.findall(self._chat.attempt(marked, tools) or "") if texts else []
        for index in texts:
            if str(index) not in written:
                replaced = [*messages[:index], marked[index], *messages[index + 1 :]]
                changed.append((messages[index]["role"], replaced, tools, f"{RENDER_IT} Or remove the message."))
        for what, others, other_tools, fix in changed:
            if (others, other_tools) != (messages, tools) and self._chat.attempt(others, other_tools) == text:
                raise RecordError(f"messages: the chat template writes nothing of {what}. {fix}")

    def _end_of_turn(self, text: str, stop: int, expected: Expected) -> int:
        """Return the index at which a turn ends. The content of the turn ends at `stop`.

        The turn includes the control token or markup that ends it, and an EOS after that. If the next message's own text begins
        with the spelling of a control token, this token does not end the turn.
        """
        end = self._chat.end_of_turn(text, stop)
        is_control = text[stop:end].lstrip() in self._encoder.special.spellings
        template_stops = [control.stop for control in expected.controls]
        if expected.placed and is_control and end not in template_stops:
            return stop
        with_eos = self._chat.end_with_eos(text, end)
        return with_eos if not expected.placed or with_eos in template_stops else end


class Olmo(Chat):
    """Chats as in `Chat`, with OLMo's template as the default."""

    name = "olmo"

    def default(self) -> str:
        """Return OLMo's template. Raise a PrepareError if the tokenizer lacks one of its control tokens."""
        missing = [token for token in ("<|im_start|>", "<|im_end|>") if self.tokenizer.token_id(token) is None]
        if self.tokenizer.eos_token_id is None:
            missing.append("an EOS token")
        if missing:
            problem = f"template olmo: the tokenizer has no chat template, and lacks OLMo's {', '.join(missing)}"
            raise PrepareError(f"{problem}. Give a template with --chat-template, or choose another tokenizer.")
        return OLMO_TEMPLATE


def as_template(entry: Any, name: str) -> Any:
    """Return the class for the entry `name` of `TEMPLATES`, which may be the text of a Jinja template."""
    if isinstance(entry, str):
        return type("JinjaText", (Chat,), {"jinja": entry, "name": name, "options": ()})
    return entry


def _refuse_quoted(conversation: Conversation, text: str) -> None:
    """Refuse a call whose `arguments` are JSON text, as in OpenAI's API, if the template writes the text in quotes."""
    for index, message in enumerate(conversation.messages):
        for path, value in strings((message.extra or {}).get("tool_calls"), f"messages[{index}].tool_calls"):
            if path.endswith(".arguments") and value.startswith("{") and json.dumps(value, ensure_ascii=False) in text:
                raise RecordError(f"{path}: JSON text, which the chat template quotes; expected an object. Write the object.")


def _refusal(error: UnexpectedControlError, conversation: Conversation, plain: bool) -> RecordError:
    """Return an error that names the text of the record with the unexpected control token."""
    messages = [{"content": message.content, **(message.extra or {})} for message in conversation.messages]
    texts = list(strings({"system": conversation.system, "tools": conversation.tools, "messages": messages}))
    option = "" if plain else ", or have it tokenized as ordinary text with --special-text encode"
    beginnings = tuple(error.text[:size] for size in range(1, len(error.text)))
    for path, text in texts:
        if error.text and error.text in text:
            return RecordError(f"{path}: {shown(error.text)} {error}. Remove it{option}.")
    for path, text in texts:
        # the spelling may have two parts: a text ends in "<|im_", and the text after it begins with "end|>"
        if beginnings and text.rstrip().endswith(beginnings):
            return RecordError(f"{path}: with the template around it, {shown(error.text)} {error}. Remove it{option}.")
    return RecordError(f"messages: a text {error}. Remove the spelling of special tokens{option}.")


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a message as the dict that chat templates read, without keys whose value is None."""
    extra = dict(message.extra or {})
    if message.role == "assistant_toolcall":
        function = {"name": extra.pop("name"), "arguments": extra.pop("arguments")}
        extra["tool_calls"] = [{"type": "function", "function": function}]
    elif message.role == "toolresult" and "content" in extra:
        extra["content"] = json.dumps(extra["content"], ensure_ascii=False)
    role = {"assistant_toolcall": "assistant", "toolresult": "tool"}.get(message.role, message.role)
    items = {"role": role, "content": message.content, **extra}
    return with_reasoning({key: value for key, value in items.items() if value is not None})


def _without(messages: Messages, keys: Sequence[str]) -> Messages:
    """Return messages without `keys`. An empty or blank value stays, because a template that ignores it loses nothing."""
    return [{key: value for key, value in each.items() if key not in keys or not str(value or "").strip()} for each in messages]


def _spans_of_turns(spans: Spans, chat: RenderedChat, turns: list[int]) -> Spans:
    """Return those of `spans` that belong to the messages with the indices `turns`.

    `spans` are the {% generation %} blocks of all turns of the assistant.
    """
    assistants = [index for index, role in enumerate(chat.roles) if role == "assistant"]
    if len(turns) == len(assistants):
        return spans
    # {% generation %} blocks may enclose two spans in one turn and none in another. So render again with a mark in each turn,
    # to see which turn each span is in.
    marks = Marks(chat.messages, chat.tools, chat.template.source)
    marked = list(chat.messages)
    for index in assistants:
        marked[index] = {**marked[index], "content": f"{marked[index].get('content', '')}{marks.mark(index)}"}
    text = chat.template.render(marked, chat.tools)
    marked_spans = chat.template.marked_spans(marked, chat.tools, text)
    found = [marks.pattern.findall(text[start:stop]) for start, stop in marked_spans]
    if len(assistants) != len(spans) or found != [[str(index)] for index in assistants]:
        counts = f"{len(spans)} spans in {len(assistants)} turns of the assistant"
        problem = f"messages: the chat template marks {counts}; a chat with turns of weight 0 needs one in each"
        raise RecordError(f"{problem}. Change the template, or remove the weights.")
    return [span for index, span in zip(assistants, spans, strict=True) if index in turns]


OLMO_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is defined and message['content'] is not none -%} {{- message['content'] -}} {%- endif -%}
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
    {{- eos_token if loop.last and message['role'] == 'assistant' else '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
"""ChatML as in OLMo's post-training, with functions and function calls. EOS ends the assistant's last turn."""
