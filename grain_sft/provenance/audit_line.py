"""Lines of an audit log: how an entry is written as text and as JSON, read back, and sealed.

As text, in the format of the episode-indexed loader::

    2026-01-03T16:44:19.629Z | TRAINING | INFO | action=epoch_start | epoch=0 | seed=42 | ... | entry=2 | chain=9f0c...

and as JSON the same names and values, with `time`. Lists and objects are JSON in quotes in the text.

`entry` counts the lines from 1. `chain` is a hash of the chain before it and of all bytes that were written since, so
that a line that was changed, removed or inserted does not fit any more. It has no key: it shows what was done by mistake
or in haste, and who can compute hashes can write another log.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]

FIRST_CHAIN = ""
"""The chain before the first line."""

_CHANNEL = "TRAINING | INFO"
_BARE = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z0-9_.:/+@-]*")
_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"|]+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_SEALED = re.compile(
    rb'(?:(?P<text> \| entry=(?P<entry>\d+)) \| chain=(?P<chain>[0-9a-f]{32})|(?P<json>, "entry": (?P<jentry>\d+)), "chain": '
    rb'"(?P<jchain>[0-9a-f]{32})"\})$'
)


@dataclasses.dataclass(frozen=True)
class Seal:
    """The end of a sealed line.

    Attributes:
      entry: its number.
      chain: what it says that the hash is.
      covered: bytes of the line that the hash is of.
    """

    entry: int
    chain: str
    covered: int


def text_line(time: str, fields: Mapping[str, Any]) -> bytes:
    """An entry as text, without its seal."""
    return " | ".join([time, _CHANNEL, *(f"{name}={as_text(value)}" for name, value in fields.items())]).encode()


def json_line(time: str, fields: Mapping[str, Any]) -> bytes:
    """An entry as JSON, without its seal and the brace at the end."""
    return json.dumps({"time": time, **fields})[:-1].encode()


def sealed(body: bytes, entry: int, before: bytes, previous: str) -> tuple[bytes, str]:
    """A line with its seal, and the chain up to it.

    Args:
      body: of `text_line` or `json_line`.
      before: what was written since the line with the chain `previous`: half a line, or nothing.
    """
    is_json = body.startswith(b"{")
    body += f', "entry": {entry}'.encode() if is_json else f" | entry={entry}".encode()
    chain = chain_of(previous, before + body)
    return body + (f', "chain": "{chain}"}}'.encode() if is_json else f" | chain={chain}".encode()), chain


def lines_of(data: bytes) -> list[bytes]:
    """The lines of a file, without their newlines; also a last one that has none."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def seal_of(line: bytes) -> Seal | None:
    """The seal of a line (without its newline); None where it has none, as half a line has not."""
    match = _SEALED.search(line)
    if match is None:
        return None
    kind = "" if match["text"] is not None else "j"
    return Seal(int(match[f"{kind}entry"]), match[f"{kind}chain"].decode(), match.end("json" if kind else "text"))


def chain_of(previous: str, written: bytes) -> str:
    """The chain after `written`, which came after the line with the chain `previous`."""
    return hashlib.blake2b(previous.encode() + b"\n" + written, digest_size=16).hexdigest()


def read_line(line: bytes) -> dict[str, str]:
    """The fields of a sealed line, `time`, `entry` and `chain` among them, each as `as_text` writes its value.

    Raises:
      ValueError: the line is no entry.
    """
    text = line.decode()
    if text.startswith("{"):
        stated = json.loads(text)
        fields, time = {name: as_text(value) for name, value in stated.items()}, stated.get("time")
    else:
        time, *channel = text.split(" | ", 3)[:3]
        rest = text[len(" | ".join([time, *channel])) :]
        found = _FIELD.findall(rest)
        if " | ".join(channel) != _CHANNEL or rest != "".join(f" | {name}={value}" for name, value in found):
            raise ValueError("it is not of the form 'time | TRAINING | INFO | name=value | ...'")
        fields = {"time": as_text(time), **dict(found)}
    if not isinstance(time, str) or not _TIME.fullmatch(time) or "action" not in fields:
        raise ValueError("it has no time such as 2026-01-03T16:44:19.628Z, or no action")
    return fields


def as_text(value: object) -> str:
    """A value as a line of text holds it."""
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    if isinstance(value, (list, dict)):
        return json.dumps(json.dumps(value))
    return json.dumps(value)
