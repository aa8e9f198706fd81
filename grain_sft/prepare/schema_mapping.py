"""`--schema NAME:KEY=NAME_IN_THE_FILE,...`: records of a known schema under other names."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.errors import PrepareError
from grain_sft.prepare.error_text import listed

Record = dict[str, Any]

_TURN_KEYS = ("role", "content", "weight", "from", "value")
"""Keys of the messages of a record; all others are of the record."""

_MESSAGES = ("messages", "system", "tools", *_TURN_KEYS[:3])
_KEYS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("messages", "chat", "episode", "tools"), _MESSAGES),
    "openchat": ("items", "condition", "system", *_TURN_KEYS[:3]),
    "sharegpt": ("conversations", "system", "tools", *_TURN_KEYS[2:]),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "prompt_completion": ("prompt", "completion", "system", *_TURN_KEYS[:3]),
    "text": ("text",),
}

_PROMPTS = ("question", "query", "instruction", "input", "prompt", "problem", "user", "human")
_COMPLETIONS = ("answer", "response", "output", "completion", "reply", "solution", "chosen", "assistant", "target")
_SYSTEMS = ("system_prompt", "system_message")
_TEXTS = ("content", "document", "body", "raw_content", "passage", "article", "code")
_ROLES = ("role", "from", "speaker", "author", "sender")
_CONTENTS = ("content", "value", "text", "message", "utterance")
_KNOWN_ROLES = {"system", "user", "assistant", "tool", "human", "gpt"}


@functools.lru_cache(maxsize=64)
def parse_schema(schema: str) -> tuple[str, Mapping[str, str]]:
    """Return the name of a schema, and for each of its keys that is mapped the key in the file.

    Raises:
      PrepareError: A pair is not KEY=KEY, or the schema has no such key.
    """
    name, colon, rest = schema.partition(":")
    keys: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, source = pair.partition("=")
        if not (key and equals and source):
            raise PrepareError(f"schema {schema!r}: {pair!r} is not a pair. Expected NAME:KEY=KEY_IN_THE_FILE,...")
        if name in _KEYS and key not in _KEYS[name]:
            raise PrepareError(f"schema {schema!r}: has no key {key!r}. Expected one of {listed(_KEYS[name])}.")
        keys[key] = source
    if name == "auto" and keys:
        raise PrepareError(f"schema {schema!r}: keys can be mapped to those of a named schema only, not of 'auto'.")
    return name, keys


def renamed(record: Record, keys: Mapping[str, str]) -> Record:
    """Return a record under the keys of its schema.

    Args:
      record: The record of a file. It is not changed.
      keys: For each key of the schema that is mapped, the key in the file.
    """
    of_turns = {source: key for key, source in keys.items() if key in _TURN_KEYS}
    of_record = {source: key for key, source in keys.items() if key not in _TURN_KEYS}
    found = _with_keys(record, of_record)
    if of_turns:
        for key, value in found.items():
            if isinstance(value, list):
                found[key] = [_with_keys(turn, of_turns) if isinstance(turn, dict) else turn for turn in value]
    return found


def _with_keys(values: Record, names: Mapping[str, str]) -> Record:
    """The values under new names; an old key of such a name is left out."""
    taken = {name for source, name in names.items() if source in values}
    kept = {key: value for key, value in values.items() if key not in names and key not in taken}
    return kept | {name: values[source] for source, name in names.items() if source in values}


def command_for(record: Record) -> str:
    """Return a sentence with the option that reads a record of no known schema; "" where its keys don't suggest one."""
    schema = _turns(record) or _pair(record) or _text(record)
    return f" If these are what their names say, add --schema {schema}" if schema is not None else ""


def _turns(record: Record) -> str | None:
    """The option for a record with a list of messages under another name."""
    for key, value in record.items():
        if key == "rejected" or not (isinstance(value, list) and value and isinstance(value[0], dict)):
            continue
        role = next((name for name in _ROLES if isinstance(value[0].get(name), str)), None)
        content = next((name for name in _CONTENTS if isinstance(value[0].get(name), str)), None)
        if role is None or content is None or not _can_be_named(key, role, content):
            continue
        if not all(isinstance(turn, dict) and str(turn.get(role)) in _KNOWN_ROLES for turn in value):
            continue
        if (role, content) == ("role", "content") and not any(turn[role] in ("human", "gpt") for turn in value):
            return f"chat:messages={key}"
        names = [("conversations", key), ("from", role), ("value", content)]
        return "sharegpt:" + ",".join(f"{name}={source}" for name, source in names if name != source)
    return None


def _pair(record: Record) -> str | None:
    """The option for a record with a question and an answer under other names."""
    texts = [key for key, value in record.items() if isinstance(value, str) and _can_be_named(key)]
    prompt = next((key for name in _PROMPTS for key in texts if key.lower() == name), None)
    completion = next((key for name in _COMPLETIONS for key in texts if key.lower() == name), None)
    if prompt is None or completion is None:
        return None
    system = next((key for key in texts if key.lower() in _SYSTEMS), None)
    if "instruction" in texts:  # as in Dolly: an instruction may have an input
        names = [("input", "input" if "input" in texts else "context" if "context" in texts else "input")]
        names += [("output", completion), ("system", system or "system")]
        return "alpaca:" + ",".join(f"{name}={source}" for name, source in names if name != source)
    names = [("prompt", prompt), ("completion", completion), *([("system", system)] if system else [])]
    return "prompt_completion:" + ",".join(f"{name}={source}" for name, source in names if name != source)


def _text(record: Record) -> str | None:
    """The option for a record with a plain document under another name."""
    texts = [key for key, value in record.items() if isinstance(value, str) and _can_be_named(key)]
    found = next((key for name in _TEXTS for key in texts if key.lower() == name), None)
    return f"text:text={found} --template text" if found else None


def _can_be_named(*keys: str) -> bool:
    """Whether keys can stand in the option as they are, also in a shell."""
    return all(
        key and key.replace("_", "a").replace("-", "a").replace(".", "a").isalnum() and key.isascii() for key in keys
    )
