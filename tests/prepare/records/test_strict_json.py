"""`parse_json` returns the value of a line of JSON, or states what is wrong with the line and where."""

import json

import pytest
from batches import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft.errors import RecordError
from grain_sft.prepare import parse_json

WRONG_JSON = [
    (b'{"a": "\xff"}', ["byte 7", "0xff", "UTF-8"]),
    (b'{"a": "\xed\xa0\x80"}', ["byte 7", "UTF-8"]),  # half a surrogate pair, as three bytes
    ('{"a": 1}'.encode("utf-16"), ["byte 0 (0xff) is not UTF-8"]),
    ('{"a": 1}'.encode("utf-16-le"), ["column 2"]),
    (b'{"a": 1', ["column 8", "end of the line"]),
    (b'{"a": 1} x', ["column 10", "extra data"]),
    (b'{"a" 1}', ["column 6", "'1}'"]),
    (b"", ["column 1"]),
    (b"{'a': 1}", ["column 2"]),
    *((line, ["column 8"]) for line in (b'{"a": "\x01"}', rb'{"a": "\x41"}')),
    (b'{"a": "\\udc00\\ud800"}', ["half of a surrogate pair"]),
    (b'{"a": 1, "b": {"c": 1, "c": 1}}', ["key 'c' is repeated"]),
    *((b'{"a": %b}' % number.encode(), [number]) for number in ("NaN", "-Infinity", "1e999")),
    (b'{"a": ' + b"1" * 5000 + b"}", ["number"]),
    (b'{"a": [{"b": "x\\u0000"}]}', ["a[0].b: character 1 is NUL"]),
    (b'{"a": "\\ud800"}', ["a: character 0 is \\ud800"]),
    (b'{"\\udc00": 1}', ["a key of the record: character 0 is \\udc00"]),
    *((line, ["nested too deep"]) for line in (b"[" * 100_000, b"[" * 65 + b"]" * 65)),
]


@pytest.mark.parametrize(("line", "parts"), WRONG_JSON)
def test_the_error_of_a_line_that_is_not_strict_json_names_the_mistake(line, parts):
    with pytest.raises(RecordError) as error:
        parse_json(line)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert len(message) < 400 and message.isprintable()


STRICT_JSON = [
    (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
    (b'{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    (b'{"a": "\\\\u0000"}', {"a": "\\u0000"}),
    (b"[" * 64 + b"]" * 64, json.loads("[" * 64 + "]" * 64)),
    (json.dumps({"a": "{[" * 1000}).encode(), {"a": "{[" * 1000}),
    (b' {"a": 0}\r\n', {"a": 0}),
]


@pytest.mark.parametrize(("line", "value"), STRICT_JSON)
def test_strict_json_is_read(line, value):
    assert parse_json(line) == value


@settings(max_examples=examples(300))
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0\\und8e \ufeff\u00e9', max_size=60).map(str.encode))
def test_any_bytes_are_a_value_or_a_record_error(line):
    try:
        value = parse_json(line)
    except RecordError:
        return
    assert json.loads(line.decode("utf-8-sig")) == value
