"""hf and olmo: ids equal apply_chat_template's, and masks equal those of a slow reader who looks for the texts."""

from __future__ import annotations

import itertools
import json
import pickle
import random

import numpy as np
import pytest
from chat_styles import BY_NAME, CHATML, STYLES, Style
from tokenizer_makers import DATA, FILES, ODD_TEXTS, byte_level_json, save_huggingface, save_sentencepiece

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.schema import parse_json, parse_record
from grain_sft.prepare.templates import TEMPLATES, TemplateOptions, render
from grain_sft.prepare.templates.chat import OLMO_TEMPLATE
from grain_sft.prepare.tokenizers import load_tokenizer

pytest.importorskip("transformers")

_LOADED: dict = {}


@pytest.fixture(params=STYLES, ids=lambda style: style.name)
def style(request):
    return request.param


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """style -> its tokenizer, loaded once."""

    def load(style: Style):
        if style.name not in _LOADED:
            _LOADED[style.name] = style.load(tmp_path_factory.mktemp("styles"))
        return _LOADED[style.name]

    return load


def rendered(tokenizer, record, name="olmo", **options):
    (result,) = render(TEMPLATES[name], [parse_record(record)], tokenizer, TemplateOptions(**options))
    return result


def expected_ids(tokenizer, messages, **options):
    """Of transformers, whatever it returns."""
    loaded = tokenizer.transformers_tokenizer
    options = {"chat_template": loaded.chat_template or OLMO_TEMPLATE, "date_string": "26 Jul 2024", **options}
    found = loaded.apply_chat_template(messages, tokenize=True, **options)
    return list(found["input_ids"] if hasattr(found, "keys") else found)


def text_of(tokenizer, messages):
    loaded = tokenizer.transformers_tokenizer
    template = loaded.chat_template or OLMO_TEMPLATE
    return loaded.apply_chat_template(messages, tokenize=False, chat_template=template, date_string="26 Jul 2024")


def places(tokenizer, text):
    """(start, stop) of every token, by a way of its own where tokens are bytes: counting them."""
    loaded = tokenizer.transformers_tokenizer
    encoded = loaded(text, add_special_tokens=False, return_offsets_mapping=True)
    if "ByteLevel" not in json.dumps(json.loads(loaded.backend_tokenizer.to_str())["pre_tokenizer"]):
        return encoded["offset_mapping"]
    added = {str(token): len(str(token).encode()) for token in loaded.added_tokens_decoder.values()}
    sizes = [added.get(token, len(token)) for token in loaded.convert_ids_to_tokens(encoded["input_ids"])]
    ends = list(itertools.accumulate(sizes))
    character = [place for place, each in enumerate(text) for _ in each.encode()]  # of each byte
    return [(character[end - size], character[end - 1] + 1) for size, end in zip(sizes, ends, strict=True)]


def slow_mask(tokenizer, style, messages):
    """Looks for each turn's content from the place on where the last one ended; contents must be unique."""
    text = text_of(tokenizer, messages)
    offsets = places(tokenizer, text)
    mask = [False] * len(offsets)
    place = 0
    for number, message in enumerate(messages):
        content = style.seen(message["content"])
        start = text.index(content, place)
        stop = place = start + len(content)
        if message["role"] == "assistant":
            end = style.ends[number == len(messages) - 1]
            assert text.startswith(end, stop)
            touched = [i for i, (a, b) in enumerate(offsets) if a < stop + len(end) and b > start]
            for i in range(touched[0], touched[-1] + 1) if touched and start < stop + len(end) else ():
                mask[i] = True
    return mask


def unique_chats(style, count, seed):
    """Chats whose contents are unique, of words, numbers, code, emoji and quotes of what was said before."""
    rng = random.Random(seed)
    numbers = itertools.count()
    for _ in range(count):
        roles = ["user", "assistant"] * rng.randint(1, 4)
        if style.system and rng.random() < 0.4:
            roles.insert(0, "system")
        chat = []
        for role in roles:
            words = rng.choices(
                ["hello", "Übung", "👩‍👩‍👧‍👦", "مرحبا", "x = [1, 2]", "\n", "  ", "don't", "1234567", "漢字"], k=8
            )
            before = [message["content"] for message in chat if message["role"] == "assistant"]
            quote = f" You said: {before[-1]}" if before and rng.random() < 0.3 and role == "user" else ""
            chat.append({"role": role, "content": f"<{next(numbers)}> {' '.join(words).strip()}{quote}"})
        yield chat


def test_ids_and_masks_equal_those_of_transformers_and_of_the_slow_reader(style, loaded):
    tokenizer = loaded(style)
    chats = list(unique_chats(style, 40, style.name))
    results = render(
        TEMPLATES["olmo"], [parse_record({"messages": chat}) for chat in chats], tokenizer, TemplateOptions()
    )
    for chat, result in zip(chats, results, strict=True):
        assert result.tokens.tolist() == expected_ids(tokenizer, chat)
        assert result.loss.tolist() == slow_mask(tokenizer, style, chat)
        assert result.tokens.dtype == np.uint32 and result.loss.dtype == np.bool_


def test_what_takes_loss_decodes_to_what_the_assistant_says(style, loaded):
    tokenizer = loaded(style)
    for chat in unique_chats(style, 10, 7):
        result = rendered(tokenizer, {"messages": chat})
        said = [style.seen(message["content"]) for message in chat if message["role"] == "assistant"]
        ends = [*[style.ends[0]] * (len(said) - 1), style.ends[1]]
        found = tokenizer.decode(result.tokens[result.loss].tolist())
        expected = "".join(text + end for text, end in zip(said, ends, strict=True))
        assert "".join(found.split()) == "".join(expected.split())
        if style.tokenizer == "llama3" and "" not in style.ends:
            assert found.strip() == expected.strip()


@pytest.mark.parametrize("text", ["", "x", *ODD_TEXTS[3:]], ids=ascii)
def test_odd_and_empty_contents(style, loaded, text):
    tokenizer = loaded(style)
    if "</s>" in text and "</s>" in style.special:
        text = text.replace("</s>", "")
    messages = [
        {"role": "user", "content": f"a {text}"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": text},
    ]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    said = (style.seen(text) + style.ends[0]) + (style.seen(text) + style.ends[1])
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert "".join(found.split()) == "".join(said.split())


def test_a_user_who_quotes_the_assistant_takes_no_loss(style, loaded):
    tokenizer = loaded(style)
    messages = [
        {"role": "user", "content": "Say: The answer."},
        {"role": "assistant", "content": "The answer."},
        {"role": "user", "content": "The answer."},
        {"role": "assistant", "content": "The answer."},
    ]
    result = rendered(tokenizer, {"messages": messages})
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert found.count("The answer.") == 2 and "Say" not in found
    other = tokenizer.decode(result.tokens[~result.loss].tolist())
    assert other.count("The answer.") == 2


@pytest.mark.parametrize("space", ["", " ", "\n\n", "\u3000"])
def test_contents_with_space_around_them(style, loaded, space):
    """Also where a template trims some roles' contents and not others'."""
    tokenizer = loaded(style)
    messages = [{"role": role, "content": f"{space}the {role}{space}"} for role in ("system", "user", "assistant") * 2]
    del messages[3]
    messages = messages if style.system else messages[1:]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    said = style.seen(messages[-1]["content"])
    assert "".join(found.split()) == "".join(f"{said}{style.ends[0]}{said}{style.ends[1]}".split())


def test_a_turn_of_weight_0_takes_no_loss(style, loaded):
    tokenizer = loaded(style)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "right", "weight": 1},
    ]
    result = rendered(tokenizer, {"messages": messages})
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert "right" in found and "wrong" not in found


def test_special_text_is_an_error_or_ordinary_text(style, loaded):
    tokenizer = loaded(style)
    for spelling in tokenizer.special_tokens:
        record = {
            "messages": [
                {"role": "user", "content": f"what is {spelling}? {spelling}{spelling}"},
                {"role": "assistant", "content": f"é👍 {spelling} is a token"},
            ]
        }
        error = rendered(tokenizer, record)
        assert isinstance(error, RecordError)
        assert "messages[0].content" in str(error) and f"{spelling!r} at character 8" in str(error)
        result = rendered(tokenizer, record, special_text="encode")
        harmless = [{**message, "content": message["content"].replace(spelling, "x")} for message in record["messages"]]
        number = tokenizer.token_id(spelling)
        assert result.tokens.tolist().count(number) == expected_ids(tokenizer, harmless).count(number)
        found = tokenizer.decode(result.tokens[result.loss].tolist())
        said = style.seen(record["messages"][1]["content"]) + style.ends[1]
        assert "".join(found.split()) == "".join(said.split())
        decoded = tokenizer.decode(result.tokens.tolist())
        assert decoded.count(f"{spelling} is a token") == 1


def test_encoding_special_text_changes_nothing_where_there_is_none(style, loaded):
    tokenizer = loaded(style)
    for chat in unique_chats(style, 5, 3):
        one = rendered(tokenizer, {"messages": chat})
        other = rendered(tokenizer, {"messages": chat}, special_text="encode")
        assert one.tokens.tolist() == other.tokens.tolist() and one.loss.tolist() == other.loss.tolist()


def test_special_text_elsewhere_leaves_the_rest_of_the_chat_as_it_is(style, loaded):
    """The chat with one special spelling has the tokens of the chat without, but for that one text."""
    tokenizer = loaded(style)
    for chat in unique_chats(style, 5, 4):
        (spelling, *_) = tokenizer.special_tokens
        marked = [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + f" {spelling} end"}]
        result = rendered(tokenizer, {"messages": marked}, special_text="encode")
        plain = rendered(tokenizer, {"messages": [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + " end"}]})
        start = int(np.flatnonzero(~plain.loss)[-1]) + 1 if style.ends[1] else 0
        start = start if plain.loss[-1] else 0
        assert result.tokens[:start].tolist() == plain.tokens[:start].tolist()
        assert result.loss[:start].tolist() == plain.loss[:start].tolist()


def test_a_conversation_without_assistant_is_an_error(style, loaded):
    error = rendered(loaded(style), {"messages": [{"role": "user", "content": "hello?"}]})
    assert isinstance(error, RecordError) and "assistant" in str(error)


def test_what_a_template_refuses_is_an_error_of_that_record_alone(loaded):
    tokenizer = loaded(BY_NAME["llama2"])
    good = parse_record({"prompt": "a", "completion": "b"})
    bad = parse_record({"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]})
    results = render(TEMPLATES["hf"], [good, bad, good], tokenizer, TemplateOptions())
    assert isinstance(results[1], RecordError) and "roles must alternate" in str(results[1])
    assert results[0].tokens.tolist() == results[2].tokens.tolist()


TOOL_CHAT = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3}}}],
    },
    {"role": "tool", "name": "weather", "content": '{"rain": true}'},
    {"role": "assistant", "content": "It rains."},
]


def test_tool_calls_take_loss_and_results_do_not(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    result = rendered(tokenizer, {"messages": TOOL_CHAT})
    assert result.tokens.tolist() == expected_ids(tokenizer, TOOL_CHAT)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert found == f"Let me look.\n{call}<|im_end|>It rains.<|im_end|>"


def test_tool_calls_that_end_their_turn_otherwise_take_loss_to_that_end(loaded):
    tokenizer = loaded(BY_NAME["llama3_tools"])
    result = rendered(tokenizer, {"messages": TOOL_CHAT})
    assert result.tokens.tolist() == expected_ids(tokenizer, TOOL_CHAT)
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert found == '<|python_tag|>weather.call({"city": "Köln", "days": 3})<|eom_id|>It rains.<|eot_id|>'


@pytest.mark.parametrize("name", ["olmo", "built_in_olmo"])
def test_function_calls_take_loss(loaded, name):
    tokenizer = loaded(BY_NAME[name])
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "function_calls": 'weather(city="Köln")'},
        {"role": "environment", "content": "rain"},
        {"role": "assistant", "content": "done", "function_calls": "stop()"},
    ]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    assert tokenizer.decode(result.tokens[result.loss].tolist()) == (
        '<function_calls>weather(city="Köln")</function_calls><|im_end|>'
        "done<function_calls>stop()</function_calls><|endoftext|>"
    )


def test_tool_records_of_the_episode_tools_become_tool_calls(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    record = {
        "messages": [
            {"role": "user", "content": "find"},
            {"role": "assistant_toolcall", "name": "search", "arguments": {"query": "X"}},
            {"role": "toolresult", "name": "search", "content": {"found": ["ä"]}},
            {"role": "assistant", "content": "here"},
        ]
    }
    result = rendered(tokenizer, record)
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "X"}}\n</tool_call><|im_end|>'
    assert tokenizer.decode(result.tokens[result.loss].tolist()) == f"{call}here<|im_end|>"
    assert '{"found": ["ä"]}' in tokenizer.decode(result.tokens.tolist())


@pytest.mark.parametrize("style_name", ["qwen", "deepseek"])
def test_thoughts_take_loss_where_the_template_keeps_them(loaded, style_name):
    tokenizer = loaded(BY_NAME[style_name])
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nfirst thought\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nsecond thought\n</think>\n\nsecond"},
    ]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    if style_name == "qwen":
        assert found == "first<|im_end|><think>\nsecond thought\n</think>\n\nsecond<|im_end|>"
    else:
        assert found == "\n\nfirst<|end|>\n\nsecond<|end|>"


def test_reasoning_beside_the_content_takes_loss(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x", "reasoning_content": "why"}]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert found == "<think>\nwhy\n</think>\n\nx<|im_end|>"


@pytest.mark.parametrize("odd", ["\ue0000\ue001", "\ue0001\ue001", "\U000f00000\U000f0001", "<think>", "\U00020000"])
def test_no_character_of_a_prompt_moves_the_loss(loaded, odd):
    tokenizer = loaded(BY_NAME["qwen"])
    messages = [
        {"role": "user", "content": f"one {odd}", "name": odd},
        {"role": "assistant", "content": "x", "reasoning_content": "why", "name": odd},
        {"role": "user", "content": odd},
        {"role": "assistant", "content": "y", "name": "n", "reasoning_content": f"so {odd}"},
    ]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert found == f"x<|im_end|><think>\nso {odd}\n</think>\n\ny<|im_end|>"


@pytest.mark.parametrize("extra", [{"name": "n"}, {"reasoning_content": "why"}], ids=["name", "reasoning"])
def test_a_private_use_character_of_a_prompt_does_not_give_the_prompt_loss(loaded, extra):
    """In version 0.1.0 all of such a chat took loss: the text of the user was the marker of the assistant's second field."""
    messages = [{"role": "user", "content": "one \ue0001\ue001"}, {"role": "assistant", "content": "x", **extra}]
    tokenizer = loaded(BY_NAME["chatml"])
    result = rendered(tokenizer, {"messages": messages}, name="hf")
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    assert tokenizer.decode(result.tokens[result.loss].tolist()) == "x<|im_end|>"


def test_thoughts_without_a_tag_take_loss_from_where_they_begin(loaded):
    """Also where the prompt has the tag that other templates write."""
    template = """{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.last %}
thinking: {{ m.reasoning_content | default('none') }}{% endif %}
{{ m.content }}<|im_end|>{% endfor %}"""
    messages = [
        {"role": "user", "content": "hello <think> there"},
        {"role": "assistant", "content": "said", "reasoning_content": "thought"},
    ]
    tokenizer = loaded(BY_NAME["chatml"])
    result = rendered(tokenizer, {"messages": messages}, name="hf", chat_template=template)
    assert tokenizer.decode(result.tokens[result.loss].tolist()).strip() == "thoughtsaid<|im_end|>"


def test_special_text_in_tool_calls_and_names_is_found_or_ordinary(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>"]}}}
    record = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    }
    error = rendered(tokenizer, record)
    assert isinstance(error, RecordError) and "'<|im_end|>' at character 0" in str(error)
    result = rendered(tokenizer, record, special_text="encode")
    assert result.tokens.tolist().count(tokenizer.token_id("<|im_end|>")) == 3  # of three turns
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert '{"<|im_end|>": ["<|im_start|>"]}' in found


def test_tools_of_the_record_reach_the_template(loaded):
    tokenizer = loaded(BY_NAME["chatml"])
    template = "{{ tools | tojson if tools else 'none' }}" + CHATML
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    result = rendered(tokenizer, {"messages": messages, "tools": tools}, name="hf", chat_template=template)
    assert result.tokens.tolist() == expected_ids(tokenizer, messages, tools=tools, chat_template=template)
    assert tokenizer.decode(result.tokens[result.loss].tolist()) == "b<|im_end|>"


def test_a_record_with_a_system_text_is_the_chat_with_a_system_message(loaded):
    tokenizer = loaded(BY_NAME["chatml"])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one = rendered(tokenizer, {"system": "be kind", "messages": messages})
    other = rendered(tokenizer, {"messages": [{"role": "system", "content": "be kind"}, *messages]})
    assert one.tokens.tolist() == other.tokens.tolist()


def test_masks_of_marked_templates_are_those_of_transformers(loaded):
    tokenizer = loaded(BY_NAME["generation"])
    for chat in unique_chats(BY_NAME["generation"], 10, 1):
        expected = tokenizer.transformers_tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        result = rendered(tokenizer, {"messages": chat})
        assert result.tokens.tolist() == list(expected["input_ids"])
        assert result.loss.tolist() == [bool(each) for each in expected["assistant_masks"]]


def test_a_chosen_template_comes_before_the_tokenizers_own(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    result = rendered(tokenizer, {"messages": messages}, name="hf", chat_template=CHATML)
    assert result.tokens.tolist() == expected_ids(tokenizer, messages, chat_template=CHATML)


def test_what_is_missing_is_named(tmp_path):
    record = {"prompt": "a", "completion": "b"}
    plain = load_tokenizer(save_huggingface(tmp_path / "hf", byte_level_json(("<|endoftext|>",)), eos="<|endoftext|>"))
    with pytest.raises(PrepareError, match=r"no chat template.*--chat-template"):
        rendered(plain, record, name="hf")
    with pytest.raises(PrepareError, match=r"<\|im_start\|>, <\|im_end\|>"):
        rendered(plain, record, name="olmo")
    bare = load_tokenizer(save_sentencepiece(tmp_path))
    with pytest.raises(PrepareError, match=r"no chat template.*--chat-template"):
        rendered(bare, record, name="hf")
    with pytest.raises(PrepareError, match=r"<\|im_start\|>, <\|im_end\|>"):
        rendered(bare, record, name="olmo")
    with pytest.raises(PrepareError, match="Jinja"):
        rendered(plain, record, name="hf", chat_template="{% for x in %}")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ strftime_now('%Y') }}", "today's date"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ raise_exception('no such thing') }}", "no such thing"),
        ("{% for m in messages %}{{ m.content[:2] }}{% endfor %}", "{% generation %}"),
        ("{{ messages | length }}", "{% generation %}"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "{% generation %}"),
    ],
)
def test_templates_that_fail_or_can_not_be_followed_are_errors(loaded, template, part):
    error = rendered(loaded(BY_NAME["chatml"]), {"prompt": "question", "completion": "answer"}, chat_template=template)
    assert isinstance(error, RecordError) and part in str(error)


def test_the_built_in_template_is_chatml_that_ends_in_eos(loaded):
    tokenizer = loaded(BY_NAME["built_in_olmo"])
    record = {"system": "s", "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    result = rendered(tokenizer, record)
    assert tokenizer.decode(result.tokens.tolist()) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|endoftext|>"
    )
    assert result.tokens[-1] == tokenizer.eos_token_id and result.loss[-1]


@pytest.mark.parametrize("name", ["built_in_olmo", "llama2", "gemma", "generation"])
def test_a_message_of_200_000_characters(loaded, name):
    style = BY_NAME[name]
    tokenizer = loaded(style)
    text = "mixed مرحبا 👩‍👩‍👧‍👦 text\n" * 9000 + "end"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    result = rendered(tokenizer, {"messages": messages})
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    found = tokenizer.decode(result.tokens[result.loss].tolist())
    assert found.strip().removesuffix(style.ends[1].strip()).strip() == text


def test_a_pickled_tokenizer_renders_the_same(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    again = pickle.loads(pickle.dumps(tokenizer))
    one, other = (rendered(each, {"messages": TOOL_CHAT}) for each in (tokenizer, again))
    assert one.tokens.tolist() == other.tokens.tolist() and one.loss.tolist() == other.loss.tolist()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["built_in_olmo", "llama2", "gemma", "qwen"])
def test_real_chats(loaded, path, name):
    if not DATA.exists():
        pytest.skip("the shared data are not here")
    style = BY_NAME[name]
    tokenizer = loaded(style)
    lines = path.read_bytes().splitlines()[:100]
    results = render(
        TEMPLATES["olmo"], [parse_record(parse_json(line)) for line in lines], tokenizer, TemplateOptions()
    )
    for line, result in zip(lines, results, strict=True):
        messages = json.loads(line)["messages"]
        assert result.tokens.tolist() == expected_ids(tokenizer, messages)
        found = tokenizer.decode(result.tokens[result.loss].tolist())
        said = "".join(style.seen(each["content"]) for each in messages if each["role"] == "assistant") + style.ends[1]
        assert "".join(found.split()) == "".join(said.split())
