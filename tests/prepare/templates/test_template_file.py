"""`grain-sft prepare --template` takes Jinja files and classes of other packages, and refuses wrong ones."""

import dataclasses
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from prepared import CHATML, chat, request_of, turns, write
from template_rules import BY_NAME, render_one
from tokenizer_makers import byte_level_json, save_huggingface, save_sentencepiece, save_tiktoken

from grain_sft import open_corpus
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import TEMPLATES, load_tokenizer, prepare
from grain_sft.prepare.templates import Rendered
from grain_sft.prepare.templates.chat_spans import RenderedChat, find_turns
from grain_sft.prepare.templates.chat_template import ChatTemplate


def test_a_template_in_a_file_prepares_a_corpus_whose_documents_end_in_eos(tmp_path, run_command):
    tokenizer = save_tiktoken(tmp_path, ("<e>",), eos="<e>")
    (tmp_path / "chat.jinja").write_text(CHATML)
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat("hi", "hello <|im_end|>")) + "\n")
    command = ["prepare", tmp_path / "chats.jsonl", "--template", tmp_path / "chat.jinja"]
    command += ["--tokenizer", tokenizer, "--output", tmp_path / "out"]
    run_command(*command)
    corpus = open_corpus(tmp_path / "out")
    (document,) = corpus.iter_documents()
    assert document.tokens[-1] == corpus.eos_token_id
    error = run_command(*command, "--chat-template", tmp_path / "chat.jinja", "--dry-run", status=1).err
    assert "expected one template" in error


TAGS = ["{%+ generation %}", "{%-generation-%}", "{%\ngeneration %}", "{# {% generation %} #}"]


@pytest.mark.parametrize("tag", TAGS)
def test_generation_tags_are_found_in_every_spelling_of_jinja_but_not_in_comments(tag, tmp_path):
    end = "" if "#" in tag else "{% endgeneration %}"
    assert ChatTemplate(load_tokenizer(save_sentencepiece(tmp_path)), f"{tag}x{end}").marks_turns == ("#" not in tag)


@pytest.mark.parametrize("word", ["primmer", "/nope.jinja"])
def test_a_name_that_is_neither_template_nor_file_is_refused(tmp_path, run_command, word):
    words = ["prepare", "x.jsonl", "--template", word, "--tokenizer", "y", "--output", tmp_path / "out"]
    assert f"'{word}' is neither a template nor a file" in run_command(*words, status=2).err


TAGGED = [
    "{% for m in messages %}<u>{% generation %}{{ m.content }}{% endgeneration %}</u>{% endfor %}",
    "{% macro f(m) %}<u>{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ f(messages[0]) }}</u>",
    "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}<u>{{ x }}</u>",
]


@pytest.mark.parametrize("text", TAGGED)
def test_text_in_generation_tags_is_found_in_loops_macros_and_variables(text, tmp_path):
    template = ChatTemplate(load_tokenizer(save_sentencepiece(tmp_path)), text)
    messages = [{"content": "an \U000f0000"}]
    rendered = template.render(messages)
    assert rendered == "<u>an \U000f0000</u>" and template.marked_spans(messages, None, rendered) == [(3, 7)]


def test_a_template_that_ignores_one_of_many_results_is_refused_after_few_renderings(tmp_path):
    ignores_one = "{% for m in messages %}{% if loop.index != 40 %}{{ m.role + m.content }}{% endif %}{% endfor %}"
    record = {"messages": [{"role": "tool", "content": str(number)} for number in range(60)] + turns("u", "a")}
    with mock.patch.object(ChatTemplate, "attempt", autospec=True, side_effect=ChatTemplate.attempt) as attempt:
        error = render_one(load_tokenizer(save_sentencepiece(tmp_path)), "hf", record, chat_template=ignores_one)
    assert "the chat template writes nothing of tool" in str(error) and attempt.call_count < 9


def test_the_turns_of_a_long_chat_with_calls_are_found_by_a_few_renderings(tmp_path):
    template, messages = ChatTemplate(load_tokenizer(save_sentencepiece(tmp_path)), BY_NAME["qwen"].template), turns("q")
    for number in range(30):
        call = {"role": "assistant", "content": "a" * (number % 3), "tool_calls": [{"name": "f", "arguments": {"n": number}}]}
        messages += [call, {"role": "tool", "content": f"<|im_end|> {number}"}]
    messages.append({"role": "assistant", "content": "<think>\nx\n</think>\n\ndone"})
    chat = RenderedChat(template, messages, None, template.render(messages))
    turns_of_chat = [index for index, role in enumerate(chat.roles) if role == "assistant"]
    with mock.patch.object(template, "attempt", side_effect=template.attempt) as attempt:
        spans = find_turns(chat, turns_of_chat)
    expected = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", chat.text, re.DOTALL)
    assert [chat.text[start:stop] for start, stop in spans] == expected and len(expected) == 31 > 2 * attempt.call_count


def test_turns_of_weight_0_need_one_marked_span_in_each_turn(tmp_path):
    """Two spans in the last turn and none in the first are as many spans as turns, but not one in each turn."""
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path))
    marked, messages = "{% generation %}{{ m.content }}{% endgeneration %}", turns("one", "wrong", "two", "right")
    messages[1] = {"role": "assistant", "tool_calls": [{"name": "wrong"}], "weight": 0}
    for count in (1, 2):
        written = f"{{% if loop.last %}}{marked * count}{{% else %}}{{{{ m.content }}}}{{{{ m.tool_calls }}}}{{% endif %}}"
        template = f"{{% for m in messages %}}{written}{{% endfor %}}"
        error = render_one(tokenizer, "hf", {"messages": messages}, chat_template=template)
        assert isinstance(error, RecordError) and f"marks {count} spans in 2 turns" in str(error)


def test_a_missing_template_or_token_is_named_and_wrong_jinja_is_an_error(tmp_path):
    plain = load_tokenizer(save_huggingface(tmp_path / "hf", byte_level_json(("<|endoftext|>",)), eos="<|endoftext|>"))
    for tokenizer in (plain, load_tokenizer(save_sentencepiece(tmp_path))):
        with pytest.raises(PrepareError, match=r"no chat template.*--chat-template"):
            render_one(tokenizer, "hf", chat("a", "b"))
        with pytest.raises(PrepareError, match=r"<\|im_start\|>, <\|im_end\|>"):
            render_one(tokenizer, "olmo", chat("a", "b"))
    for text in ("{% for x in %}", "{% for x in y %}" * 25 + "{% endfor %}" * 25):
        with pytest.raises(PrepareError, match="Jinja"):
            render_one(plain, "olmo", chat("a", "b"), chat_template=text)


class Shouted(TEMPLATES["text"]):
    """A template of another package. It writes plain documents in capitals."""

    name = "shouted"
    format = "episodes"

    def pieces(self, conversation):
        return [(text.upper() if isinstance(text, str) else text, loss) for text, loss in super().pieces(conversation)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_template_of_another_package_is_named_by_its_module(tmp_path, workers, monkeypatch, run_command):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / f"shouted{workers}.py"
    code.write_text("from test_template_file import Shouted\nclass Mine(Shouted): pass\n")
    tokenizer = save_sentencepiece(tmp_path)
    for number in range(6):
        write(tmp_path / f"{number}.jsonl", ["hello"])
    command = ["prepare", *sorted(tmp_path.glob("*.jsonl")), "--template", f"{code.stem}:Mine"]
    command += ["--tokenizer", tokenizer, "--output", tmp_path / "out", "--workers", workers]
    run_command(*command)
    texts = [load_tokenizer(tokenizer).decode(each.tokens) for each in open_corpus(tmp_path / "out").iter_documents()]
    assert texts == ["HELLO</s>"] * 6
    code.write_text(code.read_text() + "# edited")
    expected = f"from other inputs or options. What changed:\n  code.template {code.stem}:Mine[0]: "
    assert expected in run_command(*command, status=1).err
    assert "no.such:Name" in run_command("prepare", "x", "--template", "no.such:Name", *command[9:], status=1).err


class WrongId(TEMPLATES["text"]):
    """A template that writes one token before each text. The text is the id of this token, such as "17"."""

    def pieces(self, conversation):
        return [([int(conversation.messages[0].content)], 1.0), *super().pieces(conversation)]


@pytest.mark.parametrize("number", ["size", "-1", str(2**40), str(2**70)])
def test_an_id_that_the_tokenizer_lacks_is_an_error_of_its_record(number, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    model = save_sentencepiece(tmp_path)
    size = load_tokenizer(model).vocab_size
    number = number.replace("size", str(size))
    path = write(tmp_path / "a.jsonl", ["0", str(size - 1), number])
    expected = f":3: template test_template_file:WrongId made the id {number}; expected 0 to {size - 1}"
    with pytest.raises(RecordError, match=expected):
        prepare(request_of(model, path, template="test_template_file:WrongId"), tmp_path / "out", workers=1)


class WrongResult(TEMPLATES["text"]):
    """A template that makes a mistake. The text of the first document names this mistake."""

    def render(self, conversations):
        mistake, results = conversations[0].messages[0].content, super().render(conversations)
        ones = np.ones(len(results[0].tokens))
        loss = {"fewer": ones[1:], "nan": ones * np.nan, "half": ones / 2, "unmasked": np.cumsum(ones) > 1, "float": ones}
        if mistake in loss:
            tokens = ones if mistake == "float" else results[0].tokens
            return [Rendered(tokens, loss[mistake]), *results[1:]]
        if mistake == "refused":
            raise RecordError("is refused.")
        return results[1:] if mistake == "none" else results


WRONG_RESULTS = [
    ("fewer", RecordError, r":1: template \S+:WrongResult made loss of shape \(\d+,\); expected \(\d+,\)"),
    ("half", RecordError, "made the loss 0.5; expected 0 or 1, or `weighted = True`"),
    ("unmasked", RecordError, "made a token without loss; expected loss for every token, or `masked = True`"),
    ("nan", RecordError, "made the loss nan; expected a finite number, 0 or more"),
    ("float", RecordError, r"made tokens of shape \(\d+,\) and dtype float64; expected integers of one dimension"),
    ("refused", RecordError, r"a\.jsonl:1: is refused"),
    ("none", PrepareError, "made 1 documents of 2 conversations"),
]


@pytest.mark.parametrize(("mistake", "kind", "expected"), WRONG_RESULTS)
def test_wrong_loss_and_missing_documents_of_a_template_are_errors(mistake, kind, expected, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(WrongResult, "weighted", mistake == "nan")
    request = request_of(save_sentencepiece(tmp_path), write(tmp_path / "a.jsonl", [mistake, "b"]))
    request = dataclasses.replace(request, template="test_template_file:WrongResult", format="episodes")
    with pytest.raises(kind, match=expected):
        prepare(request, tmp_path / "out", workers=1)
