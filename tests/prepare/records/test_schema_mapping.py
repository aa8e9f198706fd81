"""Records with keys of other names: the option that an error names, and mappings that are wrong."""

import shlex
from typing import Any

import pytest

from grain_sft.cli.main import main
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import SCHEMAS, Conversation, Message, check_schema, parse_record
from grain_sft.prepare.records.messages import DOCUMENT

TALK = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"))
TURNS = [{"role": message.role, "content": message.content} for message in TALK]
SHAREGPT = [{"from": role, "value": text} for role, text in (("system", "s"), ("human", "u"), ("gpt", "a"))]
UNKNOWN: list[tuple[dict[str, Any], Conversation]] = [
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
    ({"raw_content": "u"}, Conversation((Message(DOCUMENT, "u"),))),
]
"""Records of no known schema whose keys say what they are, and what the option that the error names makes of them."""


@pytest.mark.parametrize(
    ("record", "expected"), UNKNOWN, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_an_unknown_record_names_its_keys_and_an_option_that_reads_it(record, expected):
    with pytest.raises(RecordError) as error:
        parse_record(record)
    text = str(error.value)
    assert ", ".join(map(repr, record)) in text and "expected 'messages', 'conversations' (ShareGPT)" in text
    words = shlex.split(text.rpartition(" add ")[2])
    assert words[0] == "--schema"
    assert parse_record(record, words[1]) == expected


def test_an_unknown_record_without_a_known_word_names_the_option():
    for record in ({}, {"a": "x", "b": "y"}, {"a b": [{"role": "user", "content": "x"}]}, {"list": [{"role": "bot"}]}):
        with pytest.raises(RecordError, match="--schema prompt_completion:prompt=KEY,completion=KEY"):
            parse_record(record)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("vicuna", "'vicuna': expected 'auto', 'messages'"),
        ("sharegpt:conversations", "'conversations' is not a pair"),
        ("sharegpt:", "'' is not a pair"),
        ("sharegpt:=x", "'=x' is not a pair"),
        ("text:text=x,text=y", "maps 'text' twice"),
        ("sharegpt:messages=x", "has no key 'messages'. Expected one of 'conversations'"),
        ("auto:messages=x", "only keys of a named schema"),
    ],
)
def test_wrong_schemas_say_what_is_wrong(schema, said, capsys):
    with pytest.raises(PrepareError) as error:
        check_schema(schema)
    assert said in str(error.value)
    with pytest.raises(SystemExit):
        main(["train-tokenizer", "x.jsonl", "-o", "x.model", "--schema", schema])
    assert said in capsys.readouterr().err


def test_a_mapped_key_that_is_absent_lists_the_keys_of_the_record():
    said = r"prompt: is missing.*--schema prompt_completion:prompt=q.*keys are 'question'"
    with pytest.raises(RecordError, match=said):
        parse_record({"question": "x", "completion": "y"}, "prompt_completion:prompt=q")


def test_every_schema_can_be_mapped():
    for name in SCHEMAS:
        assert check_schema(f"{name}:{'text' if name == 'text' else 'system'}=x")[1]


def test_a_key_may_become_two_and_tools_keep_their_keys():
    assert parse_record({"text": "x"}, "prompt_completion:prompt=text,completion=text").messages[1].content == "x"
    record = {"messages": [{"name": "user", "content": "u"}], "tools": [{"name": "f"}]}
    assert parse_record(record, "chat:role=name").tools == ({"name": "f"},)
