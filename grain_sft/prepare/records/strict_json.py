"""Strict JSON: a parser, checks of parsed values, and descriptions of values for error messages."""

import collections
import difflib
import functools
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from grain_sft.errors import PrepareError, RecordError

_MAX_DEPTH = 64  # most levels of objects and lists; chats have about 10

_NESTED = (dict, list, tuple)
_TOO_DEEP = f"objects and lists are nested too deep; expected at most {_MAX_DEPTH} levels."

_SURROGATE = re.compile("[\ud800-\udfff]")
_SUSPICIOUS = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")  # the escapes of NUL and surrogates


def parse_json(line: bytes) -> object:
    """Return the value of one line of JSON.

    Raises:
      RecordError: The line is not UTF-8 or not JSON, an object has a key twice, a number is not finite, a string contains
        NUL or half of a surrogate pair, or there are more than 64 levels of objects and lists.
    """
    try:
        text = line.decode()
        value = _DECODER.decode(text.removeprefix("\ufeff"))
    except RecordError:
        raise
    except UnicodeDecodeError as error:
        raise RecordError(f"byte {error.start} ({line[error.start]:#04x}) is not UTF-8. Convert the file.") from error
    except json.JSONDecodeError as error:
        near = error.doc[error.pos : error.pos + 20]
        where = shown(near) if near else "the end of the line"
        reason = error.msg.removesuffix(" at").removesuffix(" starting")  # as in "Unterminated string starting at"
        is_cut = error.pos >= len(error.doc.rstrip())
        hint = " Does a record span several lines? Join them: `jq -c . FILE > FILE.jsonl`." if is_cut else ""
        problem = f"not valid JSON at column {error.pos + 1}: {reason[0].lower()}{reason[1:]}, found {where}"
        raise RecordError(f"{problem}. Expected one whole JSON object in a line.{hint}") from error
    except RecursionError as error:
        raise RecordError(_TOO_DEEP) from error
    except ValueError as error:  # NaN, infinity, or a number of thousands of digits
        raise RecordError(f"a number can't be read: {error}.") from error
    # the fast check comes first: a text with few brackets can't be too deep
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_too_deep(value):
        raise RecordError(_TOO_DEEP)
    if _SUSPICIOUS.search(text):
        for path, string in strings(value):
            check_text(string, path)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of an object. Refuse repeated keys."""
    value = dict(pairs)
    if len(value) != len(pairs):
        repeated, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise RecordError(f"key {shown(repeated)} is repeated in an object, so its value is undefined. Keep one.")
    return value


def _float(text: str) -> float:
    """Return a parsed number. Refuse NaN, Infinity and 1e999, which Python reads as infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is not a finite number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_float, parse_float=_float)


def _is_too_deep(value: object, levels: int = _MAX_DEPTH) -> bool:
    if not isinstance(value, _NESTED):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_too_deep(child, levels - 1) for child in children if isinstance(child, _NESTED))


def decoded(data: bytes, encoding: str = "utf-8") -> str | bytes:
    """Return `data` as text, or unchanged if `encoding` can't decode it. `text_of` refuses undecoded bytes later."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return data


def check_text(text: str, where: str) -> None:
    """Raise a `RecordError` if `text` contains NUL or half of a surrogate pair."""
    if "\0" in text:
        raise RecordError(f"{where}: character {text.index(chr(0))} is NUL (\\u0000). Remove it.")
    if not text.isascii() and (half := _SURROGATE.search(text)):
        problem = f"{where}: character {half.start()} is \\u{ord(half.group()):04x}, half of a surrogate pair"
        raise RecordError(f"{problem}, which is not a character. Write the whole pair, or remove it.")


def check_name(name: str, value: object) -> None:
    """Raise a `PrepareError` if a string, such as a path, contains NUL or a byte that is not UTF-8."""
    # Python represents a byte of a path that is not UTF-8 as a surrogate
    if isinstance(value, str) and ("\0" in value or _SURROGATE.search(value)):
        raise PrepareError(f"{name} {value!a} contains NUL or a byte that is not UTF-8. Rename it, or correct it.")


def check_json(value: object, where: str) -> None:
    """Raise a `RecordError` if JSON can't represent a value, such as a date in a row of Parquet."""
    if _is_too_deep(value):
        raise RecordError(f"{where}: {_TOO_DEEP}")
    for path, leaf in _leaves(value, where):
        if isinstance(leaf, str):
            check_text(leaf, path)
        elif not (leaf is None or isinstance(leaf, int) or (isinstance(leaf, float) and math.isfinite(leaf))):
            raise RecordError(f"{path}: {shown(leaf)}; expected a value of JSON.")


def strings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the pair (path, text) of every string in `value`, including keys. A path is a place, such as "messages[0].content".

    `path` is the path of `value` itself.
    """
    return ((where, leaf) for where, leaf in _leaves(value, path) if isinstance(leaf, str))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the pair (path, value) of every key and scalar, as `strings` does for strings."""
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
    """Return `value` in ASCII on one line, for an error message. A text of more than 80 characters is cut to 60."""
    text = ascii(value)
    length = len(value) if isinstance(value, str) else len(text)
    return text if len(text) <= 80 else f"{text[:60]}... ({length} characters)"


@functools.lru_cache(maxsize=1024)
def suggestion(word: Hashable, choices: tuple[str, ...], least: float = 0.7) -> str:
    """Return " Did you mean 'X'?" for the choice most similar to `word`; "" if none has the similarity `least`, from 0 to 1."""
    matches = difflib.get_close_matches(word[:100].lower(), choices, 1, least) if isinstance(word, str) else []
    return f" Did you mean {matches[0]!r}?" if matches and matches[0] != word else ""


def found(entry: Mapping[str, Any], key: str) -> str:
    """Return the `kind` of the value under `key`, or "is missing"."""
    return kind(entry[key]) if key in entry else "is missing"


def kind(value: object) -> str:
    """Return a description of a value, with JSON's names of types."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {shown(value)}"
    if isinstance(value, str):
        return f"a string ({shown(value)})"
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            return f"bytes that are not UTF-8 (byte {error.start} is {value[error.start]:#04x})"
        return f"bytes ({shown(value)})"
    names: dict[type[object], str] = {list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
