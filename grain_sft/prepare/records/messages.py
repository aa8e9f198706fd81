"""Parsing of the messages of a record, in the form {"role", "content"} or in ShareGPT's form {"from", "value"}."""

from typing import Any

from grain_sft.errors import RecordError
from grain_sft.prepare.records.conversation import CALLS, OPTIONAL, REASONING, Message, Record, Roles
from grain_sft.prepare.records.strict_json import check_json, check_text, decoded, found, kind, shown, suggestion

_MESSAGE_KEYS = frozenset([
    "role", "content", "weight", "name", "arguments", "tool_calls", "tool_call_id", "functions", "function_calls",
    "function_call", *REASONING, "context", "think", "cite",
])  # fmt: skip
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("name", "context", "think", "cite", "tool_call_id"), (str, "a string")),
    **dict.fromkeys(("function_calls", "functions"), (list | str, "a list")),  # a string in OLMo's data
    "tool_calls": (list, "a list of objects"),
}
"""Type that the value of a key must have, and the name of this type in errors."""

_MASKS = frozenset(("loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail"))
"""Keys of loss masks in the data of other trainers, such as Axolotl and torchtune. Any value except null is a mask."""

_ALL_MASKS = _MASKS | {"train", "training", "trainable", "loss", "mask", "masked"}
"""All keys of masks. A key outside `_MASKS` may mean something else, as in `"mask": "N95"`. Its value is a mask only if it
is true, false, 1 or 0."""

# Keys of masks that `--schema` can't map to the weight: `true` may mean "no loss", or the mask applies to parts of a message.
_NO_WEIGHTS = ("mask", "masked", "train_detail", "training_detail")
_TURN_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "tool", "user", "assistant")}
_TURN_KEYS = frozenset(("from", "value", "weight"))


def read_messages(record: Record, key: str, roles: Roles, *, exact: bool = False) -> list[Message]:
    """Return the messages {"role", "content", ...} under a key. With `exact`, refuse other keys unless they are null."""
    messages = []
    for index, entry in enumerate(_entries_of(record, key)):
        role, content = entry.get("role"), entry.get("content")
        # a plain message skips the checks of `_message`: a record of 4 such messages takes 11 instead of 39 us
        is_plain = len(entry) == 2 and role != "assistant_toolcall"
        if is_plain and type(content) is str and type(role) is str and role in roles and "\0" not in content:
            messages.append(Message(role, content))
        else:
            messages.append(_message(entry, f"{key}[{index}]", roles, exact))
    return messages


def read_turns(record: Record, key: str, roles: Roles) -> list[Message]:
    """Return the messages under a key: {"from", "value", "weight"}, or {"role", "content"} with one of `roles`."""
    messages = []
    for index, entry in enumerate(_entries_of(record, key)):
        where = f"{key}[{index}]"
        if "role" in entry and "from" not in entry:  # then all messages must have this form
            return read_messages(record, key, roles)
        check_keys(entry, _TURN_KEYS, where)
        if unread := [name for name in ("function_call", *OPTIONAL) if entry.get(name)]:
            raise RecordError(f"{where}.{unread[0]}: not read in ShareGPT's turns. Use turns of 'role' and 'content'.")
        role = _TURN_ROLES[_role_of(entry, where, tuple(_TURN_ROLES), "from")]
        messages.append(Message(role, text_of(entry, "value", where), _weight_of(entry, where)))
    return messages


def _message(entry: Record, where: str, roles: Roles, exact: bool) -> Message:
    """Return one message {"role", "content", ...}. `where` is its place in the record, such as "messages[2]"."""
    others = {key: value for key, value in entry.items() if key not in ("role", "content") and value is not None}
    if exact and others:
        key = next(iter(others))
        hint = suggestion(key, ("role", "content"))
        raise RecordError(f"{where}: key {shown(key)}; expected exactly 'role' and 'content'.{hint}")
    role = _role_of(entry, where, roles)
    check_keys(entry, _MESSAGE_KEYS, where)
    if others.get("function_call"):
        call = "'tool_calls': [{'type': 'function', 'function': CALL}]"
        raise RecordError(f"{where}.function_call: no chat template reads it. Write {call}.")
    extra = {key: value for key, value in others.items() if key != "weight"}
    check_json(extra, where)
    for key, value in extra.items():
        expected_type, expected = _TYPES.get(key, (object, ""))
        is_right = isinstance(value, expected_type)
        if not is_right or (key == "tool_calls" and not all(isinstance(call, dict) for call in value)):
            raise RecordError(f"{where}.{key}: {kind(value)}; expected {expected}.")
    text = _content(entry, role, where, extra)
    return Message(role, text, _weight_of(entry, where), extra or None)


def _content(entry: Record, role: str, where: str, extra: Record) -> str:
    """Return the text of a message; "" for a tool call without text, and for a tool result that is not a text.

    Such a result becomes `extra["content"]`. If the role "assistant" calls tools without text, `extra["content"]` becomes None.
    For the role "assistant_toolcall", `extra` gets the key "arguments" if it is missing.
    OpenAI's list of one text, [{"type": "text", "text": "Hi"}], counts as "Hi". A list of several texts is refused, because
    templates join the texts differently.
    """
    content = entry.get("content")
    if role == "assistant_toolcall":
        if not isinstance(extra.get("name"), str):
            raise RecordError(f"{where}.name: {found(entry, 'name')}; expected the name of the tool that is called.")
        if not isinstance(extra.setdefault("arguments", {}), dict):
            raise RecordError(f"{where}.arguments: {kind(extra['arguments'])}; expected an object.")
        if content is None:
            return ""
    is_value = role == "toolresult" and "content" in entry and not isinstance(content, str)
    only_calls = role == "assistant" and content is None and any(extra.get(key) for key in CALLS)
    if is_value or only_calls:
        check_json(content, f"{where}.content")
        extra["content"] = content
        return ""
    if isinstance(content, list) and role != "toolresult":
        part = content[0] if len(content) == 1 and isinstance(content[0], dict) else {}
        if part.get("type") != "text":
            raise RecordError(f"{where}.content: a list; expected a string, or a list of one text. Join its texts.")
        return text_of(part, "text", f"{where}.content[0]")
    return text_of(entry, "content", where)


def _entries_of(record: Record, key: str) -> list[Record]:
    """Return the objects in the list under a key; at least one."""
    value = record.get(key)
    if not isinstance(value, list):
        raise RecordError(f"{key}: {found(record, key)}; expected a list of messages.{_misspelled(record, key)}")
    if not value:
        raise RecordError(f"{key}: is empty; expected at least one message.")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise RecordError(f"{key}[{index}]: {kind(entry)}; expected an object with 'role' and 'content'.")
    return value


def _role_of(entry: Record, where: str, roles: Roles, key: str = "role") -> str:
    """Return the role of a message under `key`. Refuse a role that is not one of `roles`."""
    role = entry.get(key)
    if isinstance(role, str) and role in roles:
        return role
    value, hint = found(entry, key), _misspelled(entry, key)
    if isinstance(role, str):
        value, hint = shown(role), suggestion(role, roles)
    if role in ("function_call", "observation"):
        hint = " Write calls and their results as messages, with 'tool_calls' and the role 'tool'."
    raise RecordError(f"{where}.{key}: {value}; expected one of {', '.join(roles)}.{hint}")


def text_of(entry: Record, key: str, where: str = "the record") -> str:
    """Return the text under a key. Decode bytes, as in a binary column of Parquet."""
    value = entry.get(key)
    if isinstance(value, bytes):
        value = decoded(value)
    if not isinstance(value, str):
        raise RecordError(f"{where}.{key}: {found(entry, key)}; expected a string.{_misspelled(entry, key)}")
    if "\0" in value:
        check_text(value, f"{where}.{key}")
    return value


def optional_text(record: Record, key: str) -> str | None:
    """Return the text under a key of a record; None if it is absent or null."""
    return None if record.get(key) is None else text_of(record, key)


def _weight_of(entry: Record, where: str) -> float | None:
    """Return the weight of a message; None if it has none. Refuse a mask under another key, such as `train: false`."""
    for key in sorted(entry.keys() & _ALL_MASKS):
        value = entry[key]
        if value in (0, 1) or (key in _MASKS and value is not None):
            fix = "Give messages that take no loss the weight 0, and remove this key"
            if key not in _NO_WEIGHTS and not isinstance(value, list):
                fix = f"Map it to the weight, as in --schema chat:weight={key}, or remove the key"
            raise RecordError(f"{where}.{key}: {kind(value)}; a mask of this name is not read. {fix}.")
    weight = entry.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, int | float) or not 0 <= weight <= 1e30:  # well below the largest float32
        raise RecordError(f"{where}.weight: {shown(weight)}; expected a number from 0 to 1e30.")
    return float(weight)


def check_keys(entry: Record, known: frozenset[str], where: str) -> None:
    """Refuse a key that looks like a misspelled known key. Other unknown keys may be metadata."""
    for key in entry:
        if key not in known and (hint := suggestion(key, tuple(sorted(known - entry.keys())), least=0.8)):
            raise RecordError(f"{where}: unknown key {shown(key)}.{hint}")


def _misspelled(entry: Record, key: str) -> str:
    """Return a hint if `entry` lacks `key` but has a similar key."""
    return "" if key in entry else next((hint for name in entry if (hint := suggestion(name, (key,)))), "")
