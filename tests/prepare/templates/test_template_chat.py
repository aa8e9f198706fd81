"""Templates `hf` and `olmo` give the ids of transformers' apply_chat_template, and masks that a slow search confirms."""

import functools
import itertools
import json
import random

import numpy as np
import pytest
from prepared import CHATML, turns
from template_rules import BY_NAME, STYLES, render_one
from tokenizer_makers import ODD_TEXTS

from grain_sft.errors import RecordError
from grain_sft.prepare import TEMPLATES, TemplateOptions, parse_record, render
from grain_sft.prepare.templates.chat import OLMO_TEMPLATE


@pytest.fixture(params=STYLES, ids=lambda style: style.name)
def style(request):
    return request.param


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    return functools.cache(lambda style: style.load(tmp_path_factory.mktemp("styles")))


def rendered(tokenizer, messages, name="olmo", **options):
    return render_one(tokenizer, name, {"messages": messages}, **options)


def learned_text(tokenizer, result):
    return tokenizer.decode(result.tokens[result.loss].tolist())


def squeezed(text):
    return "".join(text.split())


def expected(tokenizer, messages, **options):
    """Return what transformers' apply_chat_template makes of a chat."""
    loaded = tokenizer.transformers_tokenizer
    options = {"chat_template": loaded.chat_template or OLMO_TEMPLATE, "date_string": "26 Jul 2024", **options}
    return loaded.apply_chat_template(messages, **options)


def expected_ids(tokenizer, messages, **options):
    found = expected(tokenizer, messages, tokenize=True, **options)
    return list(found["input_ids"] if hasattr(found, "keys") else found)


def places(tokenizer, text):
    """Return the characters (start, stop) of every token. Byte-level tokens are found by counting bytes."""
    loaded = tokenizer.transformers_tokenizer
    encoded = loaded(text, add_special_tokens=False, return_offsets_mapping=True)
    if "ByteLevel" not in json.dumps(json.loads(loaded.backend_tokenizer.to_str())["pre_tokenizer"]):
        return encoded["offset_mapping"]
    added = {str(token): len(str(token).encode()) for token in loaded.added_tokens_decoder.values()}
    sizes = [added.get(token, len(token)) for token in loaded.convert_ids_to_tokens(encoded["input_ids"])]
    ends = list(itertools.accumulate(sizes))
    character = [place for place, each in enumerate(text) for _ in each.encode()]  # the character of each byte
    return [(character[end - size], character[end - 1] + 1) for size, end in zip(sizes, ends, strict=True)]


def slow_mask(tokenizer, style, messages):
    """Return the loss mask of a chat. Each content must be unique, and is searched from the end of the previous content on."""
    text = expected(tokenizer, messages, tokenize=False)
    offsets = places(tokenizer, text)
    mask = np.zeros(len(offsets), bool)
    place = 0
    for number, message in enumerate(messages):
        content = style.seen(message["content"])
        start = text.index(content, place)
        stop = place = start + len(content)
        if message["role"] == "assistant":
            end = style.ends[number == len(messages) - 1]
            assert text.startswith(end, stop)
            touched = [i for i, (a, b) in enumerate(offsets) if a < stop + len(end) and b > start]
            if touched and start < stop + len(end):  # false if both content and end are empty
                mask[touched[0] : touched[-1] + 1] = True
    return mask.tolist()


WORDS = ["hello", "Übung", "👩‍👩‍👧‍👦", "مرحبا", "x = [1, 2]", "\n", "  ", "don't", "1234567", "漢字"]


def unique_chats(style, count, seed):
    """Yield chats of words, numbers, code, emoji and quotes of earlier answers. No two contents are equal."""
    rng = random.Random(seed)
    numbers = itertools.count()
    for _ in range(count):
        roles = ["user", "assistant"] * rng.randint(1, 4)
        if style.system and rng.random() < 0.4:
            roles.insert(0, "system")
        chat = []
        for role in roles:
            words = rng.choices(WORDS, k=8)
            before = [message["content"] for message in chat if message["role"] == "assistant"]
            quote = f" You said: {before[-1]}" if before and rng.random() < 0.3 and role == "user" else ""
            chat.append({"role": role, "content": f"<{next(numbers)}> {' '.join(words).strip()}{quote}"})
        yield chat


def test_ids_equal_those_of_transformers_and_masks_those_of_the_slow_search(style, loaded):
    tokenizer = loaded(style)
    chats = list(unique_chats(style, 40, style.name))
    conversations = [parse_record({"messages": chat}) for chat in chats]
    results = render(TEMPLATES["olmo"], conversations, tokenizer, TemplateOptions())
    for chat, result in zip(chats, results, strict=True):
        assert result.tokens.tolist() == expected_ids(tokenizer, chat)
        assert result.loss.tolist() == slow_mask(tokenizer, style, chat)
        assert result.tokens.dtype == np.uint32 and result.loss.dtype == np.bool_


HARD_TEXTS = [(f"a {text}", text, "b", text) for text in ("", "x", *ODD_TEXTS[3:])]  # [3:] leaves out the blank texts
HARD_TEXTS += [("Say: The answer.", "The answer.", "The answer.", "The answer.")]  # a user who quotes the assistant
HARD_TEXTS += [tuple(f"{space}the {word}{space}" for word in ("one", "two") * 2) for space in (" ", "\n\n", "\u3000")]


def test_odd_contents_have_the_ids_of_transformers_and_loss_on_the_answers(style, loaded):
    """Contents may be empty, odd, or quotes. They may begin and end with spaces, which templates trim for some roles only."""
    tokenizer = loaded(style)
    for texts in HARD_TEXTS:
        messages = [{"role": "system", "content": texts[2]}] * style.system + turns(*texts)
        if "</s>" in style.special:
            messages = [{**message, "content": message["content"].replace("</s>", "")} for message in messages]
        result = rendered(tokenizer, messages)
        assert result.tokens.tolist() == expected_ids(tokenizer, messages), texts
        assert squeezed(learned_text(tokenizer, result)) == squeezed(style.learned(messages)), texts


def test_a_turn_of_weight_0_takes_no_loss(style, loaded):
    tokenizer = loaded(style)
    messages = turns("one", "wrong", "two", "right")
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    found = learned_text(tokenizer, rendered(tokenizer, messages))
    assert "right" in found and "wrong" not in found


def test_text_that_spells_a_special_token_is_an_error_or_stays_text(style, loaded):
    tokenizer = loaded(style)
    for spelling in tokenizer.special_tokens:
        messages = turns(f"what is {spelling}? {spelling}{spelling}", f"é👍 {spelling} is a token")
        error = rendered(tokenizer, messages)
        assert isinstance(error, RecordError)
        assert "messages[0].content" in str(error) and f"{spelling!r} at character 8" in str(error)
        result = rendered(tokenizer, messages, special_text="encode")
        harmless = [{**message, "content": message["content"].replace(spelling, "x")} for message in messages]
        number = tokenizer.token_id(spelling)
        assert result.tokens.tolist().count(number) == expected_ids(tokenizer, harmless).count(number)
        assert squeezed(learned_text(tokenizer, result)) == squeezed(style.learned(messages))
        assert tokenizer.decode(result.tokens.tolist()).count(f"{spelling} is a token") == 1


def test_a_record_that_a_template_refuses_does_not_affect_other_records(loaded):
    """The first record has no thoughts. The last has blank thoughts, which give the same tokens."""
    chat, blank = turns("a", "b"), {"thinking": "\n"}
    wrong = {"roles must alternate": {"messages": chat[::-1]}, "nothing of tools": {"messages": chat, "tools": [CALL]}}
    for key, value in {"tool_calls": [CALL], "reasoning_content": "x", "functions": [CALL], "think": "x"}.items():
        wrong[f"writes nothing of {key}"] = {"messages": [chat[0], {**chat[1], key: value}]}
    records = [parse_record(each) for each in ({"messages": chat}, *wrong.values(), {"messages": [chat[0], chat[1] | blank]})]
    one, *errors, other = render(TEMPLATES["hf"], records, loaded(BY_NAME["llama2"]), TemplateOptions())
    assert all(part in str(error) for part, error in zip(wrong, errors, strict=True))
    assert one.tokens.tolist() == other.tokens.tolist()


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3}}}
TOOL_CHAT = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"rain": true}'},
    {"role": "assistant", "content": "It rains."},
]
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
LLAMA3_CALL = '<|python_tag|>weather.call({"city": "Köln", "days": 3})<|eom_id|>'  # other turns end in <|eot_id|>
FUNCTION_CHAT = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "function_calls": 'weather(city="Köln")'},
    {"role": "environment", "content": "rain"},
    {"role": "assistant", "content": "done", "function_calls": "stop()"},
]
FUNCTION_TEXT = """<function_calls>weather(city="Köln")</function_calls><|im_end|>\
done<function_calls>stop()</function_calls><|endoftext|>"""
SYSTEM_CHAT = [{"role": "system", "content": "s"}, *turns("u", "a", "v", "b")]
REASONED_CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x", "reasoning_content": "why"}]
_THOUGHT = "<think>\n{0} thought\n</think>\n\n{0}"
THOUGHTS = turns("one", _THOUGHT.format("first"), "two", _THOUGHT.format("second"))


LEARNED = [
    ("qwen", TOOL_CHAT, f"Let me look.\n{QWEN_CALL}<|im_end|>It rains.<|im_end|>"),
    ("llama3_tools", TOOL_CHAT, f"{LLAMA3_CALL}It rains.<|eot_id|>"),
    ("built_in_olmo", SYSTEM_CHAT, "a<|im_end|>b<|endoftext|>"),
    ("olmo", FUNCTION_CHAT, FUNCTION_TEXT),
    ("built_in_olmo", FUNCTION_CHAT, FUNCTION_TEXT),
    ("qwen", THOUGHTS, "first<|im_end|><think>\nsecond thought\n</think>\n\nsecond<|im_end|>"),
    ("deepseek", [*THOUGHTS, *turns("three", "third")], "\n\nfirst<|end|>\n\nsecond<|end|>third<|end|>"),
    ("qwen", REASONED_CHAT, "<think>\nwhy\n</think>\n\nx<|im_end|>"),
]


@pytest.mark.parametrize(("name", "messages", "learned"), LEARNED)
def test_tool_calls_and_thoughts_take_loss_as_the_template_writes_them(loaded, name, messages, learned):
    tokenizer = loaded(BY_NAME[name])
    result = rendered(tokenizer, messages)
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    assert learned_text(tokenizer, result) == learned


def test_messages_assistant_toolcall_and_toolresult_become_tool_calls_and_results(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    messages = [
        {"role": "user", "content": "find"},
        {"role": "assistant_toolcall", "name": "search", "arguments": {"query": "X"}, "reasoning_content": "why"},
        {"role": "toolresult", "name": "search", "content": {"found": ["ä"]}},
        {"role": "assistant", "content": "here"},
    ]
    result = rendered(tokenizer, messages)
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "X"}}\n</tool_call><|im_end|>'
    assert learned_text(tokenizer, result) == f"<think>\nwhy\n</think>\n\n{call}here<|im_end|>"
    assert '{"found": ["ä"]}' in tokenizer.decode(result.tokens.tolist())


@pytest.mark.parametrize("odd", ["\ue0000\ue001", "\ue0001\ue001", "\U000f00000\U000f0001", "<think>", "\U00020000"])
def test_no_character_of_a_prompt_moves_the_loss(loaded, odd):
    tokenizer = loaded(BY_NAME["qwen"])
    messages = [
        {"role": "user", "content": f"one {odd}", "name": odd},
        {"role": "assistant", "content": "x", "reasoning_content": "why", "name": odd},
        {"role": "user", "content": odd},
        {"role": "assistant", "content": "y", "name": "n", "reasoning_content": f"so {odd}"},
    ]
    result = rendered(tokenizer, messages)
    assert result.tokens.tolist() == expected_ids(tokenizer, messages)
    assert learned_text(tokenizer, result) == f"x<|im_end|><think>\nso {odd}\n</think>\n\ny<|im_end|>"


def test_thoughts_take_loss_if_the_template_writes_no_tag_before_them(loaded):
    """The prompt has `<think>`, the tag that other templates write before thoughts. It changes nothing here."""
    template = """{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.last %}
thinking: {{ m.reasoning_content | default('none') }}{% endif %}
{{ m.content }}<|im_end|>{% endfor %}"""
    messages = turns("hello <think> there", "answer")
    messages[1]["reasoning_content"] = "thought"
    tokenizer = loaded(BY_NAME["chatml"])
    result = rendered(tokenizer, messages, chat_template=template)
    assert learned_text(tokenizer, result).strip() == "thoughtanswer<|im_end|>"


def test_an_eos_directly_after_the_end_of_a_turn_takes_loss_too(loaded):
    """In the second case, the template writes no EOS. The next user's text spells one, which takes no loss."""
    tokenizer = loaded(BY_NAME["olmo"])
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{{ EOS if loop.index % 2 == 0 }}{% endfor %}"
    for eos, user, end in (("eos_token", "u", "<|im_end|><|endoftext|>"), ("''", "<|endoftext|>", "<|im_end|>")):
        options = {"chat_template": template.replace("EOS", eos), "special_text": "encode"}
        result = rendered(tokenizer, turns("one", "a", user, "b"), **options)
        assert learned_text(tokenizer, result) == f"a{end}b{end}"


def test_tools_and_system_of_the_record_reach_the_template(loaded):
    tokenizer = loaded(BY_NAME["qwen"])
    chat, template = turns("a", "b"), "{{ tools | tojson if tools else 'none' }}" + CHATML
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
    result = render_one(tokenizer, "hf", {"messages": chat, "tools": tools, "system": "be kind"}, chat_template=template)
    messages = [{"role": "system", "content": "be kind"}, *chat]
    assert result.tokens.tolist() == expected_ids(tokenizer, messages, tools=tools, chat_template=template)
    assert learned_text(tokenizer, result) == "b<|im_end|>"


WRONG_TEMPLATES = [
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ messages[0].content + 1 }}", "can only concatenate"),
    ("{{ strftime_now('%Y') }}", "today's date"),
    ("{% for m in messages %}{{ m.content[:2] }}{% endfor %}", "{% generation %}"),
    ("{% set a %}{% generation %}x{% endgeneration %}{% endset %}{{ a | length, messages }}", "changes a text"),
    ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "{% generation %}"),
    ("{% for m in messages %}{{ m.tool_calls and messages[2].content }}{{ m.content }},{% endfor %}", "end can't"),
    ("{% for m in messages if m.role != 'tool' %}{{ m.tool_calls, m.content }}{% endfor %}", "nothing of tool."),
    ("{% for m in messages[1:] %}{{ m.content }},{% endfor %}", "nothing of system."),  # as DeepSeek's with two system texts
    ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %},{% endfor %}", "nothing of user."),
    ("{% for m in messages %}{{ m.content.split('</think>\n\n')[-1] }},{% endfor %}", "nothing of the last thoughts."),
    ("{% for m in messages %}{{ m | tojson }},{% endfor %}", "messages[1].tool_calls[0].function.arguments: JSON text"),
]
QUOTED_CHAT = [*turns("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}]
CHATS = {"tool_calls": TOOL_CHAT, "messages[1:]": [SYSTEM_CHAT[0], *SYSTEM_CHAT], "m | tojson": QUOTED_CHAT, "think": THOUGHTS}
"""Chats for `WRONG_TEMPLATES`: a template gets the first chat whose key is part of its text, else a question and an answer."""


@pytest.mark.parametrize(("template", "part"), WRONG_TEMPLATES)
def test_templates_that_fail_or_do_not_show_the_place_of_each_text_are_errors(loaded, template, part):
    chat = next((chat for written, chat in CHATS.items() if written in template), turns("question", "answer"))
    error = rendered(loaded(BY_NAME["chatml"]), chat, chat_template=template)
    assert isinstance(error, RecordError) and part in str(error)
