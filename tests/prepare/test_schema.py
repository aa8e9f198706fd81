"""Schemas: what each accepts, and what it says of what it doesn't."""

from __future__ import annotations

import cProfile
import json

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import SCHEMAS, Conversation, Message, parse_json, parse_record

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]


def messages(*extra: object) -> dict:
    return {"messages": [{"role": "user", "content": "u"}, *extra]}


def check_error(record: object, schema: str, *parts: str) -> None:
    with pytest.raises(RecordError) as error:
        parse_record(record, schema)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("schema", ["messages", "auto", "chat"])
def test_messages_are_read_in_order(schema):
    expected = (Message("system", "s"), Message("user", ""), Message("assistant", "a"))
    assert parse_record({"messages": CHAT}, schema) == Conversation(expected)


def user(**message: object) -> dict:
    return messages({"role": "user", "content": "x", **message})


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({}, ["messages: is missing"]),
        ({"mesages": []}, ["key 'mesages'", "Did you mean 'messages'?"]),
        ({"messages": CHAT, "tools": [{"name": "f"}]}, ["key 'tools'", "--schema chat"]),
        ({"messages": None}, ["messages: null; expected a list"]),
        ({"messages": {}}, ["messages: an object; expected a list"]),
        ({"messages": []}, ["messages: is empty"]),
        ({"messages": [*CHAT, "x"]}, ["messages[3]: a string ('x'); expected an object"]),
        (messages([]), ["messages[1]: a list"]),
        (user(role="asistant"), ["messages[1].role: 'asistant'", "Did you mean 'assistant'?"]),
        (user(role="User"), ["Did you mean 'user'?"]),
        (user(role="tool"), ["messages[1].role: 'tool'; expected one of system, user, assistant."]),
        (user(role=3), ["messages[1].role: the number 3"]),
        (messages({"content": "x"}), ["messages[1].role: is missing"]),
        (messages({"role": "user"}), ["messages[1].content: is missing"]),
        (user(content=None), ["messages[1].content: null; expected a string"]),
        (user(content=["x"]), ["messages[1].content: a list; expected a string"]),
        (user(content=True), ["messages[1].content: true"]),
        (user(content=1.5), ["messages[1].content: the number 1.5"]),
        (messages({"role": "user", "contents": "x"}), ["messages[1]: key 'contents'", "Did you mean 'content'?"]),
        (user(name="n"), ["messages[1]: key 'name'; expected exactly"]),
        (user(content="x\0"), ["messages[1].content: character 1 is NUL"]),
        ([], ["the record is a list; expected a JSON object"]),
        ("text", ["the record is a string ('text')"]),
        (None, ["the record is null"]),
    ],
)
def test_strict_messages_say_what_is_wrong_and_where(record, parts):
    check_error(record, "messages", *parts)


def test_chats_keep_further_keys_for_the_templates():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    record = {"messages": [*CHAT, {**CHAT[2], "weight": 0}, call], "id": "x", "tools": [{"name": "f"}]}
    found = parse_record(record)
    assert found.messages[3] == Message("assistant", "a", 0.0)
    assert found.messages[4] == Message("assistant", "", None, {"content": None, "tool_calls": call["tool_calls"]})
    assert found.tools == ({"name": "f"},)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (messages({"role": "assistant", "content": None}), ["messages[1].content: null"]),
        (user(wieght=1), ["messages[1]: unknown key 'wieght'", "'weight'"]),
        (user(weight="1"), ["messages[1].weight: '1'"]),
        (user(weight=True), ["messages[1].weight: True"]),
        (user(weight=-1), ["messages[1].weight: -1"]),
        (user(weight=float("nan")), ["messages[1].weight: nan"]),
        (user(weight=10**400), ["messages[1].weight: 1000"]),
        (user(role="human"), ["messages[1].role: 'human'"]),
        (user(name=3), ["messages[1].name: the number 3"]),
        (user(extra=b"x"), ["messages[1].extra", "what JSON can hold"]),
        (user(extra={3: 1}), ["messages[1].extra: key 3; expected a string"]),
        (user(extra={"a": ["\0"]}), ["messages[1].extra.a[0]: character 0"]),
        (user(extra=json.loads("[" * 65 + "]" * 65)), ["messages[1]: nested too deep"]),
        ({"messages": CHAT, "system": 3}, ["the record.system: the number 3"]),
        ({"messages": CHAT, "sytem": "x"}, ["unknown key 'sytem'", "'system'"]),
        ({"messages": CHAT, "tools": "f"}, ["tools: a string"]),
        ({"messages": CHAT, "items": CHAT}, ["'messages' and 'items'", "--schema"]),
        ({"texts": ["x"]}, ["keys are 'texts'", "expected 'messages', 'conversations' (ShareGPT)", "'text'?"]),
        ({"prompt": "x"}, ["keys are 'prompt'"]),
        ({"prompt": 3, "completion": ""}, ["the record.prompt: the number 3"]),
        ({"prompt": [], "completion": ""}, ["prompt: is empty"]),
        ({"items": [{"role": "system", "content": "x"}]}, ["items[0].role: 'system'; expected one of user, assistant"]),
    ],
)
def test_other_schemas_say_what_is_wrong_and_where(record, parts):
    check_error(record, "auto", *parts)


def test_episodes_have_a_system_text_and_a_context():
    record = {"system": "be kind", "context": "episode_id: 7, language: en", "messages": CHAT[1:], "_meta": {"a": 1}}
    found = parse_record(record, "episode")
    assert (found.system, found.context, len(found.messages)) == ("be kind", "episode_id: 7, language: en", 2)
    assert parse_record({**record, "context": {"id": 7}}, "episode").context == '{"id": 7}'
    assert found == parse_record(record)
    check_error({"messages": [{"role": "tool", "content": ""}]}, "episode", "messages[0].role: 'tool'")


def test_tool_calls_have_a_name_and_arguments_and_results_text_or_json():
    record = {
        "messages": [
            {"role": "user", "content": "find"},
            {"role": "assistant_toolcall", "name": "search", "arguments": {"query": "X"}},
            {"role": "toolresult", "name": "search", "content": {"documents": [1, None]}},
            {"role": "toolresult", "content": "text"},
            {"role": "assistant_toolcall", "name": "list"},
            {"role": "assistant", "content": "found"},
        ]
    }
    found = parse_record(record, "tools").messages
    assert found[1] == Message("assistant_toolcall", "", None, {"name": "search", "arguments": {"query": "X"}})
    assert found[2] == Message("toolresult", "", None, {"name": "search", "content": {"documents": [1, None]}})
    assert found[3] == Message("toolresult", "text")
    assert found[4].extra == {"name": "list", "arguments": {}}
    assert found == parse_record(record).messages
    for bad, part in (
        ({"role": "assistant_toolcall", "arguments": {}}, "messages[1].name: is missing"),
        ({"role": "assistant_toolcall", "name": "f", "arguments": "{}"}, "messages[1].arguments: a string"),
        ({"role": "toolresult", "name": "f"}, "messages[1].content: is missing"),
    ):
        check_error(messages(bad), "tools", part)


def test_openchat_items_have_weights():
    record = {
        "items": [{"role": "user", "content": "u", "weight": 0.0}, {"role": "assistant", "content": "a", "weight": 2}],
        "condition": "GPT4",
        "system": "s",
    }
    expected = (Message("user", "u", 0.0), Message("assistant", "a", 2.0))
    assert parse_record(record) == Conversation(expected, system="s", condition="GPT4")
    assert parse_record({"items": record["items"]}, "openchat") == Conversation(expected)


def test_prompts_are_of_the_user_and_completions_of_the_assistant():
    expected = (Message("user", "p"), Message("assistant", "c"))
    assert parse_record({"prompt": "p", "completion": "c"}) == Conversation(expected)
    found = parse_record({"prompt": CHAT, "completion": [CHAT[2]]})
    assert [message.weight for message in found.messages] == [None, None, 0.0, None]


def test_an_unknown_schema_is_named():
    with pytest.raises(PrepareError, match="'vicuna'"):
        parse_record({}, "vicuna")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"a": "\xff"}', ["byte 7", "0xff", "UTF-8"]),
        (b'{"a": "\xed\xa0\x80"}', ["byte 7", "UTF-8"]),  # half a surrogate pair, as three bytes
        (b'{"a": 1', ["column 8", "end of the line"]),
        (b'{"a": 1} x', ["column 10", "extra data"]),
        (b'{"a" 1}', ["column 6", "'1}'"]),
        (b"", ["column 1"]),
        (b"{'a': 1}", ["column 2"]),
        (b'{"a": "\x01"}', ["column 8"]),
        (rb'{"a": "\x41"}', ["column 8"]),
        (b'{"a": 1},', ["column 9"]),
        (b"// chats", ["column 1"]),
        (b'{"a": "\xc0\xaf"}', ["byte 7", "UTF-8"]),
        (b'{"a": "\\udc00\\ud800"}', ["half of a surrogate pair"]),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', ["key 'c' occurs twice"]),
        (b'{"a": NaN}', ["NaN"]),
        (b'{"a": -Infinity}', ["-Infinity"]),
        (b'{"a": 1e999}', ["1e999"]),
        (b'{"a": ' + b"1" * 5000 + b"}", ["number"]),
        (b'{"a": [{"b": "x\\u0000"}]}', ["a[0].b: character 1 is NUL"]),
        (b'{"a": "\\ud800"}', ["a: character 0 is \\ud800"]),
        (b'{"\\udc00": 1}', ["a key of the record: character 0 is \\udc00"]),
        (b"[" * 100_000, ["nested too deep"]),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, ["nested too deep"]),
        (b"[" * 65 + b"]" * 65, ["nested too deep"]),
    ],
)
def test_json_that_can_be_read_two_ways_or_none_is_an_error(line, parts):
    with pytest.raises(RecordError) as error:
        parse_json(line)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert len(message) < 400 and message.isprintable()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        (b'{"a": "\\\\u0000"}', {"a": "\\u0000"}),
        (b"[" * 64 + b"]" * 64, json.loads("[" * 64 + "]" * 64)),
        (json.dumps({"a": "{[" * 1000}).encode(), {"a": "{[" * 1000}),
        (b' {"a": 0}\r\n', {"a": 0}),
    ],
)
def test_json_that_is_fine_is_read(line, value):
    assert parse_json(line) == value


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0\\und8e \ufeff\u00e9', max_size=60).map(str.encode))
def test_any_bytes_are_a_value_or_a_record_error(line):
    try:
        value = parse_json(line)
    except RecordError:
        return
    assert json.loads(line.decode("utf-8-sig")) == value


KEYS = (
    *("messages", "role", "content", "items", "prompt", "completion", "name", "weight", "system", "conversations"),
    *("from", "value", "instruction", "input", "output", "history", "text", "tools", "question", "answer", "dialog"),
)
ROLES = ("user", "assistant", "human", "gpt", "toolresult", "assistant_toolcall")
KEY = st.sampled_from(KEYS) | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner | st.sampled_from(ROLES), max_size=4),
    max_leaves=15,
)


@settings(max_examples=examples(500), deadline=None)
@given(JSON, st.sampled_from(["auto", *SCHEMAS, "sharegpt:conversations=messages,from=role", "text:text=role"]))
def test_any_value_is_a_conversation_or_a_record_error(value, schema):
    try:
        found = parse_record(value, schema)
    except RecordError:
        return
    assert found.messages
    assert all(isinstance(message.content, str) for message in found.messages)


def test_parsing_does_the_same_however_long_the_texts_are():
    """Beside json's own work, which is in C: so many calls a message, none a character."""

    def calls(words, messages):
        texts = [{"role": ("user", "assistant")[at % 2], "content": "word " * words} for at in range(messages)]
        line = json.dumps({"messages": texts}).encode()
        profile = cProfile.Profile()
        profile.runcall(lambda: parse_record(parse_json(line), "messages"))
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(1, 4) == calls(10_000, 4)
    each = (calls(20, 104) - calls(20, 4)) / 100
    assert each < 20, each
