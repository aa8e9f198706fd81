"""Messages of a record: checked one by one, with the place of what is wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.conversation import Message
from grain_sft.prepare.error_text import found, kind, suggestion
from grain_sft.prepare.strict_json import MAX_DEPTH, check_text, shown, strings

Record = dict[str, Any]

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


def read_messages(record: Record, key: str, roles: Collection[str]) -> tuple[Message, ...]:
    """The messages {"role", "content", ...} under a key, in order.

    Raises:
      RecordError: One is not a message, or has another role.
    """
    messages = []
    for index, entry in enumerate(entries_of(record, key)):
        if len(entry) == 2:  # no more than role and content, as nearly always
            role, content = entry.get("role"), entry.get("content")
            if type(content) is str and type(role) is str and role in roles and "\0" not in content:
                messages.append(Message(role, content))
                continue
        messages.append(_message(entry, f"{key}[{index}]", roles))
    return tuple(messages)


def _message(entry: Record, where: str, roles: Collection[str]) -> Message:
    role = role_of(entry, where, roles)
    check_keys(entry, _MESSAGE_KEYS, where)
    extra = {key: value for key, value in entry.items() if key not in ("role", "content", "weight")}
    if extra:
        check_json(extra, where)
    for key in _TEXT_KEYS:
        if not isinstance(extra.get(key, ""), str):
            raise RecordError(f"{where}.{key}: {kind(extra[key])}; expected a string.")
    for key, kinds in _CALL_TYPES.items():
        if not isinstance(extra.get(key), kinds):
            raise RecordError(f"{where}.{key}: {kind(extra[key])}; expected a list.")
    text = _content(entry, role, where, extra)
    return Message(role, text, weight_of(entry, where), extra or None)


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
        check_json(content, f"{where}.content")
        extra["content"] = content
        return ""
    if content is None and role == "assistant" and any(extra.get(key) for key in _CALLS):
        extra["content"] = None
        return ""
    return text_of(entry, "content", where)


def entries_of(record: Record, key: str) -> list[Record]:
    """The list of objects under a key, which has at least one.

    Raises:
      RecordError: It is something else.
    """
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


def role_of(entry: Record, where: str, roles: Collection[str], key: str = "role") -> str:
    """The role of a message, which is one of `roles`.

    Raises:
      RecordError: It is not.
    """
    role = entry.get(key)
    if isinstance(role, str) and role in roles:
        return role
    if not isinstance(role, str):
        hint = "" if key in entry else next(filter(None, (suggestion(name, (key,)) for name in entry)), "")
        raise RecordError(f"{where}.{key}: {found(entry, key)}; expected one of {', '.join(roles)}.{hint}")
    raise RecordError(f"{where}.{key}: {shown(role)}; expected one of {', '.join(roles)}.{suggestion(role, roles)}")


def text_of(entry: Record, key: str, where: str) -> str:
    """The text under a key.

    Raises:
      RecordError: There is none, or it holds what no text file can.
    """
    value = entry.get(key)
    if not isinstance(value, str):
        hint = "" if key in entry else next(filter(None, (suggestion(name, (key,)) for name in entry)), "")
        raise RecordError(f"{where}.{key}: {found(entry, key)}; expected a string.{hint}")
    if "\0" in value:
        check_text(value, f"{where}.{key}")
    return value


def optional_text(record: Record, key: str) -> str | None:
    """The text under a key of a record; None where there is none."""
    return None if record.get(key) is None else text_of(record, key, "the record")


def weight_of(entry: Record, where: str) -> float | None:
    """The weight of a message; None where it has none.

    Raises:
      RecordError: It is not a number from 0 up.
    """
    weight = entry.get("weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _MAX_WEIGHT:
        raise RecordError(f"{where}.weight: {shown(weight)}; expected a number from 0 up.")
    return float(weight)


def check_keys(entry: Record, known: Mapping[str, None], where: str) -> None:
    """Refuse a key that is nearly a known one which is absent: a misspelling. Other keys are metadata, or for a chat
    template to read."""
    if entry.keys() <= known.keys():
        return
    absent = tuple(key for key in known if key not in entry)
    for key in entry:
        if key not in known and (hint := suggestion(key, absent, least=0.8)):
            raise RecordError(f"{where}: unknown key {shown(key)}.{hint}")


def check_json(value: object, where: str) -> None:
    """Refuse what can't be written as JSON: rows of Parquet may hold other things.

    Raises:
      RecordError: It can't.
    """
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
