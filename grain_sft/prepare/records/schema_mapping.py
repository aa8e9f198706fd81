"""Renaming of a record's keys by `--schema NAME:KEY=KEY_IN_THE_FILE,...`, and suggestions of this option for a record."""

import re
from collections.abc import Collection, Iterable, Mapping

from grain_sft.errors import RecordError
from grain_sft.prepare.records.conversation import Record
from grain_sft.prepare.records.strict_json import shown

# Usual names of a key, the likeliest first.
_PROMPTS = ("question", "query", "instruction", "input", "prompt", "problem", "user", "human")
_COMPLETIONS = ("answer", "response", "output", "completion", "reply", "solution", "chosen", "assistant", "target")
SYSTEMS = ("system_prompt", "system_message")
_TEXTS = ("content", "document", "body", "raw_content", "passage", "article", "code")
_ROLES = ("role", "from", "speaker", "author", "sender")
_CONTENTS = ("content", "value", "text", "message", "utterance")
_KNOWN_ROLES = {"system", "user", "assistant", "tool", "human", "gpt"}


def renamed(record: Record, names: Mapping[str, str], keys: Collection[str], turn_keys: Collection[str]) -> Record:
    """Return `record` with the keys of the schema instead of those of the file. `names` is {schema's key: file's key}.

    `keys` are the schema's keys of a record, and `turn_keys` those of a message. The keys in `turn_keys` are renamed in each
    message, and those in `keys` in the record itself.
    """
    names_in_turns = {key: source for key, source in names.items() if key in turn_keys}
    result = _with_keys(record, {key: source for key, source in names.items() if key in keys}, "the record")
    for key, value in result.items():
        if isinstance(value, list) and key in keys and key != "tools":  # the items are messages; tools keep their keys
            result[key] = [_with_keys(turn, names_in_turns, key) if isinstance(turn, dict) else turn for turn in value]
    return result


def _with_keys(values: Record, names: Mapping[str, str], where: str) -> Record:
    """Return `values` with keys renamed by `names`, {new: old}. If `old` is "", the key `new` is left out."""
    for new, old in names.items():
        if old and old not in values and new in values:
            problem = f"{where}: has {shown(new)}, but not {shown(old)}, which is read in its place"
            raise RecordError(f"{problem}. Rename the key, or remove it.")
    others = {key: value for key, value in values.items() if key not in names and key not in names.values()}
    return others | {new: values[old] for new, old in names.items() if old and old in values}


def command_for(record: Record) -> str:
    """Return a suggestion of `--schema` for a record of unknown schema; "" if no schema fits."""
    schema = _option_for_turns(record) or _option_for_texts(record)
    return f" If the keys mean what their names say, add --schema {schema}" if schema else ""


def _option_for_turns(record: Record) -> str:
    """Return the value of `--schema` for a record with a list of messages, else ""."""
    if "rejected" in record:  # a preference pair, whose lists are responses
        return ""
    for key, value in record.items():
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            continue
        text_keys = [name for name, text in value[0].items() if isinstance(text, str)]
        role = next((name for name in _ROLES if name in text_keys), "")
        content = next((name for name in _CONTENTS if name in text_keys), "")
        are_turns = all(isinstance(turn, dict) and str(turn.get(role)) in _KNOWN_ROLES for turn in value)
        if not (role and content and are_turns and _needs_no_quotes(key)):
            continue
        # schema chat does not know the roles "human" and "gpt"; sharegpt does
        if (role, content) == ("role", "content") and not any(turn[role] in ("human", "gpt") for turn in value):
            return f"chat:messages={key}"
        return _option("sharegpt", (("conversations", key), ("from", role), ("value", content)))
    return ""


def _option_for_texts(record: Record) -> str:
    """Return the value of `--schema` for a record with a prompt and an answer, or a text, else ""."""
    text_keys = [key for key, value in record.items() if isinstance(value, str) and _needs_no_quotes(key)]

    def first(names: tuple[str, ...]) -> str:
        """Return the first of `names` that is a key of the record, as the record spells the key (such as "Text"); else ""."""
        return next((key for name in names for key in text_keys if key.lower() == name), "")

    prompt, completion, system, text = first(_PROMPTS), first(_COMPLETIONS), first(SYSTEMS), first(_TEXTS)
    if "chosen" in record and "rejected" in record:
        return _option("preference", (("prompt", prompt), ("system", system))) if prompt else ""
    if prompt and completion and "instruction" in text_keys:
        input_key = "context" if "context" in text_keys and "input" not in text_keys else "input"  # as in Dolly
        return _option("alpaca", (("input", input_key), ("output", completion), ("system", system)))
    if prompt and completion:
        return _option("prompt_completion", (("prompt", prompt), ("completion", completion), ("system", system)))
    return f"text:text={text} --template text" if text else ""


def _option(schema: str, names: Iterable[tuple[str, str]]) -> str:
    """Return "text:text=body" for schema "text" and names [("text", "body")]. Leave out pairs like ("a", "a") or ("a", "")."""
    return f"{schema}:" + ",".join(f"{name}={source}" for name, source in names if source not in ("", name))


def _needs_no_quotes(key: object) -> bool:
    """Return whether a key is a text that needs no quotes in the option or the shell."""
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", key) is not None
