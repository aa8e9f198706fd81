"""Schemas: records as people have them, validated and read into one kind of conversation.

Errors name the message by its place from 0 ("messages[3].role"); whoever reads the file puts its name and line before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.conversation import Conversation, Message
from grain_sft.prepare.record_words import found, kind, listed, suggestion
from grain_sft.prepare.strict_json import MAX_DEPTH, check_text, parse_json, shown, strings

__all__ = ["SCHEMAS", "parse_json", "parse_record", "read_record"]

Record = dict[str, Any]

_STRICT_ROLES = ("system", "user", "assistant")
_EPISODE_ROLES = ("user", "assistant", "assistant_context")
_TOOL_ROLES = (*_EPISODE_ROLES, "assistant_toolcall", "toolresult")
_CHAT_ROLES = (
    "system",
    "user",
    "assistant",
    "developer",
    "tool",
    "function",
    "ipython",
    "environment",
    *_TOOL_ROLES[2:],
)
_OPENCHAT_ROLES = ("user", "assistant")

_RECORD_KEYS = dict.fromkeys(("messages", "system", "context", "tools", "items", "condition", "prompt", "completion"))
_MESSAGE_KEYS = dict.fromkeys(
    (
        *("role", "content", "weight", "name", "arguments", "tool_calls", "tool_call_id", "functions"),
        *("function_calls", "reasoning_content", "thinking", "context", "think", "cite"),
    )
)
_CALLS = ("tool_calls", "function_calls")
_CALL_TYPES: Mapping[str, tuple[type, ...]] = {
    "tool_calls": (list, NoneType),
    "function_calls": (list, str, NoneType),
    "functions": (list, str, NoneType),
}
"""Types of what a chat template writes out as it is; OLMo's data have it as text."""
_TEXT_KEYS = ("name", "context", "think", "cite", "tool_call_id")
_MAX_WEIGHT = 1e30  # what a float32 holds, with room


def parse_record(record: object, schema: str = "auto") -> Conversation:
    """The conversation that a parsed record holds.

    Args:
      schema: a name in SCHEMAS; "auto" tells them apart by their keys.

    Raises:
      RecordError: the record is not of that schema.
      PrepareError: there is no such schema.
    """
    if not isinstance(record, dict):
        raise RecordError(f"the record is {kind(record)}; expected a JSON object.")
    parse = SCHEMAS.get(schema)
    if parse is None:
        if schema != "auto":
            raise PrepareError(f"schema {schema!r}: expected 'auto', {listed(SCHEMAS)}.")
        parse = _detect(record)
    return parse(record)


def read_record(raw: object, schema: str = "auto") -> Conversation:
    """The conversation of a record as `inputs.read_records` gives it: a line of JSON as bytes, or a row.

    Raises:
      RecordError: it is no JSON, or not of that schema.
      PrepareError: there is no such schema.
    """
    return parse_record(parse_json(raw) if isinstance(raw, bytes) else raw, schema)


def _parse_messages(record: Record) -> Conversation:
    """{"messages": [{"role", "content"}, ...]}, with these keys and no others."""
    for key in record:
        if key != "messages":
            raise RecordError(f"key {shown(key)}: expected the key 'messages' only.{suggestion(key, ('messages',))}")
    messages = []
    for index, entry in enumerate(_entries(record, "messages")):
        if len(entry) == 2:
            role, content = entry.get("role"), entry.get("content")
            if role in _STRICT_ROLES and type(content) is str and "\0" not in content:
                messages.append(Message(role, content))
                continue
        where = f"messages[{index}]"
        for key in entry:
            if key not in ("role", "content"):
                raise RecordError(
                    f"{where}: key {shown(key)}; expected exactly 'role' and 'content'."
                    f"{suggestion(key, ('role', 'content'))}"
                )
        messages.append(Message(_role(entry, where, _STRICT_ROLES), _text(entry, "content", where)))
    return Conversation(tuple(messages))


def _parse_chat(record: Record, roles: Collection[str] = _CHAT_ROLES) -> Conversation:
    """{"messages", "system", "context", "tools"}, whose messages may have further keys; templates say which they read."""
    _check_keys(record, _RECORD_KEYS, "the record")
    tools = record.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise RecordError(f"tools: {kind(tools)}; expected a list of functions.")
        _check_json(tools, "tools")
    context = record.get("context")
    if context is not None and not isinstance(context, str):
        context = json.dumps(context, ensure_ascii=False)
    return Conversation(
        messages=_messages(record, "messages", roles),
        system=_optional_text(record, "system"),
        context=context,
        tools=tuple(tools) if tools else None,
    )


def _parse_episode(record: Record) -> Conversation:
    """{"system", "context", "messages"}, as the chat episodes have it."""
    return _parse_chat(record, _EPISODE_ROLES)


def _parse_tools(record: Record) -> Conversation:
    """{"system", "messages"} with the roles assistant_toolcall (name, arguments) and toolresult (name, content)."""
    return _parse_chat(record, _TOOL_ROLES)


def _parse_openchat(record: Record) -> Conversation:
    """{"items": [{"role", "content", "weight"}], "condition", "system"}."""
    _check_keys(record, _RECORD_KEYS, "the record")
    return Conversation(
        messages=_messages(record, "items", _OPENCHAT_ROLES),
        system=_optional_text(record, "system"),
        condition=_optional_text(record, "condition") or "",
    )


def _parse_prompt_completion(record: Record) -> Conversation:
    """{"prompt", "completion"}: a text or a list of messages each. What the assistant says in the prompt takes no loss."""
    _check_keys(record, _RECORD_KEYS, "the record")
    messages = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(record.get(key), list):
            for message in _messages(record, key, _CHAT_ROLES):
                if key == "prompt" and message.role.startswith("assistant"):
                    message = Message(message.role, message.content, 0.0, message.extra)
                messages.append(message)
        else:
            messages.append(Message(role, _text(record, key, "the record")))
    return Conversation(tuple(messages), system=_optional_text(record, "system"))


SCHEMAS: Mapping[str, Callable[[Record], Conversation]] = {
    "messages": _parse_messages,
    "chat": _parse_chat,
    "episode": _parse_episode,
    "tools": _parse_tools,
    "openchat": _parse_openchat,
    "prompt_completion": _parse_prompt_completion,
}


def _detect(record: Record) -> Callable[[Record], Conversation]:
    if record.keys() == {"messages"}:
        return _parse_chat
    parsers = {"messages": _parse_chat, "items": _parse_openchat, "completion": _parse_prompt_completion}
    present = [key for key in parsers if key in record]
    if len(present) == 1:
        return parsers[present[0]]
    if present:
        keys = " and ".join(repr(key) for key in present)
        raise RecordError(f"the record has {keys}, so its schema is not clear. Say it with --schema.")
    keys = ", ".join(shown(key) for key in list(record)[:8]) or "none"
    hint = next(filter(None, (suggestion(key, _RECORD_KEYS) for key in record)), "")
    raise RecordError(
        f"the record's keys are {keys}; expected 'messages', 'items', or 'prompt' and 'completion'.{hint}"
    )


def _messages(record: Record, key: str, roles: Collection[str]) -> tuple[Message, ...]:
    messages = []
    for index, entry in enumerate(_entries(record, key)):
        if len(entry) == 2:  # no more than role and content, as nearly always
            role, content = entry.get("role"), entry.get("content")
            if type(content) is str and type(role) is str and role in roles and "\0" not in content:
                messages.append(Message(role, content))
                continue
        messages.append(_message(entry, f"{key}[{index}]", roles))
    return tuple(messages)


def _message(entry: Record, where: str, roles: Collection[str]) -> Message:
    role = _role(entry, where, roles)
    _check_keys(entry, _MESSAGE_KEYS, where)
    extra = {key: value for key, value in entry.items() if key not in ("role", "content", "weight")}
    if extra:
        _check_json(extra, where)
    for key in _TEXT_KEYS:
        if not isinstance(extra.get(key, ""), str):
            raise RecordError(f"{where}.{key}: {kind(extra[key])}; expected a string.")
    for key, kinds in _CALL_TYPES.items():
        if not isinstance(extra.get(key), kinds):
            raise RecordError(f"{where}.{key}: {kind(extra[key])}; expected a list.")
    text = _content(entry, role, where, extra)
    return Message(role, text, _weight(entry, where), extra or None)


def _content(entry: Record, role: str, where: str, extra: Record) -> str:
    """The text of a message; where it has none or is JSON, as calls and results of tools, that goes to `extra`."""
    content = entry.get("content")
    if role == "assistant_toolcall":
        if not isinstance(extra.get("name"), str):
            raise RecordError(f"{where}.name: {found(entry, 'name')}; expected the name of the tool that is called.")
        if not isinstance(extra.setdefault("arguments", {}), dict):
            raise RecordError(f"{where}.arguments: {kind(extra['arguments'])}; expected an object.")
        if "content" not in entry:
            return ""
    if role == "toolresult" and "content" in entry and not isinstance(content, str):
        _check_json(content, f"{where}.content")
        extra["content"] = content
        return ""
    if content is None and role == "assistant" and any(extra.get(key) for key in _CALLS):
        extra["content"] = None
        return ""
    return _text(entry, "content", where)


def _entries(record: Record, key: str) -> list[Record]:
    value = record.get(key)
    if not isinstance(value, list):
        hint = "" if key in record else next(filter(None, (suggestion(name, (key,)) for name in record)), "")
        raise RecordError(f"{key}: {found(record, key)}; expected a list of messages.{hint}")
    if not value:
        raise RecordError(f"{key}: is empty; expected at least one message.")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise RecordError(f"{key}[{index}]: {kind(entry)}; expected an object with 'role' and 'content'.")
    return value


def _role(entry: Record, where: str, roles: Collection[str]) -> str:
    role = entry.get("role")
    if isinstance(role, str) and role in roles:
        return role
    if not isinstance(role, str):
        hint = "" if "role" in entry else next(filter(None, (suggestion(key, ("role",)) for key in entry)), "")
        raise RecordError(f"{where}.role: {found(entry, 'role')}; expected one of {', '.join(roles)}.{hint}")
    raise RecordError(f"{where}.role: {shown(role)}; expected one of {', '.join(roles)}.{suggestion(role, roles)}")


def _text(entry: Record, key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        hint = "" if key in entry else next(filter(None, (suggestion(name, (key,)) for name in entry)), "")
        raise RecordError(f"{where}.{key}: {found(entry, key)}; expected a string.{hint}")
    if "\0" in value:
        check_text(value, f"{where}.{key}")
    return value


def _optional_text(record: Record, key: str) -> str | None:
    return None if record.get(key) is None else _text(record, key, "the record")


def _weight(entry: Record, where: str) -> float | None:
    weight = entry.get("weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _MAX_WEIGHT:
        raise RecordError(f"{where}.weight: {shown(weight)}; expected a number from 0 up.")
    return float(weight)


def _check_keys(entry: Record, known: Mapping[str, None], where: str) -> None:
    """Refuse a key that is nearly a known one; other unknown keys are metadata, or for a chat template to read."""
    if entry.keys() <= known.keys():
        return
    for key in entry:
        if key not in known and (hint := suggestion(key, tuple(known), least=0.8)):
            raise RecordError(f"{where}: unknown key {shown(key)}.{hint}")


def _check_json(value: object, where: str) -> None:
    """Refuse what can't be written as JSON: rows of Parquet may hold other things."""
    try:
        _check_values(value, where, MAX_DEPTH)
    except RecursionError as error:
        raise RecordError(f"{where}: nested too deep; expected at most {MAX_DEPTH} levels.") from error
    for path, text in strings(value, where):
        check_text(text, path)


def _check_values(value: object, where: str, levels: int) -> None:
    if levels < 0:
        raise RecursionError
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{where}: key {shown(key)}; expected a string.")
            _check_values(entry, f"{where}.{key}", levels - 1)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _check_values(entry, f"{where}[{index}]", levels - 1)
    elif not (
        value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    ):
        raise RecordError(f"{where}: {shown(value)}; expected what JSON can hold.")
