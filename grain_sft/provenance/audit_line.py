"""Lines of an audit log, as JSON and as text in the format of the episode-indexed loader:

2026-01-03T16:44:19.629Z | TRAINING | INFO | action=epoch_start | epoch=0 | seed=42 | ... | entry=2"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Fields = dict[str, Any]

# `entry`, the last field, is the number of the line in its file. Logs before version 0.2 have a hash `chain` after it, which is
# ignored: it had no key, so who changed a line could compute it again.
CUT = b" | half written"
"""End of a line that a process did not finish, appended by the next process that writes to the file."""

_CHANNEL = "TRAINING | INFO"
_BARE = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z0-9_.:/+@-]*")
_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"|]+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def text_line(time: str, fields: Mapping[str, Any]) -> str:
    """Return an entry as a line of text, without its newline."""
    return " | ".join([time, _CHANNEL, *(f"{name}={as_text(value)}" for name, value in fields.items())])


def json_line(time: str, fields: Mapping[str, Any]) -> str:
    """Return an entry as a line of JSON, without its newline."""
    return json.dumps({"time": time, **fields})


FORMATS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {".log": text_line, ".jsonl": json_line}
"""Writer of a line, by the suffix of the file."""


def read_line(line: bytes) -> dict[str, str]:
    """Return the fields of a line, each as `as_text` writes its value, or raise ValueError where it is not an entry."""
    text = line.decode()
    if text.startswith("{"):
        parsed = json.loads(text)
        fields, time = {name: as_text(value) for name, value in parsed.items()}, parsed.get("time")
    else:
        time, *channel = text.split(" | ", 3)[:3]
        rest = text[len(" | ".join([time, *channel])) :]
        found = _FIELD.findall(rest)
        if " | ".join(channel) != _CHANNEL or rest != "".join(f" | {name}={value}" for name, value in found):
            raise ValueError("it does not have the form 'time | TRAINING | INFO | name=value | ...'")
        fields = {"time": as_text(time), **dict(found)}
    if not isinstance(time, str) or not _TIME.fullmatch(time) or "action" not in fields:
        raise ValueError("it has no time such as 2026-01-03T16:44:19.628Z, or no action")
    return fields


def as_text(value: object) -> str:
    """Return a value as a line of text holds it: lists and objects as JSON in quotes."""
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    if isinstance(value, (list, dict)):
        return json.dumps(json.dumps(value))
    return json.dumps(value)
