"""Text never becomes a control token: hostile chats have the control ids of harmless ones, whatever the tokenizer."""

import random
from typing import Any

import pytest
from hostile_tokenizers import makers
from prepared import CHATML
from template_rules import JINJA_FILES, render_one

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import TEMPLATES, TemplateOptions, load_tokenizer, parse_record, render

MAKERS = list(makers())

ADJACENT = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.name }}{{ message.content }}{{ message.reasoning_content }}<|im_end|>
{% endfor %}"""
"""A template that writes two fields next to each other, and writes fields next to its own markup."""

# A template whose markup and a field together may spell a control token: "<|" + name + "|>".
WRAPPED = """{% for message in messages %}{% generation %}<|im_start|>{{ message.content }}
<|{{ message.name }}|></{{ message.name }}>{{ message.tool_calls | default('') | tojson }}
<end_of_turn><|eot_id|></s>{% endgeneration %}{% endfor %}"""

WITHOUT_TOKENS = "{% set bos_token = bos_token | default('') %}{% set eos_token = eos_token | default('') %}"
JINJA = {
    "chatml": CHATML,
    "llama3": JINJA_FILES["llama3"],
    "llama2": WITHOUT_TOKENS + JINJA_FILES["llama2"],
    **{name: JINJA_FILES[name] for name in ("gemma", "qwen", "glm", "generation")},
    "adjacent": ADJACENT,
    "wrapped": WRAPPED,
    "upper": "{% for m in messages %}<s>{{ m.role }}: {{ m.content | upper }}</s>{% endfor %}",
}


def fragments(control: tuple[str, ...]) -> list[str]:
    """Return texts that are control tokens, texts that resemble them or become them when normalized, and ordinary texts."""
    spellings = [*control, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<unk>"]
    wide = ["".join(chr(ord(each) + 0xFEE0) for each in text) for text in spellings]
    part = [chr(ord(text[0]) + 0xFEE0) + text[1:] for text in spellings]
    accents = [f"{text[:1]}\u0338{text[1:]}" for text in spellings]
    cases = [changed for text in spellings for changed in (text.upper(), text.title())]
    odd = ["\ue0000\ue001", "\ue0001\ue001", "\U000f00000\U000f0001", "\U00020001", "\U00020000", "\U00100000"]
    plain = ["hello", " ", "\n", "", "ß", "\ufb01", "x" * 9, "1", "<think>\na\n</think>\n", "漢字", "👩‍👩‍👧"]
    plain += ["im_end", "/s", "user"]
    return [*spellings * 2, *wide, *part, *accents, *cases, *odd, *plain]


def hostile_text(rng: random.Random, pool: list[str], control: tuple[str, ...]) -> str:
    """Return the beginning or end of a control token, an ordinary text, or some texts of `pool` joined."""
    kind = rng.random()
    if kind < 0.15:
        spelling = rng.choice(control)
        cut = rng.randrange(len(spelling) + 1)
        return rng.choice([spelling[:cut], spelling[cut:], f"hi {spelling[:cut]}", f"{spelling[cut:]} hi"])
    if kind < 0.3:
        return rng.choice(["fine", "a text", "What is 2 + 2?"])
    return "".join(rng.choice(pool) for _ in range(rng.randrange(1, 5)))


def hostile_chat(rng: random.Random, pool: list[str], control: tuple[str, ...], template: str) -> dict[str, Any]:
    """Return a record whose fields are hostile texts. The roles alternate, as some templates demand."""

    def text() -> str:
        return hostile_text(rng, pool, control)

    rich = template in JINJA and rng.random() < 0.6
    messages: list[dict[str, Any]] = []
    for number in range(2 * rng.randrange(1, 3)):
        message: dict[str, Any] = {"role": ("user", "assistant")[number % 2], "content": text()}
        if rich or template in ("adjacent", "wrapped"):
            message["name"] = text()
        if rich and number % 2 and rng.random() < 0.5:
            message["reasoning_content"] = text()
        if rich and number % 2 and rng.random() < 0.5:
            call = {"name": text(), "arguments": {text(): [text(), 1, None], "n": text()}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        if template.startswith("episode") and rng.random() < 0.5:
            message["context" if number % 2 == 0 else rng.choice(["think", "cite"])] = text()
        messages.append(message)
    if template == "text":
        return {"text": text()}
    record: dict[str, Any] = {"messages": messages}
    if template == "openchat" and rng.random() < 0.5:
        record = {"items": messages, "condition": text()}
    if template not in ("gemma", "llama2") and rng.random() < 0.3:
        record["system"] = text()
    if rich and rng.random() < 0.3:
        record["tools"] = [{"type": "function", "function": {"name": text(), "description": text()}}]
    return record


KNOWN_KEYS = {
    *("role", "content", "name", "messages", "items", "system", "tools", "condition", "type", "function", "arguments"),
    *("reasoning_content", "tool_calls", "description", "context", "think", "cite", "text"),
}


def harmless(value: Any, key: str = "") -> Any:
    """Return the same record with an x for each character, except spaces, roles, types and known keys."""
    if isinstance(value, str):
        return value if key in ("role", "type") else "".join(each if each.isspace() else "x" for each in value)
    if isinstance(value, dict):
        return {k if k in KNOWN_KEYS else harmless(k): harmless(v, k) for k, v in value.items()}
    return [harmless(entry) for entry in value] if isinstance(value, list) else value


BY_NAME = {maker.name: maker for maker in MAKERS}
WIDE = "\uff1c/s\uff1e"


def both_modes(folder: Any, maker: str, messages: list[dict[str, Any]], template: str) -> list[Any]:
    """Return the tokenizer, and the chat rendered with special_text="error" and with special_text="encode"."""
    tokenizer = load_tokenizer(BY_NAME[maker].save(folder / maker))
    modes = [{"special_text": mode, "chat_template": template} for mode in ("error", "encode")]
    return [tokenizer, *(render_one(tokenizer, "hf", {"messages": messages}, **options) for options in modes)]


@pytest.mark.parametrize("field", ["content", "name", "reasoning_content"])
def test_text_that_normalization_turns_into_a_control_token_is_named_or_stays_text(tmp_path, field):
    """NFKC turns the full-width characters of `WIDE` into `</s>`, a control token of the vocabulary."""
    user = {"role": "user", "content": "hi", "name": "a"}
    chat = [{**user, field: f"a {WIDE} b"}, {"role": "assistant", "content": "b"}]
    template = "{% for m in messages %}{{ m.name }}: {{ m.reasoning_content }} {{ m.content }}</s>{% endfor %}"
    tokenizer, refused, encoded = both_modes(tmp_path, "t5_nfkc_False", chat, template)
    # The tokenizer alone encodes the text to EOS.
    assert tokenizer.eos_token_id in tokenizer.exact.encode(WIDE, add_special_tokens=False).ids
    assert isinstance(refused, RecordError) and f"messages[0].{field}" in str(refused)
    assert "'</s>'" in str(refused) and "--special-text encode" in str(refused)
    assert encoded.tokens.tolist().count(tokenizer.eos_token_id) == 2


def test_two_fields_that_spell_a_token_together_are_named_or_stay_text(tmp_path):
    chat = [{"role": "user", "name": "<|im_", "content": "end|> hi"}, {"role": "assistant", "content": "b", "name": "c"}]
    tokenizer, refused, encoded = both_modes(tmp_path, "bytes_gpt2_<|endoftext|>_plain", chat, ADJACENT)
    assert isinstance(refused, RecordError) and "'<|im_end|>' becomes the special token" in str(refused)
    assert "messages[0].name" in str(refused)
    assert encoded.tokens.tolist().count(tokenizer.token_id("<|im_end|>")) == 2
    assert "<|im_end|> hi" in tokenizer.decode(encoded.tokens.tolist())


def test_a_field_and_markup_that_spell_a_token_together_stay_text(tmp_path):
    chat = [{"role": "user", "name": "im_end", "content": "hi"}, {"role": "assistant", "content": "b", "name": "x"}]
    for maker in ("bytes_gpt2_<|endoftext|>_plain", "sentencepiece_bpe_identity_chatml", "tiktoken_<|endoftext|>"):
        tokenizer, refused, encoded = both_modes(tmp_path, maker, chat, WRAPPED)
        assert isinstance(refused, RecordError) == maker.startswith("bytes")
        assert encoded.tokens.tolist().count(tokenizer.token_id("<|im_end|>")) == 0


KEYS = """{% for m in messages %}{% set words = {'im_end': 1, 'IM_END': 1} %}{{ '<|im_start|>' + m.role + m.content }}\
{% generation %}{{ m | tojson }}{% if m.tool_calls %}{% for key in m.tool_calls[0].function.arguments %}\
{{ '<|' + key + '|>' }}{% endfor %}{% endif %}{% endgeneration %}{{ words['im_end'] }}<|im_end|>{% endfor %}"""


@pytest.mark.parametrize("maker", ["bytes_gpt2_<|endoftext|>_plain", "bytes_lowercase", "kimi", "tiktoken_<|endoftext|>"])
@pytest.mark.parametrize("key", ["<|im_start|>", "im_end", "IM_END", "name"])
def test_a_key_does_not_become_a_control_token_if_the_template_has_the_same_word(tmp_path, maker, key):
    call = {"type": "function", "function": {"name": "f", "arguments": {key: 1}}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call], key: "c"}]
    for name, template, counts in (("keys", KEYS, [2, 2]), ("qwen", JINJA["qwen"], [3, 3])):
        tokenizer, _, encoded = both_modes(tmp_path / name, maker, chat, template)
        tokens = encoded.tokens.tolist()
        assert [tokens.count(tokenizer.token_id(text)) for text in ("<|im_start|>", "<|im_end|>")] == counts


@pytest.mark.parametrize("flag", ["normalized", "lstrip", "rstrip", "both"])
def test_ordinary_chats_have_the_ids_of_the_tokenizer_whatever_the_flags_of_its_tokens(tmp_path, flag):
    chat = [{"role": "user", "content": " hi\n"}, {"role": "assistant", "content": "\n b "}]
    tokenizer, one, other = both_modes(tmp_path, f"bytes_gpt2_<|endoftext|>_{flag}", chat, CHATML)
    text = "<|im_start|>user\n hi\n<|im_end|>\n<|im_start|>assistant\n\n b <|im_end|>\n"
    assert one.tokens.tolist() == other.tokens.tolist() == tokenizer.exact.encode(text, add_special_tokens=False).ids
    bare = render_one(tokenizer, "hf", {"messages": chat}, chat_template=CHATML.replace("{{ message['role'] }}\n", ""))
    assert tokenizer.token_id("<|im_start|>") not in bare.tokens[bare.loss]  # its token has the "\n " after it


HOSTILE_CASES = [
    *(pytest.param(maker, 40, 1, id=maker.name) for maker in MAKERS[::11]),
    *(pytest.param(maker, 700, 2, id=f"many {maker.name}", marks=pytest.mark.heavy) for maker in MAKERS),
]


@pytest.mark.parametrize(("maker", "count", "seed"), HOSTILE_CASES)
def test_hostile_text_becomes_no_control_token(maker, count, seed, tmp_path):
    rng = random.Random(f"{maker.name} {seed}")
    tokenizer = load_tokenizer(maker.save(tmp_path / maker.name))
    assert {tokenizer.token_id(text) for text in maker.control} <= set(tokenizer.special_tokens.values())
    control = {tokenizer.token_id(text) for text in maker.control if text != maker.unknown}
    pool = fragments(maker.control)
    names = [*JINJA, "primer", "openchat", "episode", "episode_tool", "olmo", "text"]
    tally = {"rendered": 0, "refused": 0}
    while sum(tally.values()) < count:
        name = rng.choice(names)
        options = TemplateOptions(special_text=rng.choice(["error", "encode", "encode"]), chat_template=JINJA.get(name))
        record = hostile_chat(rng, pool, maker.control, name)
        try:
            parsed = [parse_record(each) for each in (record, harmless(record))]
            result, expected = render(TEMPLATES["hf" if name in JINJA else name], parsed, tokenizer, options)
        except PrepareError:
            names.remove(name)  # the tokenizer lacks what this template needs
            continue
        except RecordError:
            continue  # this record fits no schema
        tally["refused" if isinstance(result, RecordError) else "rendered"] += 1
        if not isinstance(result, RecordError):
            assert not isinstance(expected, RecordError), (maker.name, name, expected, record)
            found, wanted = ([id for id in each.tokens.tolist() if id in control] for each in (result, expected))
            assert found == wanted, (maker.name, name, options.special_text, record)
    assert tally["rendered"] > count / 4
    print(f"TALLY {maker.name} {tally}")
