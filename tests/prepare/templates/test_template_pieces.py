"""The templates primer, openchat, episode and episode_tool refuse wrong records and follow their options.

test_roundtrip.py tests the documents that they make.

`build-sft-primer`, the command of the primer specification, writes the files that it specifies.
"""

import json
import random
import re

import numpy as np
import pytest
import tokenizer_makers as makers
from prepared import save_trained, write_chats
from template_rules import EOT, TAGS, render_one

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import TEMPLATES, TemplateOptions, load_tokenizer, parse_record, render, render_chat_sft
from grain_sft.prepare.templates.primer import SPECIAL_TOKENS

ALL = (*makers.PRIMER_TOKENS, EOT, *TAGS, "<myPT_eot>")
ENDS = ("<s>", "</s>")
MAKERS = {
    "sentencepiece": lambda folder: makers.save_sentencepiece(folder, vocab_size=480, user_defined=ALL),
    "byte level": lambda folder: makers.save_huggingface(folder, makers.byte_level_json((*ALL, "</s>")), eos=EOT),
    "llama": lambda folder: makers.save_huggingface(folder, makers.metaspace_json((*ENDS, *ALL)), bos="<s>", eos=EOT),
    "no tags": lambda folder: makers.save_huggingface(folder, makers.byte_level_json((*makers.PRIMER_TOKENS, EOT))),
}


@pytest.fixture(params=MAKERS)
def tokenizer(request, tmp_path):
    return load_tokenizer(MAKERS[request.param](tmp_path))


def chat(*turns, **more):
    """Return a record of `turns`, (role, content), that also has the keys `more`."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


def of_assistant(**message):
    """Return a record of two messages: a tool call, to which `message` adds or changes keys, and the answer "y"."""
    return {"messages": [{"role": "assistant_toolcall", **message}, {"role": "assistant", "content": "y"}]}


BUILT_IN = ("primer", "openchat", "episode", "episode_tool")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
CALLS = {"messages": [{"role": "user", "content": "x"}, CALL]}
ANSWER, UNREAD = {"role": "assistant", "content": "y"}, ("thinking", "functions")
WEIGHTS = ("primer", "assistant", 0.5), ("primer", "user", 1), ("openchat", "system", 0.5)


SPELLED = [
    ("primer", chat(("user", "a"), ("assistant", "TEXT")), "messages[1].content"),
    ("openchat", chat(("user", "a"), system="TEXT"), "system"),
    ("openchat", {"items": [{"role": "user", "content": "a"}], "condition": "TEXT"}, "condition"),
    ("openchat", chat(("user", "TEXT")), "messages[0].content"),
    ("episode_tool", chat(("user", "TEXT"), ("assistant", "y")), "messages[0].content"),
    ("episode_tool", of_assistant(name="TEXT"), "messages[0].name"),
    ("episode_tool", of_assistant(name="f", think="TEXT"), "messages[0].think"),
    ("episode_tool", of_assistant(name="f", arguments={"a": ["TEXT"]}), "messages[0].arguments.a[0]"),
    ("episode_tool", of_assistant(name="f", arguments={"TEXT": 1}), "messages[0].arguments"),
    ("episode_tool", of_assistant(role="user", content="x", context="TEXT"), "messages[0].context"),
    ("episode_tool", of_assistant(role="toolresult", content={"a": "TEXT"}), "messages[0].content.a"),
]


@pytest.mark.parametrize(("template", "record", "path"), SPELLED)
def test_text_that_spells_a_special_token_is_an_error_with_its_place_or_stays_text(tokenizer, template, record, path):
    def with_text(text):
        return json.loads(json.dumps(record).replace("TEXT", text))

    for spelling in {"primer": makers.PRIMER_TOKENS, "openchat": (EOT,)}.get(template, ("<myPT_eot>", "<myPT_user>")):
        text = f"é👍 {spelling}"
        error = render_one(tokenizer, template, with_text(text))
        assert isinstance(error, RecordError)
        assert path in str(error) and f"{spelling!r} at character 3" in str(error)
        encoded = render_one(tokenizer, template, with_text(text), special_text="encode")
        number = tokenizer.token_id(spelling)
        if number is None:
            assert isinstance(encoded, RecordError)  # without such a token, the template's own markup is the same text
            continue
        assert "--special-text encode" in str(error)
        expected = render_one(tokenizer, template, with_text("x"))
        assert encoded.tokens.tolist().count(number) == expected.tokens.tolist().count(number)
        assert text in tokenizer.decode(encoded.tokens.tolist())


WRONG_RECORDS = [
    ("primer", chat(("user", "hello?")), "the role 'assistant'"),
    ("primer", {"text": "x"}, "a plain document; template primer renders conversations. Give --template text"),
    *((name, of_assistant(role=role, content="b", weight=n), "messages[0].weight") for name, role, n in WEIGHTS),
    ("openchat", chat(("user", "a"), ("system", "b")), "a later system message"),
    ("episode", chat(("toolresult", "x")), "messages[0].role: 'toolresult'"),
    ("episode_tool", chat(("user", "x")), "the role 'assistant' or 'assistant_toolcall'"),
    ("episode", chat(("system", "b"), system="a"), "system: the record has a system text"),
    ("episode_tool", of_assistant(name="f", arguments={"name": "x"}), "messages[0].arguments: has the key 'name'"),
    *((name, CALLS, "messages[1].tool_calls: template") for name in BUILT_IN),
    *((name, of_assistant(**ANSWER, **{key: "x"}), f"[0].{key}: template") for name in BUILT_IN for key in UNREAD),
    ("openchat", of_assistant(**ANSWER, think="x"), "messages[0].think: template"),
    *((name, {**chat(("assistant", "b")), "tools": [{"name": "f"}]}, "tools: template") for name in BUILT_IN),
]


@pytest.mark.parametrize(("template", "record", "part"), WRONG_RECORDS)
def test_a_record_that_a_template_can_not_render_does_not_affect_other_records(tokenizer, template, record, part):
    records = [parse_record(each) for each in (chat(("assistant", "b")), record, chat(("assistant", "b")))]
    one, error, other = render(TEMPLATES[template], records, tokenizer, TemplateOptions())
    assert isinstance(error, RecordError) and part in str(error)
    assert one.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize(
    ("template", "missing"),
    [("primer", "<|asst|>, <|eot|>"), ("openchat", "<|end_of_turn|>"), ("text", "EOS; this tokenizer has no such")],
)
def test_a_tokenizer_without_the_special_tokens_is_an_error_that_names_them(template, missing, tmp_path):
    tokenizer = load_tokenizer(makers.save_huggingface(tmp_path, makers.byte_level_json(makers.PRIMER_TOKENS[:2])))
    with pytest.raises(PrepareError, match=re.escape(missing)):
        render_one(tokenizer, template, chat(("assistant", "x")))


class OneText:
    """A tokenizer with the methods that the specification's `render_chat_sft` calls."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text):
        return self._tokenizer.encode([text])[0]

    def special_token_ids(self):
        return {name: self._tokenizer.token_id(text) for name, text in SPECIAL_TOKENS.items()}


@pytest.mark.parametrize("add_final_eot", [True, False])
def test_template_primer_gives_the_ids_and_labels_of_render_chat_sft(tokenizer, add_final_eot):
    for text in makers.ODD_TEXTS:
        record = chat(("user", text), ("assistant", text), ("system", text), ("assistant", ""), ("user", text))
        rendered = render_one(tokenizer, "primer", record, special_text="encode")
        input_ids, labels = render_chat_sft(OneText(tokenizer), record["messages"], add_final_eot=add_final_eot)
        assert (input_ids[-1] == tokenizer.token_id("<|eot|>")) == add_final_eot
        count = len(rendered.tokens) - (not add_final_eot)
        assert rendered.tokens[:count].tolist() == input_ids
        assert np.where(rendered.loss, rendered.tokens.astype(np.int64), -100)[:count].tolist() == labels
    with pytest.raises(ValueError, match="assistant"):
        render_chat_sft(OneText(tokenizer), [{"role": "user", "content": "hello?"}])


@pytest.mark.parametrize(("condition", "prefix"), [(None, "Assistant:"), ("Code", "Code Assistant:")])
def test_openchat_begins_with_bos_and_adds_the_condition_to_records_without_one(tokenizer, condition, prefix):
    record = {"items": [{"role": "assistant", "content": "first", "weight": 0.25}, {"role": "user", "content": ""}]}
    rendered = render_one(tokenizer, "openchat", record, condition=condition)
    assistant, first, user = tokenizer.encode([prefix, "first", prefix.replace("Assistant", "User")])
    bos, end = tokenizer.empty_ids, [tokenizer.token_id(EOT)]
    expected = [(bos, 0), (assistant, 0), (first, 0.25), (end, 0.25), (user, 0), (end, 0)]
    assert rendered.tokens.tolist() == [number for ids, _ in expected for number in ids]
    assert rendered.loss.tolist() == [loss for ids, loss in expected for _ in ids]
    assert rendered.loss.dtype == np.float32
    own = render_one(tokenizer, "openchat", {**record, "condition": "Own"}, condition=condition)
    assert "Own Assistant:" in tokenizer.decode(own.tokens.tolist())
    empty = render_one(tokenizer, "openchat", chat(("system", "s"), ("assistant", "a"), system=""))
    assert empty.tokens.tolist() == render_one(tokenizer, "openchat", chat(("assistant", "a"), system="s")).tokens.tolist()


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "llama"])  # llama's decoder adds spaces
def test_a_system_prompt_is_added_only_to_conversations_without_one(name, tmp_path):
    tokenizer, turns = load_tokenizer(MAKERS[name](tmp_path)), (("user", "Hi"), ("assistant", "Hello!"))
    for record, expected in (
        (chat(*turns), "Default."),
        (chat(*turns, system="Own."), "Own."),
        (chat(("system", "First."), *turns, system=""), "First."),
    ):
        tokens = render_one(tokenizer, "episode", record, system_prompt="Default.").tokens.tolist()
        text = tokenizer.decode(tokens)
        assert text.startswith(f"<myPT_system>{expected}</myPT_system><myPT_user>")
        assert text.count("<myPT_system>") == 1
        assert name == "no tags" or tokens[0] == tokenizer.token_id("<myPT_system>")


def test_the_command_splits_with_pythons_random_and_writes_tokens_labels_and_metadata(tmp_path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    model = str(save_trained(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAIN_SFT_TOKENIZER", model.replace(str(tmp_path), "~"))
    write_chats(tmp_path / "data/primer.jsonl", 57)
    line = "build-sft-primer --primer-jsonl data/primer.jsonl --out-dir data/cache/sft --seed 7 --val-frac 0.25 --t-max 1024"
    printed = run_command(*line.split()).out
    folder = tmp_path / "data/cache/sft/primer"
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["source"], len(meta["tokenizer_sha256"])) == ("primer", 64)
    assert set(meta["special_token_ids"]) == {"sys", "usr", "asst", "eot"}
    assert (meta["val_frac"], meta["seed"], meta["T_max"]) == (0.25, 7, 1024)
    shuffled = list(range(1, 58))
    random.Random(7).shuffle(shuffled)
    for split, rows in (("val", shuffled[:14]), ("train", shuffled[14:])):  # floor(57 * 0.25)
        counts = meta["splits"][split]
        assert np.fromfile(folder / f"{split}_sources.bin", "<i8").reshape(-1, 2)[:, 1].tolist() == rows
        tokens, labels = (folder / f"{split}_{name}.bin" for name in ("input_ids", "labels"))
        assert (counts["num_examples"], counts["num_shards"]) == (len(rows), 1)
        assert counts["num_tokens"] == counts["shard_size"] == tokens.stat().st_size // 2 == labels.stat().st_size // 4
        assert counts["num_label_tokens"] == np.count_nonzero(np.fromfile(labels, "<i4") != -100)
        assert (folder / split / "shard_00000.bin").read_bytes() == tokens.read_bytes()
    assert "43 examples" in printed and "14 examples" in printed and "data/cache/sft/primer" in printed
    assert f"{meta['splits']['train']['num_tokens']:,} tokens" in printed
    monkeypatch.delenv("GRAIN_SFT_TOKENIZER")
    assert "nothing to do" in run_command(*line.split(), "--tokenizer", model).out
