"""JSON as records may have it: a value that two parsers could read differently is an error. And words for such errors."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from grain_sft.errors import PrepareError, RecordError

MAX_DEPTH = 64
"""Most levels of objects and lists. Chats need about 10; code that recurses over a record stays far from its limit."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which Python makes of bytes in a path that are not UTF-8."""

_SUSPICIOUS = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_BOM = "\ufeff"


def parse_json(line: bytes) -> object:
    """Return the value of one line of JSON.

    Raises:
      RecordError: The line is not UTF-8 or not JSON, an object has a key twice, a number is not finite, a text holds a
        NUL or half a surrogate pair, or objects are nested deeper than 64.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8. Convert the file to UTF-8."
        ) from error
    try:
        value = _DECODER.decode(text.removeprefix(_BOM))
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip())
        hint = " Are records written over several lines? `jq -c . FILE > FILE.jsonl` puts each on one." if cut else ""
        raise RecordError(
            f"not valid JSON at column {error.pos + 1}: {error.msg[0].lower()}{error.msg[1:]}, found "
            f"{_near(error.doc, error.pos)}. Expected one whole JSON object in a line.{hint}"
        ) from error
    except RecursionError as error:
        raise RecordError(_too_deep()) from error
    except _KeyTwiceError as error:
        raise RecordError(
            f"key {shown(error.args[0])} occurs twice in one object, and which one counts is not defined. Remove one."
        ) from error
    except ValueError as error:  # a number of thousands of digits
        raise RecordError(f"a number that can't be read: {error}.") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise RecordError(_too_deep())
    if _SUSPICIOUS.search(text):
        for path, string in strings(value):
            check_text(string, path)
    return value


def check_text(text: str, where: str) -> None:
    """Refuse a text with NUL or half a surrogate pair, which no UTF-8 text file can hold."""
    if "\0" in text:
        raise RecordError(f"{where}: character {text.index(chr(0))} is NUL (\\u0000). Remove it.")
    if not text.isascii() and (found := SURROGATE.search(text)):
        raise RecordError(
            f"{where}: character {found.start()} is \\u{ord(found.group()):04x}, half of a surrogate pair, which is not a "
            "character. Write the whole pair, or remove it."
        )


def check_name(name: str, value: object) -> None:
    """Refuse a text that no JSON file can hold: paths may have bytes that are not UTF-8."""
    if isinstance(value, str) and ("\0" in value or (not value.isascii() and SURROGATE.search(value))):
        raise PrepareError(f"{name} {value!a}: has NUL or a byte that is not UTF-8. Rename it, or write it again.")


def strings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of every string in a parsed value, keys included, in order."""
    if isinstance(value, str):
        yield path or "the record", value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield f"a key of {path or 'the record'}", key
            yield from strings(entry, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from strings(entry, f"{path}[{number}]")


def shown(value: object) -> str:
    """Return a value for a message: short, on one line, in plain characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


class _KeyTwiceError(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _KeyTwiceError(key)
            seen.add(key)
    return found


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{shown(text)} is beyond what a float holds")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def _depth(value: object) -> int:
    """Return the number of levels of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [entry for each in level for entry in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


def _too_deep() -> str:
    return f"objects and lists are nested too deep; expected at most {MAX_DEPTH} levels."


def _near(text: str, position: int) -> str:
    return shown(text[position : position + 20]) if position < len(text) else "the end of the line"


@functools.lru_cache(maxsize=1024)
def _closest(word: str, choices: tuple[str, ...], least: float) -> str:
    matches = difflib.get_close_matches(word[:100].lower(), choices, 1, least)
    return matches[0] if matches and matches[0] != word else ""


def suggestion(word: object, choices: Collection[str], least: float = 0.7) -> str:
    """Return " Did you mean ...?" where one of `choices` is close to `word`, else nothing."""
    closest = _closest(word, tuple(choices), least) if isinstance(word, str) else ""
    return f" Did you mean {closest!r}?" if closest else ""


def found(entry: Mapping[str, Any], key: str) -> str:
    """Return the kind of the value of a key, for a message."""
    return kind(entry[key]) if key in entry else "is missing"


def kind(value: object) -> str:
    """Return the kind of a value in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {shown(value)}"
    names: dict[type[object], str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}") + (
        f" ({shown(value)})" if isinstance(value, str) else ""
    )
