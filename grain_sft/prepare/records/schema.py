"""Schemas: the common forms of records, such as ShareGPT's and Alpaca's, with functions that parse them to conversations."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import DOCUMENT, OPTIONAL, Conversation, Message, Record, Roles
from grain_sft.prepare.records.messages import check_keys, optional_text, read_messages, read_turns, text_of
from grain_sft.prepare.records.schema_mapping import SYSTEMS, command_for, renamed
from grain_sft.prepare.records.strict_json import check_json, kind, parse_json, shown, suggestion

_EPISODE_ROLES = ("user", "assistant", "assistant_context")
_TOOL_ROLES = (*_EPISODE_ROLES, "assistant_toolcall", "toolresult")
_CHAT_ROLES = ("system", "developer", *_TOOL_ROLES, "tool", "function", "ipython", "environment")


class Schema(NamedTuple):
    """Form of records, such as Alpaca's, and the function that parses a record of this form.

    Attributes:
      parse: Function from a record to its conversation.
      keys: Keys of a record, which `--schema` can rename.
      turn_keys: Keys of a message, which `--schema` can rename.
      signs: Keys by which "auto" recognizes a record of this schema; () for none. "auto" tries the schema text last.
    """

    parse: Callable[[Record], Conversation]
    keys: tuple[str, ...]
    turn_keys: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()


def parse_record(record: object, schema: str = "auto", *, messages: str = "chat") -> Conversation:
    """Return the conversation of a parsed record.

    Args:
      record: Parsed JSON object, or row of Parquet.
      schema: Name in SCHEMAS, or "auto", which infers the schema of each record from its keys. A name may be followed by the
        record's own keys: `prompt_completion:prompt=question,completion=answer`.
      messages: Schema that "auto" infers for a record with the key 'messages', such as "chat" or "tools".

    Raises:
      RecordError: The record does not have the form of its schema.
      PrepareError: The schema does not exist.
    """
    if not isinstance(record, dict):
        raise RecordError(f"the record is {kind(record)}; expected a JSON object.")
    name, keys = check_schema(schema)
    if name == "auto":
        name = _detect(record)
        if name == "chat":  # several schemas have chat's keys, and `messages` decides between them
            name = check_schema(messages)[0]
    try:
        mapped = renamed(record, keys, SCHEMAS[name].keys, SCHEMAS[name].turn_keys) if keys else record
        check_keys(mapped, frozenset(SCHEMAS[name].keys), "the record")
        for key in ("chat_template_kwargs", "loss_mask"):
            if name != "text" and mapped.get(key):
                raise RecordError(f"{key}: not read. Remove the key, or write its effect into the messages.")
        _refuse_bad_answer(mapped, name)
        conversation = SCHEMAS[name].parse(mapped)
        has_system = conversation.system or conversation.messages[0].role in ("system", "developer")
        unread = "" if has_system or "system" in keys else next((key for key in SYSTEMS if mapped.get(key)), "")
        if unread and "system" in SCHEMAS[name].keys:
            fix = f"Add --schema {name}:system={unread}, or {name}:system= to ignore it"
            raise RecordError(f"{unread}: not read, and the record has no other system text. {fix}.")
    except RecordError as error:
        if not keys:
            raise
        raise RecordError(f"{error} (--schema {schema}: the record's keys are {_keys(record)}.)") from error
    # a pair may have its prompt under a key that no schema knows, such as "question"
    lacks_prompt = conversation.rejected is not None and conversation.messages[0].role in (DOCUMENT, "assistant")
    if schema == "auto" and lacks_prompt and (hint := command_for(record)):
        raise RecordError(f"the pair has no prompt; its keys are {_keys(record)}.{hint}. Else add --schema preference.")
    return conversation


def _refuse_bad_answer(record: Record, schema: str) -> None:
    """Refuse a record that is marked as a bad answer, as in the unpaired preferences of TRL and LLaMA-Factory."""
    for key in ("label", "kto_tag"):
        label = record.get(key)
        is_bad = label is False and schema not in ("text", "preference")
        if schema == "prompt_completion":  # some files have 0 or "false"
            is_bad = label == 0 or str(label).lower() in ("0", "false")
        if is_bad:
            raise RecordError(f"{key}: {json.dumps(label, default=str)} marks a bad answer. Remove the record, or the key.")


def read_record(raw: object, schema: str = "auto", *, messages: str = "chat") -> Conversation:
    """Return the conversation of a record from `inputs.read_records`. If `raw` is a RecordError, raise it."""
    if isinstance(raw, RecordError):
        raise raw
    return parse_record(parse_json(raw) if isinstance(raw, bytes) else raw, schema, messages=messages)


@functools.lru_cache(maxsize=64)
def check_schema(schema: str) -> tuple[str, Mapping[str, str]]:
    """Return the name of a schema and its mapped keys: ("text", {"text": "body"}) for "text:text=body".

    A key that is mapped to "", as in "chat:tools=", is ignored.

    Raises:
      PrepareError: The schema does not exist, a pair is not KEY=KEY, the schema has no such key, or a key is mapped twice.
    """
    name, colon, pairs = schema.partition(":")
    if name not in SCHEMAS and name != "auto":
        raise PrepareError(f"schema {name!r}: expected 'auto', {', '.join(map(repr, SCHEMAS))}.")
    keys: dict[str, str] = {}
    for pair in pairs.split(",") if colon else ():
        key, equals, source = pair.partition("=")
        if not (key and equals):
            raise PrepareError(f"schema {schema!r}: {pair!r} is not a pair. Expected NAME:KEY=KEY_IN_THE_FILE,...")
        if name == "auto":
            raise PrepareError(f"schema {schema!r}: keys can be mapped for a named schema only. Name the schema.")
        known = (*SCHEMAS[name].keys, *SCHEMAS[name].turn_keys)
        if key not in known:
            raise PrepareError(f"schema {schema!r}: has no key {key!r}. Expected one of {', '.join(map(repr, known))}.")
        if key in keys:
            raise PrepareError(f"schema {schema!r}: maps {key!r} twice. Remove one of the two.")
        keys[key] = source
    return name, keys


def _parse_messages(record: Record) -> Conversation:
    """Parse {"messages": [{"role", "content"}, ...], "system"}, without other keys in messages."""
    if record.get("tools"):
        raise RecordError("key 'tools': schema 'messages' does not read it. Remove it, or give --schema chat.")
    messages = read_messages(record, "messages", ("system", "user", "assistant"), exact=True)
    return Conversation(tuple(messages), system=optional_text(record, "system"))


def _parse_chat(record: Record, roles: Roles = _CHAT_ROLES) -> Conversation:
    """Parse {"messages", "system", "tools"}. A message may have further keys, which chat templates read."""
    messages = tuple(read_messages(record, "messages", roles))
    return Conversation(messages, system=optional_text(record, "system"), tools=_tools(record))


def _tools(record: Record) -> tuple[object, ...] | None:
    """Return the record's tools; None if there are none. The record has a list of objects, or the JSON text of a list."""
    tools = record.get("tools")
    if isinstance(tools, str):  # JSON, as in data of LLaMA-Factory and TRL
        with contextlib.suppress(RecordError):  # a text that is not JSON is refused below
            tools = parse_json(tools.strip().encode() or b"null")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"tools: {kind(tools)}; expected a list of objects, or its JSON text.")
    check_json(tools, "tools")
    return tuple(tools) or None


def _parse_openchat(record: Record) -> Conversation:
    """Parse {"items": [{"role", "content", "weight"}], "condition", "system"}."""
    messages = tuple(read_messages(record, "items", ("user", "assistant")))
    return Conversation(messages, system=optional_text(record, "system"), condition=optional_text(record, "condition") or "")


def _parse_sharegpt(record: Record) -> Conversation:
    """Parse {"conversations": [{"from", "value", "weight"} or {"role", "content"}], "system", "tools"}."""
    messages = tuple(read_turns(record, "conversations", _CHAT_ROLES))
    return Conversation(messages, system=optional_text(record, "system") or None, tools=_tools(record))


def _parse_alpaca(record: Record) -> Conversation:
    """Parse {"instruction", "input", "output", "system", "history"}, where `history` has earlier [question, answer] pairs."""
    messages: list[Message] = []
    history = record.get("history")
    if history is not None and not isinstance(history, list):
        raise RecordError(f"history: {kind(history)}; expected a list of [question, answer].")
    for index, pair in enumerate(history or ()):
        where = f"history[{index}]"
        if not (isinstance(pair, list) and len(pair) == 2):
            raise RecordError(f"{where}: {kind(pair)}; expected [question, answer].")
        turn = {"question": pair[0], "answer": pair[1]}
        messages.append(Message("user", text_of(turn, "question", where)))
        messages.append(Message("assistant", text_of(turn, "answer", where)))
    # the input follows the instruction on a new line, as in LLaMA-Factory
    parts = [text_of(record, "instruction"), optional_text(record, "input") or ""]
    messages += [Message("user", "\n".join(filter(None, parts))), Message("assistant", text_of(record, "output"))]
    return Conversation(tuple(messages), system=optional_text(record, "system") or None)


def _parse_prompt_completion(record: Record) -> Conversation:
    """Parse {"prompt", "completion"}, each a text or a list of messages. The prompt takes no loss."""
    prompt, completion = _messages_of(record, "prompt", "user"), _messages_of(record, "completion", "assistant")
    return Conversation((*_untrained(prompt), *completion), system=optional_text(record, "system"), tools=_tools(record))


def _parse_preference(record: Record) -> Conversation:
    """Parse {"prompt", "chosen", "rejected"}, each a text or a list of messages.

    The responses may repeat the prompt. Messages that both responses begin with move to the prompt, which takes no loss.
    If the responses are texts, the prompt may have Alpaca's keys. Texts without a prompt are plain documents.
    """
    prompt = [] if record.get("prompt") is None else _messages_of(record, "prompt", "user")
    are_texts = not isinstance(record.get("chosen"), list)
    if are_texts and not prompt and record.get("instruction") is not None:
        prompt = list(_parse_alpaca({**record, "output": ""}).messages[:-1])
    role = DOCUMENT if are_texts and not prompt else "assistant"
    responses = [_messages_of(record, key, role) for key in ("chosen", "rejected")]
    if all(response[: len(prompt)] == prompt for response in responses):
        responses = [response[len(prompt) :] for response in responses]
    for key, response in zip(("chosen", "rejected"), responses, strict=True):
        if not response:
            raise RecordError(f"{key}: has no message after the prompt. Expected a response.")
        if prompt and prompt[-1].role == "user" and response[0].role in ("system", "user"):
            problem = f"{key}: begins with the role {response[0].role!r}, but not with the messages of 'prompt'"
            raise RecordError(f"{problem}. Expected a response, or the same prompt before both responses.")
    chosen, rejected = responses
    shared = 0  # number of messages that move to the prompt; each response keeps its last message
    while shared + 1 < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    prompt = _untrained([*prompt, *chosen[:shared]])
    system, tools = optional_text(record, "system") or None, _tools(record)
    other = Conversation((*prompt, *rejected[shared:]), system=system, tools=tools)
    return Conversation((*prompt, *chosen[shared:]), system=system, tools=tools, rejected=other)


def _messages_of(record: Record, key: str, role: str) -> list[Message]:
    """Return the messages under a key. A text becomes one message of `role`."""
    if isinstance(record.get(key), list):
        return read_messages(record, key, _CHAT_ROLES)
    return [Message(role, text_of(record, key))]


def _untrained(messages: Iterable[Message]) -> list[Message]:
    """Return `messages` with the weight 0 for those of the assistant; other roles take no loss anyway."""
    return [replace(message, weight=0.0) if message.role.startswith("assistant") else message for message in messages]


_MESSAGES_KEYS = ("messages", "system", "tools")
_ALPACA, _PAIR, _PREFERENCE = ("instruction", "output"), ("prompt", "completion"), ("chosen", "rejected")
_TURN = ("weight", *OPTIONAL)
_ROLE_CONTENT, _FROM_VALUE = ("role", "content", *_TURN), ("from", "value", *_TURN)

SCHEMAS: Mapping[str, Schema] = {
    "messages": Schema(_parse_messages, _MESSAGES_KEYS, _ROLE_CONTENT),
    "chat": Schema(_parse_chat, _MESSAGES_KEYS, _ROLE_CONTENT, ("messages",)),
    "episode": Schema(functools.partial(_parse_chat, roles=_EPISODE_ROLES), _MESSAGES_KEYS, _ROLE_CONTENT),
    "tools": Schema(functools.partial(_parse_chat, roles=_TOOL_ROLES), _MESSAGES_KEYS, _ROLE_CONTENT),
    "openchat": Schema(_parse_openchat, ("items", "condition", "system"), _ROLE_CONTENT, ("items",)),
    "sharegpt": Schema(_parse_sharegpt, ("conversations", "system", "tools"), _FROM_VALUE, ("conversations",)),
    "alpaca": Schema(_parse_alpaca, (*_ALPACA, "input", "system", "history"), (), _ALPACA),
    "prompt_completion": Schema(_parse_prompt_completion, (*_PAIR, "system", "tools"), _ROLE_CONTENT, _PAIR),
    "preference": Schema(_parse_preference, (*_PREFERENCE, "prompt", "system", "tools"), _ROLE_CONTENT, _PREFERENCE),
    "text": Schema(lambda record: Conversation((Message(DOCUMENT, text_of(record, "text")),)), ("text",), (), ("text",)),
}

_SIGNS = {name: frozenset(schema.signs) for name, schema in SCHEMAS.items() if schema.signs}
_ALL_KEYS = tuple(key for schema in SCHEMAS.values() for key in schema.signs)
_EXPECTED = (
    "'messages', 'conversations' (ShareGPT), 'instruction' and 'output' (Alpaca), 'prompt' and 'completion', 'items' "
    "(OpenChat), 'chosen' and 'rejected', or 'text'"
)
_NAME_THEM = " Name the keys of the question and the answer: --schema prompt_completion:prompt=KEY,completion=KEY"


def _detect(record: Record) -> str:
    """Return the name of the schema that a record's keys show."""
    present = [name for name, signs in _SIGNS.items() if signs <= record.keys()]
    # Parquet and some tools write null for absent keys, so schemas whose signs are not null take precedence
    filled = [name for name in present if all(record[key] is not None for key in _SIGNS[name])]
    if len(filled) > 1 and filled[1] != "text":  # a text next to the keys of another schema is metadata
        keys = " and ".join(repr(key) for name in filled for key in SCHEMAS[name].signs)
        raise RecordError(f"the record has {keys}, so its schema is not clear. Name it with --schema.")
    if present:
        return (filled or present)[0]
    hints = [command_for(record), *(suggestion(key, _ALL_KEYS) for key in record), _NAME_THEM]
    hint = next(hint for hint in hints if hint)
    raise RecordError(f"the record's keys are {_keys(record)}; expected {_EXPECTED}.{hint}")


def _keys(record: Record) -> str:
    """Return the first 8 keys of a record for an error message, or "none"."""
    return ", ".join(shown(key) for key in list(record)[:8]) or "none"
