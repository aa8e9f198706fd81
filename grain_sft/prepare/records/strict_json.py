"""Strict JSON: a record that two parsers could read differently is an error. Also the words for values in such errors."""

import collections
import difflib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grain_sft.errors import PrepareError, RecordError

_MAX_DEPTH = 64
"""Most levels of objects and lists. Chats need about 10; code that recurses over a record stays far from its limit."""

_TOO_DEEP = f"nested too deep; expected at most {_MAX_DEPTH} levels."

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which Python makes of bytes in a path that are not UTF-8."""

_CONTAINERS = frozenset((dict, list))
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
        value = _DECODER.decode(text.removeprefix(_BOM))
    except RecordError:
        raise
    except UnicodeDecodeError as error:
        raise RecordError(
            f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8. Convert the file to UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip())
        hint = " Are records written over several lines? `jq -c . FILE > FILE.jsonl` puts each on one." if cut else ""
        near = error.doc[error.pos : error.pos + 20]
        raise RecordError(
            f"not valid JSON at column {error.pos + 1}: {error.msg[0].lower()}{error.msg[1:]}, found "
            f"{shown(near) if near else 'the end of the line'}. Expected one whole JSON object in a line.{hint}"
        ) from error
    except RecursionError as error:
        raise RecordError(f"objects and lists are {_TOO_DEEP}") from error
    except ValueError as error:  # a number of thousands of digits
        raise RecordError(f"a number that can't be read: {error}.") from error
    flat = isinstance(value, dict) and _CONTAINERS.isdisjoint(map(type, value.values()))  # brackets may be in its text
    if not flat and text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise RecordError(f"objects and lists are {_TOO_DEEP}")
    if _SUSPICIOUS.search(text):
        for path, string in strings(value):
            check_text(string, path)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
        raise RecordError(
            f"key {shown(twice)} occurs twice in one object, and which one counts is not defined. Remove one."
        )
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
    levels, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list | tuple)]:
        level = [entry for each in level for entry in (each.values() if isinstance(each, dict) else each)]
        levels += 1
    return levels


def check_text(text: str, where: str) -> None:
    """Refuse a text with NUL or half a surrogate pair, which no UTF-8 text file can hold."""
    if "\0" in text:
        raise RecordError(f"{where}: character {text.index(chr(0))} is NUL (\\u0000). Remove it.")
    if not text.isascii() and (found := _SURROGATE.search(text)):
        raise RecordError(
            f"{where}: character {found.start()} is \\u{ord(found.group()):04x}, half of a surrogate pair, which is not a "
            "character. Write the whole pair, or remove it."
        )


def check_name(name: str, value: object) -> None:
    """Refuse a text that no JSON file can hold: paths may have bytes that are not UTF-8."""
    if isinstance(value, str) and ("\0" in value or _SURROGATE.search(value)):
        raise PrepareError(f"{name} {value!a}: has NUL or a byte that is not UTF-8. Rename it, or write it again.")


def check_json(value: object, where: str) -> None:
    """Refuse a value that JSON can't hold; rows of Parquet may have one."""
    if _depth(value) > _MAX_DEPTH:
        raise RecordError(f"{where}: {_TOO_DEEP}")
    for path, leaf in _leaves(value, where):
        if isinstance(leaf, str):
            check_text(leaf, path)
        elif not (leaf is None or isinstance(leaf, int) or (isinstance(leaf, float) and math.isfinite(leaf))):
            raise RecordError(f"{path}: {shown(leaf)}; expected what JSON can hold.")


def strings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of every string in a parsed value, keys included, in order."""
    return ((where, leaf) for where, leaf in _leaves(value, path) if isinstance(leaf, str))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield path and value of every key, and of everything that is not an object or a list."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{path}: key {shown(key)}; expected a string.")
            yield f"a key of {path or 'the record'}", key
            yield from _leaves(entry, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{number}]")
    else:
        yield path or "the record", value


def shown(value: object) -> str:
    """Return a value for a message: short, on one line, in plain characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


@functools.lru_cache(maxsize=1024)
def suggestion(word: object, choices: tuple[str, ...], least: float = 0.7) -> str:
    """Return " Did you mean ...?" where one of `choices` is close to `word`, else nothing."""
    matches = difflib.get_close_matches(word[:100].lower(), choices, 1, least) if isinstance(word, str) else []
    return f" Did you mean {matches[0]!r}?" if matches and matches[0] != word else ""


def found(entry: Mapping[str, Any], key: str) -> str:
    """Return the kind of the value of a key, for a message."""
    return kind(entry[key]) if key in entry else "is missing"


def kind(value: object) -> str:
    """Return the kind of a value in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {shown(value)}"
    if isinstance(value, str):
        return f"a string ({shown(value)})"
    if isinstance(value, bytes):
        return _bytes(value)
    names: dict[type[object], str] = {list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _bytes(value: bytes) -> str:
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return f"bytes that are not UTF-8 (byte {error.start} is {value[error.start]:#04x})"
    return f"bytes ({shown(value)})"
