"""Records whose keys have other names than a schema's: `--schema NAME:KEY=NAME_IN_THE_FILE,...`, and a proposal of it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from grain_sft.prepare.records.messages import Record

TURN_KEYS = ("role", "content", "weight", "from", "value")
"""Keys of the messages of a record; all others are of the record."""

_PROMPTS = ("question", "query", "instruction", "input", "prompt", "problem", "user", "human")
_COMPLETIONS = ("answer", "response", "output", "completion", "reply", "solution", "chosen", "assistant", "target")
_SYSTEMS = ("system_prompt", "system_message")
_TEXTS = ("content", "document", "body", "raw_content", "passage", "article", "code")
_ROLES = ("role", "from", "speaker", "author", "sender")
_CONTENTS = ("content", "value", "text", "message", "utterance")
_KNOWN_ROLES = {"system", "user", "assistant", "tool", "human", "gpt"}


def renamed(record: Record, keys: Mapping[str, str]) -> Record:
    """Return a record under the keys of its schema.

    Args:
      record: The record of a file. It is not changed.
      keys: For each key of the schema that is mapped, the key in the file.
    """
    of_turns = {source: key for key, source in keys.items() if key in TURN_KEYS}
    of_record = {source: key for key, source in keys.items() if key not in TURN_KEYS}
    found = _with_keys(record, of_record)
    if of_turns:
        for key, value in found.items():
            if isinstance(value, list):
                found[key] = [_with_keys(turn, of_turns) if isinstance(turn, dict) else turn for turn in value]
    return found


def _with_keys(values: Record, names: Mapping[str, str]) -> Record:
    """Return the values under new names; an old key of such a name is left out."""
    taken = {name for source, name in names.items() if source in values}
    kept = {key: value for key, value in values.items() if key not in names and key not in taken}
    return kept | {name: values[source] for source, name in names.items() if source in values}


def command_for(record: Record) -> str:
    """Return a sentence with the option that reads a record of an unknown schema; "" where its keys suggest none."""
    schema = _turns(record) or _pair(record) or _text(record)
    return f" If these are what their names say, add --schema {schema}" if schema is not None else ""


def _turns(record: Record) -> str | None:
    """Return the option for a record with a list of messages under another name."""
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
    """Return the option for a record with a question and an answer under other names."""
    prompt, completion = _first_text(record, _PROMPTS), _first_text(record, _COMPLETIONS)
    if prompt is None or completion is None:
        return None
    system = _first_text(record, _SYSTEMS)
    texts = [key for key, value in record.items() if isinstance(value, str) and _can_be_named(key)]
    if "instruction" in texts:  # as in Dolly: an instruction may have an input
        names = [("input", "input" if "input" in texts else "context" if "context" in texts else "input")]
        names += [("output", completion), ("system", system or "system")]
        return "alpaca:" + ",".join(f"{name}={source}" for name, source in names if name != source)
    names = [("prompt", prompt), ("completion", completion), *([("system", system)] if system else [])]
    return "prompt_completion:" + ",".join(f"{name}={source}" for name, source in names if name != source)


def _text(record: Record) -> str | None:
    """Return the option for a record with a plain document under another name."""
    found = _first_text(record, _TEXTS)
    return f"text:text={found} --template text" if found else None


def _first_text(record: Record, names: tuple[str, ...]) -> str | None:
    """Return the record's key for the first of these names that has a text."""
    texts = [key for key, value in record.items() if isinstance(value, str) and _can_be_named(key)]
    return next((key for name in names for key in texts if key.lower() == name), None)


def _can_be_named(*keys: str) -> bool:
    """Return whether keys need no quoting in the option and in a shell."""
    return all(re.fullmatch(r"[A-Za-z0-9_.-]+", key) for key in keys)
