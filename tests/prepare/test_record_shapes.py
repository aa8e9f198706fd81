"""Records of the shapes that people have: told apart by their keys, or named with --schema."""

from __future__ import annotations

import json
import random
import shlex
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from template_rules import save_trained

from grain_sft.cli.main import main
from grain_sft.corpus import open_corpus
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import (
    SCHEMAS,
    TEMPLATES,
    Conversation,
    Message,
    TemplateOptions,
    check_schema,
    load_tokenizer,
    parse_record,
)
from grain_sft.prepare.records.messages import DOCUMENT

TALK = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"))
TURNS = [{"role": message.role, "content": message.content} for message in TALK]
SHAREGPT = [{"from": role, "value": text} for role, text in (("system", "s"), ("human", "u"), ("gpt", "a"))]
SHAPES: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("more", METADATA)
@pytest.mark.parametrize("messages", ["chat", "messages"])
@pytest.mark.parametrize("shape", SHAPES)
def test_turns_are_read_in_every_spelling_whatever_metadata_is_there(
    shape: str, messages: str, more: dict[str, Any]
) -> None:
    assert parse_record(SHAPES[shape] | more, messages=messages) == Conversation(TALK)
    assert parse_record(more | SHAPES[shape], messages=messages) == Conversation(TALK)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "u", "input": "", "output": "a"}, ["u", "a"]),
        ({"instruction": "u", "output": "a", "text": "### Instruction: u"}, ["u", "a"]),
        ({"instruction": "u", "input": None, "output": "a"}, ["u", "a"]),
        ({"instruction": "u", "input": "x\ny", "output": ""}, ["u\nx\ny", ""]),
        ({"instruction": "", "input": "x", "output": "a"}, ["x", "a"]),
        ({"instruction": "u", "output": "a", "history": [["q", "r"], ["2", "3"]]}, ["q", "r", "2", "3", "u", "a"]),
        ({"prompt": "u", "completion": "a", "id": 1}, ["u", "a"]),
        ({"prompt": TURNS[1:2], "completion": TURNS[2:]}, ["u", "a"]),
        ({"text": "u", "meta": {"url": "x"}}, ["u"]),
    ],
)
def test_pairs_and_documents_are_inferred_from_their_keys(record: dict[str, Any], expected: list[str]) -> None:
    found = parse_record(record)
    roles = ["user", "assistant"] * (len(expected) // 2) or [DOCUMENT]
    assert [(message.role, message.content) for message in found.messages] == list(zip(roles, expected, strict=True))
    assert found.system is None


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "u", "output": "a", "system": "s"},
        {"conversations": SHAREGPT[1:], "system": "s"},
        {"prompt": "u", "completion": "a", "system": "s"},
        {"messages": TURNS[1:], "system": "s"},
    ],
)
@pytest.mark.parametrize("messages", ["chat", "messages"])
def test_a_system_text_beside_the_turns_is_read(record: dict[str, Any], messages: str) -> None:
    assert parse_record(record, messages=messages) == Conversation(TALK[1:], system="s")
    if "messages" not in record and "prompt" not in record:
        assert parse_record(record | {"system": ""}).system is None


def test_sharegpt_turns_have_weights_and_records_tools() -> None:
    turns = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "weight": 0}]
    assert parse_record({"conversations": turns}).messages[1] == Message("assistant", "a", 0.0)
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        assert parse_record({"conversations": turns, "tools": tools}).tools == ({"name": "f"},)
    assert parse_record({"conversations": turns, "tools": ""}).tools is None


def turn(turn: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [turn], **more}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"conversations": []}, "conversations: is empty"),
        ({"conversations": "x"}, "conversations: a string"),
        ({"conversations": [3]}, "conversations[0]: the number 3"),
        (turn({"from": "human"}), "conversations[0].value: is missing"),
        (turn({"value": "x"}), "conversations[0].from: is missing"),
        (turn({"from": "robot", "value": "x"}), "conversations[0].from: 'robot'; expected one of human, gpt"),
        (turn({"from": "humam", "value": "x"}), "Did you mean 'human'?"),
        (turn({"from": "gpt", "value": None}), "conversations[0].value: null"),
        (turn({"from": "gpt", "valu": "x"}), "unknown key 'valu'. Did you mean 'value'?"),
        (turn({"from": "gpt", "value": "\0"}), "character 0 is NUL"),
        (turn({"from": "gpt", "value": "x"}, tools="f"), "not valid JSON"),
        (turn({"from": "gpt", "value": "x"}, tools="{}"), "tools: an object; expected a list"),
        (turn({"from": "gpt", "value": "x"}, sytem="s"), "Did you mean 'system'?"),
        ({"instruction": 3, "output": "a"}, "the record.instruction: the number 3"),
        ({"instruction": "u", "output": None}, "the record.output: null"),
        ({"instruction": "u", "input": ["x"], "output": "a"}, "the record.input: a list"),
        ({"instruction": "u", "output": "a", "history": "x"}, "history: a string"),
        ({"instruction": "u", "output": "a", "history": [["q"]]}, "history[0]: a list; expected [question, answer]"),
        ({"instruction": "u", "output": "a", "history": [["q", 3]]}, "history[0].answer: the number 3"),
        ({"instruction": "u", "output": "a", "histori": []}, "Did you mean 'history'?"),
        ({"text": 3}, "the record.text: the number 3"),
        ({"text": None}, "the record.text: null"),
        ({"messages": [], "conversations": []}, "has 'messages' and 'conversations', so its schema is not clear"),
        ({"prompt": "u", "completion": "a", "instruction": "u", "output": "a"}, "its schema is not clear"),
    ],
)
def test_wrong_records_say_what_is_wrong_and_where(record: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError) as error:
        parse_record(record)
    assert said in str(error.value)


def test_a_null_beside_the_turns_of_another_schema_is_absent() -> None:
    for shape in ("messages", "sharegpt"):
        record = {"messages": None, "conversations": None} | SHAPES[shape]
        assert parse_record(record) == Conversation(TALK)


UNKNOWN: list[tuple[dict[str, Any], Conversation]] = [
    ({"question": "u", "answer": "a"}, Conversation(TALK[1:])),
    ({"Question": "u", "id": 3, "Answer": "a"}, Conversation(TALK[1:])),
    ({"system_prompt": "s", "question": "u", "response": "a"}, Conversation(TALK[1:], system="s")),  # OpenOrca
    ({"prompt": "u", "chosen": "a", "rejected": "b"}, Conversation(TALK[1:])),
    ({"prompt": "u", "response": "a"}, Conversation(TALK[1:])),
    (
        {"instruction": "u", "context": "x", "response": "a", "category": "qa"},  # Dolly
        Conversation((Message("user", "u\nx"), Message("assistant", "a"))),
    ),
    ({"dialog": TURNS}, Conversation(TALK)),
    ({"conversation": SHAREGPT, "id": "x"}, Conversation(TALK)),
    ({"turns": [{"speaker": "human", "text": "u"}, {"speaker": "gpt", "text": "a"}]}, Conversation(TALK[1:])),
    ({"prompt": "u", "chosen": TURNS, "rejected": TURNS}, Conversation(TALK)),
    ({"content": "u", "url": "x"}, Conversation((Message(DOCUMENT, "u"),))),
    ({"raw_content": "u"}, Conversation((Message(DOCUMENT, "u"),))),
]
"""Records of no known schema whose keys say what they are, and what the option that the error names makes of them."""


@pytest.mark.parametrize(
    ("record", "expected"), UNKNOWN, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_an_unknown_record_names_its_keys_and_an_option_that_reads_it(
    record: dict[str, Any], expected: Conversation
) -> None:
    with pytest.raises(RecordError) as error:
        parse_record(record)
    text = str(error.value)
    assert ", ".join(map(repr, record)) in text and "expected 'messages', 'conversations' (ShareGPT)" in text
    words = shlex.split(text.rpartition(" add ")[2])
    assert words[0] == "--schema"
    assert parse_record(record, words[1]) == expected


def test_an_unknown_record_without_a_known_word_names_the_option() -> None:
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
        ("sharegpt:messages=x", "has no key 'messages'. Expected one of 'conversations'"),
        ("auto:messages=x", "a named schema only"),
    ],
)
def test_wrong_schemas_say_what_is_wrong(schema: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PrepareError) as error:
        check_schema(schema)
    assert said in str(error.value)
    with pytest.raises(SystemExit):
        main(["train-tokenizer", "x.jsonl", "-o", "x.model", "--schema", schema])
    assert said in capsys.readouterr().err


def test_a_mapped_key_that_is_absent_lists_the_keys_of_the_record() -> None:
    said = r"prompt: is missing.*--schema prompt_completion:prompt=q.*keys are 'question'"
    with pytest.raises(RecordError, match=said):
        parse_record({"question": "x", "completion": "y"}, "prompt_completion:prompt=q")


def test_every_schema_can_be_mapped() -> None:
    for name in SCHEMAS:
        assert check_schema(f"{name}:{'text' if name == 'text' else 'system'}=x")[1]


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_trained(tmp_path_factory.mktemp("spm")))


@pytest.mark.parametrize("format", ["olmo", "episodes", "primer", "openchat"])
def test_plain_documents_are_their_tokens_and_eos_with_loss_on_all(
    format: str, spm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(7)
    texts = ["".join(draw.choices("the answer\n\t é<|", k=draw.randrange(200))) for _ in range(60)]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    words = ["prepare", str(path), "--template", "text", "--tokenizer", spm, "--format", format, "-o"]
    assert main([*words, str(tmp_path / "out")]) == 0
    tokenizer = load_tokenizer(spm)
    corpus = open_corpus(tmp_path / "out")
    assert corpus.num_documents == sum(1 for text in texts if text)
    for document in corpus.iter_documents():
        tokens = document.tokens.tolist()
        assert tokens[-1] == tokenizer.eos_token_id and tokens.count(tokens[-1]) == 1
        assert tokenizer.decode(tokens[:-1]) == texts[document.source[1] - 1]
        assert np.all(document.loss)


def test_documents_and_conversations_are_not_mixed(
    spm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    for record, template, said in (
        ({"text": "x"}, "primer", f"{path}:1: the record is a plain document"),
        (SHAPES["messages"], "text", f"{path}:1: the record is a conversation"),
    ):
        path.write_text(json.dumps(record) + "\n")
        words = ["prepare", str(path), "--template", template, "--tokenizer", spm, "-o", str(tmp_path / "out")]
        assert main(words) == 1
        assert said in capsys.readouterr().err


def test_a_tokenizer_without_eos_ends_no_document() -> None:
    without: Any = types.SimpleNamespace(eos_token_id=None, special_tokens={})
    with pytest.raises(PrepareError, match="this tokenizer has none"):
        TEMPLATES["text"](without, TemplateOptions())


def test_the_option_that_an_error_names_prepares_the_file(
    spm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "qa.jsonl"
    records = [{"question": f"word {n}", "answer": f"the answer {n}"} for n in range(9)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["prepare", str(path), "--template", "primer", "--tokenizer", spm, "-o", str(tmp_path / "out")]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"grain-sft prepare: {path}:1: the record's keys are 'question', 'answer'; expected")
    assert main([*words, *shlex.split(error.rpartition(" add ")[2])]) == 0
    tokenizer, documents = load_tokenizer(spm), open_corpus(tmp_path / "out").iter_documents()
    said = {tokenizer.decode(each.tokens[each.loss].tolist()) for each in documents}
    assert said == {f"the answer {n}<|eot|>" for n in range(9)}
