"""episode and episode_tool: the text that tokens spell, and which of it takes loss."""

from __future__ import annotations

import pytest
from tokenizer_makers import ODD_TEXTS, byte_level_json, save_huggingface, save_sentencepiece

from grain_sft.errors import RecordError
from grain_sft.prepare.records.schema import parse_record
from grain_sft.prepare.templates import TEMPLATES, TemplateOptions, render
from grain_sft.prepare.tokenizers import load_tokenizer

BLOCKS = ("system", "user", "assistant", "user_context", "assistant_context", "toolcall", "toolresult", "think", "cite")
TAGS = (*(f"<{slash}myPT_{block}>" for block in BLOCKS for slash in ("", "/")), "<myPT_eot>")


@pytest.fixture(params=["sentencepiece", "huggingface", "no tags"])
def tokenizer(request, tmp_path):
    if request.param == "sentencepiece":
        return load_tokenizer(save_sentencepiece(tmp_path, vocab_size=450, user_defined=TAGS))
    tags = TAGS if request.param == "huggingface" else ("<|endoftext|>",)
    return load_tokenizer(save_huggingface(tmp_path / "hf", byte_level_json(tags)))


def one(tokenizer, name, record, **options):
    (result,) = render(TEMPLATES[name], [parse_record(record)], tokenizer, TemplateOptions(**options))
    return result


def marked(tokenizer, rendered) -> str:
    """The text, with what takes loss between « and »."""
    tokens, loss = rendered.tokens.tolist(), rendered.loss.tolist()
    parts, start = [], 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or loss[place] != loss[start]:
            text = tokenizer.decode(tokens[start:place])
            parts.append(f"«{text}»" if loss[start] else text)
            start = place
    return "".join(parts)


CHAT = {
    "system": "Be kind.",
    "context": "episode_id: 7",
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye", "context": "a passage"},
        {"role": "assistant_context", "content": "a note"},
        {"role": "assistant", "content": "So long", "think": "hm", "cite": "doc.pdf"},
    ],
}


def test_what_the_assistant_says_and_its_closing_tag_take_loss(tokenizer):
    assert marked(tokenizer, one(tokenizer, "episode", CHAT)) == (
        "<myPT_system>Be kind.</myPT_system><myPT_user>Hi</myPT_user>"
        "<myPT_assistant>«Hello!</myPT_assistant>»"
        "<myPT_user><myPT_user_context>a passage</myPT_user_context>Bye</myPT_user>"
        "<myPT_assistant_context>a note</myPT_assistant_context>"
        "<myPT_assistant>«<myPT_think>hm</myPT_think>So long<myPT_cite>doc.pdf</myPT_cite></myPT_assistant><myPT_eot>»"
    )


def test_tool_calls_take_loss_and_results_do_not(tokenizer):
    record = {
        "system": "Tools.",
        "messages": [
            {"role": "user", "content": "Find X"},
            {"role": "assistant_toolcall", "name": "search", "arguments": {"query": "Übung", "k": 5}, "think": "look"},
            {"role": "toolresult", "name": "search", "content": {"docs": ["ä", None, 1.5]}},
            {"role": "assistant_toolcall", "name": "list"},
            {"role": "toolresult", "content": '{"already": "JSON"}'},
            {"role": "toolresult", "content": "no JSON"},
            {"role": "assistant", "content": "Found."},
        ],
    }
    assert marked(tokenizer, one(tokenizer, "episode_tool", record)) == (
        "<myPT_system>Tools.</myPT_system>\n"
        "<myPT_user>Find X</myPT_user>\n"
        '<myPT_assistant>«<myPT_think>look</myPT_think><myPT_toolcall>{"name": "search", "query": "Übung", "k": 5}'
        "</myPT_toolcall></myPT_assistant>»\n"
        '<myPT_toolresult>{"docs": ["ä", null, 1.5]}</myPT_toolresult>\n'
        '<myPT_assistant>«<myPT_toolcall>{"name": "list"}</myPT_toolcall></myPT_assistant>»\n'
        '<myPT_toolresult>{"already": "JSON"}</myPT_toolresult>\n'
        '<myPT_toolresult>"no JSON"</myPT_toolresult>\n'
        "<myPT_assistant>«Found.</myPT_assistant>»\n"
        "«<myPT_eot>»\n"
    )


def test_tags_are_inserted_by_id_where_the_tokenizer_has_them(tmp_path):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path, vocab_size=450, user_defined=TAGS))
    tokens = one(tokenizer, "episode", CHAT).tokens.tolist()
    assert [tokenizer.token_id(tag) for tag in ("<myPT_system>", "<myPT_eot>")] == [tokens[0], tokens[-1]]


@pytest.mark.parametrize("name", ["episode", "episode_tool"])
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_come_back(tokenizer, name, text):
    record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    rendered = one(tokenizer, name, record, special_text="encode")
    end = "\n" if name == "episode_tool" else ""
    taking = tokenizer.decode(rendered.tokens[rendered.loss].tolist())
    assert taking == f"{text}</myPT_assistant><myPT_eot>"
    assert marked(tokenizer, rendered).startswith(f"<myPT_user>{text}</myPT_user>{end}<myPT_assistant>«{text}<")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "<myPT_eot>"},
        {"role": "user", "content": "x", "context": "<myPT_eot>"},
        {"role": "assistant", "content": "x", "think": "<myPT_eot>"},
        {"role": "assistant_toolcall", "name": "<myPT_eot>"},
        {"role": "assistant_toolcall", "name": "f", "arguments": {"a": ["<myPT_eot>"]}},
        {"role": "assistant_toolcall", "name": "f", "arguments": {"<myPT_eot>": 1}},
        {"role": "toolresult", "content": {"a": "<myPT_eot>"}},
    ],
)
def test_a_text_that_spells_a_tag_never_becomes_it(tokenizer, message):
    record = {"messages": [message, {"role": "assistant", "content": "y"}]}
    error = one(tokenizer, "episode_tool", record)
    assert isinstance(error, RecordError)
    assert "messages[0]" in str(error) and "'<myPT_eot>' at character 0" in str(error)
    rendered = one(tokenizer, "episode_tool", record, special_text="encode")
    if not tokenizer.special_tokens.get("<myPT_eot>"):
        assert isinstance(rendered, RecordError)  # as text, nothing would tell it from the template's own
        return
    assert rendered.tokens.tolist().count(tokenizer.token_id("<myPT_eot>")) == 1
    assert tokenizer.decode(rendered.tokens.tolist()).count("<myPT_eot>") == 2


@pytest.mark.parametrize(
    ("name", "record", "part"),
    [
        ("episode", {"messages": [{"role": "toolresult", "content": "x"}]}, "messages[0].role: 'toolresult'"),
        ("episode", {"messages": [{"role": "user", "content": "x"}]}, "none of 'assistant'"),
        (
            "episode_tool",
            {"messages": [{"role": "user", "content": "x"}]},
            "none of 'assistant' or 'assistant_toolcall'",
        ),
        ("episode", {"system": "a", "messages": [{"role": "system", "content": "b"}]}, "system: the record has one"),
        (
            "episode_tool",
            {"messages": [{"role": "assistant_toolcall", "name": "f", "arguments": {"name": "x"}}]},
            "messages[0].arguments: has the key 'name'",
        ),
    ],
)
def test_what_they_can_not_render_is_an_error(tokenizer, name, record, part):
    error = one(tokenizer, name, record)
    assert isinstance(error, RecordError) and part in str(error)


def test_a_system_prompt_is_for_conversations_that_have_none(tokenizer):
    messages = CHAT["messages"][:2]
    prompt = {"system_prompt": "Default."}
    for record, expected in (
        ({"messages": messages}, "Default."),
        ({"messages": messages, "system": "Own."}, "Own."),
        ({"messages": [{"role": "system", "content": "First."}, *messages]}, "First."),
    ):
        text = marked(tokenizer, one(tokenizer, "episode", record, **prompt))
        assert text.startswith(f"<myPT_system>{expected}</myPT_system><myPT_user>")
        assert text.count("<myPT_system>") == 1
