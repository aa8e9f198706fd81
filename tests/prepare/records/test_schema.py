"""Each schema reads its records as conversations. The error of any other record names the mistake and its place."""

import decimal
import json
import re
import shlex

import pytest
from batches import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import SCHEMAS, Conversation, Message, check_schema, parse_record
from grain_sft.prepare.records.conversation import DOCUMENT

TALK = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"))
TURNS = [{"role": message.role, "content": message.content} for message in TALK]
SHAREGPT = [{"from": role, "value": text} for role, text in (("system", "s"), ("human", "u"), ("gpt", "a"))]
SHAPES = {
    "messages": {"messages": TURNS},
    "sharegpt": {"conversations": SHAREGPT},
    "sharegpt with OpenAI's roles": {"conversations": [{"from": each.role, "value": each.content} for each in TALK]},
    "conversations of roles": {"conversations": TURNS},
}
METADATA = [
    {"id": "a-1", "source": "web", "dataset": "x", "category": None, "prompt_id": "7", "text": "u a", "score": 0.5},
    {"prompt": "u", "prompt_id": "7"},  # UltraChat, No Robots
    {"message_id": 1, "token_count": [1, 2], "lang": {"code": "en"}},
]


def messages(*extra: object) -> dict:
    return {"messages": [{"role": "user", "content": "u"}, *extra]}


@pytest.mark.parametrize("more", METADATA)
@pytest.mark.parametrize("messages", ["chat", "messages"])
@pytest.mark.parametrize("shape", SHAPES)
def test_turns_are_read_in_every_spelling_with_any_metadata(shape, messages, more):
    assert parse_record(SHAPES[shape] | more, messages=messages) == Conversation(TALK)
    assert parse_record(more | SHAPES[shape], messages=messages) == Conversation(TALK)


INFERRED = [
    ({"instruction": "u", "output": "a", "text": "### Instruction: u"}, ["u", "a"]),
    ({"instruction": "u", "input": None, "output": "a"}, ["u", "a"]),
    ({"instruction": "u", "input": "x\ny", "output": ""}, ["u\nx\ny", ""]),
    ({"instruction": "", "input": "x", "output": "a"}, ["x", "a"]),
    ({"instruction": "u", "output": "a", "history": [["q", "r"], ["2", "3"]]}, ["q", "r", "2", "3", "u", "a"]),
    ({"prompt": "u", "completion": "a", "id": 1}, ["u", "a"]),
    ({"prompt": TURNS[1:2], "completion": TURNS[2:]}, ["u", "a"]),
    ({"text": "u", "meta": {"url": "x"}, "messages": None}, ["u"]),
]


@pytest.mark.parametrize(("record", "expected"), INFERRED)
def test_pairs_and_documents_are_inferred_from_their_keys(record, expected):
    found = parse_record(record)
    roles = ["user", "assistant"] * (len(expected) // 2) or [DOCUMENT]
    assert [(message.role, message.content) for message in found.messages] == list(zip(roles, expected, strict=True))
    assert found.system is None


WITH_SYSTEM = [
    {"instruction": "u", "output": "a", "system": "s"},
    {"conversations": SHAREGPT[1:], "system": "s"},
    {"prompt": "u", "completion": "a", "system": "s"},
    {"messages": TURNS[1:], "system": "s", "system_prompt": "not read"},
]


@pytest.mark.parametrize("record", WITH_SYSTEM)
@pytest.mark.parametrize("messages", ["chat", "messages"])
def test_a_system_text_beside_the_turns_is_read(record, messages):
    assert parse_record(record, messages=messages) == Conversation(TALK[1:], system="s")
    if "messages" not in record and "prompt" not in record:
        assert parse_record(record | {"system": ""}).system is None


def test_weights_of_sharegpt_turns_and_tools_of_records_are_read():
    turns = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "weight": 0}]
    assert parse_record({"conversations": turns}).messages[1] == Message("assistant", "a", 0.0)
    for tools in ([{"name": "f"}], '[{"name": "f"}]', "", None):
        expected = ({"name": "f"},) if tools else None
        for record in ({"conversations": turns}, {"messages": TURNS}, {"prompt": "u", "completion": "a"}):
            assert parse_record({**record, "tools": tools}).tools == expected
        pair = parse_record({"prompt": "u", "chosen": "a", "rejected": "b", "tools": tools})
        assert pair.rejected is not None and pair.rejected.tools == pair.tools == expected


def user(**message: object) -> dict:
    return messages({"role": "user", "content": "x", **message})


def turn(turn: dict) -> dict:
    return {"conversations": [turn]}


WRONG_MESSAGES = [
    ({}, ["messages: is missing"]),
    ({"mesages": []}, ["key 'mesages'", "Did you mean 'messages'?"]),
    ({"messages": TURNS, "tools": [{"name": "f"}]}, ["key 'tools'", "--schema chat"]),
    ({"messages": None}, ["messages: null; expected a list"]),
    ({"messages": []}, ["messages: is empty"]),
    ({"messages": [*TURNS, "x"]}, ["messages[3]: a string ('x'); expected an object"]),
    (user(role="asistant"), ["messages[1].role: 'asistant'", "Did you mean 'assistant'?"]),
    (user(role="tool"), ["messages[1].role: 'tool'; expected one of system, user, assistant."]),
    (user(role=3), ["messages[1].role: the number 3"]),
    (messages({"content": "x"}), ["messages[1].role: is missing"]),
    (messages({"role": "user"}), ["messages[1].content: is missing"]),
    (user(content=None), ["messages[1].content: null; expected a string"]),
    (messages({"role": "user", "contents": "x"}), ["messages[1]: key 'contents'", "Did you mean 'content'?"]),
    (user(name="n"), ["messages[1]: key 'name'; expected exactly"]),
    (user(content="x\0"), ["messages[1].content: character 1 is NUL"]),
    ([], ["the record is a list; expected a JSON object"]),
]
"""Wrong records, each with parts of the error of the strict schema `messages`."""


def test_messages_of_chats_keep_other_keys_for_the_templates():
    text = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "weight": 0}
    kept = {"content": None, "loss": 2.75, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    call = {"role": "assistant", **kept}
    found = parse_record({"messages": [*TURNS, text, call], "id": "x", "tools": [{"name": "f"}]})
    assert found.messages[3] == Message("assistant", "a", 0.0)
    assert found.messages[4] == Message("assistant", "", None, kept)
    assert found.tools == ({"name": "f"},)


WRONG_RECORDS = [
    (messages({"role": "assistant", "content": None}), ["messages[1].content: null"]),
    (user(wieght=1), ["messages[1]: unknown key 'wieght'", "'weight'"]),
    (user(weight="1"), ["messages[1].weight: '1'"]),
    (user(train=False), ["messages[1].train: false; a mask of this name is not read", "--schema chat:weight=train"]),
    (user(loss=1, weight=1), ["messages[1].loss: the number 1; a mask of this name is not read"]),
    (user(masked=True), ["messages[1].masked: true; a mask of this name is not read. Give messages that take no loss"]),
    (user(content=[{"type": "image"}]), ["messages[1].content: a list; expected a string, or a list of one text"]),
    (user(function_call={"name": "f"}), ["messages[1].function_call", "'tool_calls'"]),
    (turn({"from": "gpt", "value": "x", "thinking": "y"}), ["conversations[0].thinking: not read in ShareGPT's turns"]),
    (turn({"from": "gpt", "value": "x", "think": "y"}), ["conversations[0].think: not read in ShareGPT's turns"]),
    *((user(weight=n), [f"messages[1].weight: {n}"[:24]]) for n in (-1, float("nan"), 10**400)),
    (user(name=3), ["messages[1].name: the number 3"]),
    (user(extra=b"x"), ["messages[1].extra", "expected a value of JSON"]),
    (user(extra={3: 1}), ["messages[1].extra: key 3; expected a string"]),
    (user(extra={"a": ["\0"]}), ["messages[1].extra.a[0]: character 0"]),
    (user(extra=json.loads("[" * 65 + "]" * 65)), ["messages[1]: objects and lists are nested too deep"]),
    ({"messages": TURNS, "system": 3}, ["the record.system: the number 3"]),
    ({"messages": TURNS, "sytem": "x"}, ["unknown key 'sytem'", "'system'"]),
    ({"messages": TURNS, "tools": "f"}, ["tools: a string"]),
    ({"messages": TURNS, "tools": ['{"type": "function"}']}, ["tools: a list; expected a list of objects"]),
    (messages({"role": "assistant", "content": "", "tool_calls": ["{}"]}), ["tool_calls: a list", "of objects"]),
    ({"messages": TURNS, "items": TURNS}, ["'messages' and 'items', so its schema is not clear", "--schema"]),
    ({"texts": ["x"]}, ["keys are 'texts'", "expected 'messages', 'conversations' (ShareGPT)", "'text'?"]),
    *(({"prompt": "u", "completion": "a", "label": n}, [f"label: {json.dumps(n)}"]) for n in (False, 0, "False")),
    *((turn({}) | {key: False}, [f"{key}: false marks a bad answer"]) for key in ("label", "kto_tag")),
    ({"prompt": "u", "completion": "a", "label": decimal.Decimal(0)}, ['label: "0"']),  # as Parquet files have it
    *((messages() | {key: [0]}, [f"{key}: not read"]) for key in ("chat_template_kwargs", "loss_mask")),
    (turn({"from": "gpt", "value": "x"}) | {"system_prompt": "s"}, ["--schema sharegpt:system=system_prompt"]),
    ({"items": [{"role": "system", "content": "x"}]}, ["items[0].role: 'system'; expected one of user, assistant"]),
    (turn({"from": "human"}), ["conversations[0].value: is missing"]),
    (turn({"value": "x"}), ["conversations[0].from: is missing"]),
    (turn({"from": "robot", "value": "x"}), ["conversations[0].from: 'robot'; expected one of human, gpt"]),
    (turn({"from": "function_call", "value": "{}"}), ["expected one of human, gpt", "Write calls and their results as"]),
    (turn({"from": "gpt", "value": "x", "training": True}), ["conversations[0].training: true; a mask"]),
    (turn({"from": "gpt", "valu": "x"}), ["unknown key 'valu'. Did you mean 'value'?"]),
    ({"messages": TURNS, "tools": "{}"}, ["tools: an object; expected a list"]),
    ({"instruction": "u", "output": "a", "history": "x"}, ["history: a string"]),
    ({"instruction": "u", "output": "a", "history": [["q"]]}, ["history[0]: a list; expected [question, answer]"]),
    ({"instruction": "u", "output": "a", "history": [["q", 3]]}, ["history[0].answer: the number 3"]),
]
"""Wrong records, each with parts of the error of schema `auto`, which infers the schema from the keys of the record."""


MISTAKES = [
    *(("messages", *each) for each in WRONG_MESSAGES),
    *(("auto", *each) for each in WRONG_RECORDS),
    ("tools", messages({"role": "assistant_toolcall", "arguments": {}}), ["messages[1].name: is missing"]),
    ("tools", user(role="assistant_toolcall", name="f", arguments="{}"), ["messages[1].arguments: a string"]),
    ("tools", messages({"role": "toolresult", "name": "f"}), ["messages[1].content: is missing"]),
    ("episode", {"messages": [{"role": "tool", "content": ""}]}, ["messages[0].role: 'tool'"]),
    ("text:text=q", {"text": "x"}, ["the record: has 'text', but not 'q', which is read in its place"]),
    ("chat:weight=train", user(weight=0), ["messages: has 'weight', but not 'train'"]),
    ("text:text=q", {"query": "x"}, ["text: is missing", "(--schema text:text=q: the record's keys are 'query'"]),
]


@pytest.mark.parametrize(("schema", "record", "parts"), MISTAKES)
def test_an_error_of_a_schema_names_the_mistake_and_its_place(schema, record, parts):
    with pytest.raises(RecordError) as error:
        parse_record(record, schema)
    assert all(part in str(error.value) for part in parts), error.value


def test_the_system_text_of_an_episode_is_read():
    record = {"system": "be kind", "context": "episode_id: 7, language: en", "messages": TURNS[1:], "_meta": {"a": 1}}
    found = parse_record(record, "episode")
    assert (found.system, len(found.messages)) == ("be kind", 2)
    assert found == parse_record(record)


@pytest.mark.parametrize("schema", ["auto", "messages", "tools"])
def test_a_key_whose_value_is_null_is_absent(schema):
    nulls = dict.fromkeys(("name", "tool_calls", "weight", "refusal", "function_call", "loss_mask"))
    record = {"messages": [turn | nulls for turn in TURNS[schema == "tools" :]], "conversations": None, "tools": None}
    assert parse_record(record, schema) == Conversation(TALK[schema == "tools" :])
    assert parse_record({"messages": None, "conversations": SHAREGPT}) == Conversation(TALK)
    call = {"role": "assistant_toolcall", "name": "f"}
    assert parse_record({"messages": [call | {"content": None}]}) == parse_record({"messages": [call]})


UNKNOWN = [
    ({"question": "u", "answer": "a"}, Conversation(TALK[1:])),
    ({"Question": "u", "id": 3, "Answer": "a"}, Conversation(TALK[1:])),
    ({"system_prompt": "s", "question": "u", "response": "a"}, Conversation(TALK[1:], system="s")),  # OpenOrca
    ({"prompt": "u", "response": "a"}, Conversation(TALK[1:])),
    (
        {"instruction": "u", "context": "x", "response": "a", "category": "qa"},  # Dolly
        Conversation((Message("user", "u\nx"), Message("assistant", "a"))),
    ),
    ({"dialog": TURNS}, Conversation(TALK)),
    ({"conversation": SHAREGPT, "id": "x"}, Conversation(TALK)),
    ({"turns": [{"speaker": "human", "text": "u"}, {"speaker": "gpt", "text": "a"}]}, Conversation(TALK[1:])),
    ({"content": "u", "url": "x"}, Conversation((Message(DOCUMENT, "u"),))),
]
"""Records of no known schema. The error suggests a `--schema` for their keys, which reads them as the conversation here."""


@pytest.mark.parametrize(("record", "expected"), UNKNOWN)
def test_the_error_of_an_unknown_record_names_its_keys_and_an_option_that_reads_it(record, expected):
    with pytest.raises(RecordError) as error:
        parse_record(record)
    text = str(error.value)
    assert ", ".join(map(repr, record)) in text and "expected 'messages', 'conversations' (ShareGPT)" in text
    words = shlex.split(text.rpartition(" add ")[2])
    assert words[0] == "--schema"
    assert parse_record(record, words[1]) == expected


def test_the_error_of_a_record_without_known_keys_names_the_option_schema():
    turns = [{"role": "user", "content": "x"}]
    for record in ({}, {"a": "x", "b": "y"}, {"a b": turns}, {5: turns}, {5: "x"}, {"list": [{"role": "bot"}]}):
        with pytest.raises(RecordError, match="--schema prompt_completion:prompt=KEY,completion=KEY"):
            parse_record(record)


WRONG_SCHEMAS = [
    ("vicuna", "'vicuna': expected 'auto', 'messages'"),
    ("sharegpt:conversations", "'conversations' is not a pair"),
    ("sharegpt:=x", "'=x' is not a pair"),
    ("text:text=x,text=y", "maps 'text' twice"),
    ("sharegpt:messages=x", "has no key 'messages'. Expected one of 'conversations'"),
    ("auto:messages=x", "for a named schema only"),
]


@pytest.mark.parametrize(("schema", "message"), WRONG_SCHEMAS)
def test_the_error_of_a_wrong_schema_names_the_mistake(schema, message, run_command):
    with pytest.raises(PrepareError, match=re.escape(message)):
        check_schema(schema)
    assert message in run_command("train-tokenizer", "x.jsonl", "-o", "x.model", "--schema", schema, status=2).err


def test_a_schema_may_read_one_key_as_two_and_leaves_the_keys_of_tools():
    assert parse_record({"text": "x"}, "prompt_completion:prompt=text,completion=text").messages[1].content == "x"
    record = {"messages": [{"name": "user", "content": "u"}], "tools": [{"name": "f"}]}
    assert parse_record(record, "chat:role=name").tools == ({"name": "f"},)
    assert parse_record(record, "chat:role=name,tools=").tools is None
    turns = [{"role": "assistant", "content": "a", "train": train} for train in (True, False)]
    record = {"messages": turns, "metadata": [{"weight": 5}]}
    assert [message.weight for message in parse_record(record, "chat:weight=train").messages] == [1.0, 0.0]


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


@settings(max_examples=examples(500))
@given(JSON, st.sampled_from(["auto", *SCHEMAS, "sharegpt:conversations=messages,from=role", "text:text=role"]))
def test_any_value_is_a_conversation_or_a_record_error(value, schema):
    try:
        found = parse_record(value, schema)
    except RecordError:
        return
    assert found.messages
    assert all(isinstance(message.content, str) for message in found.messages)
