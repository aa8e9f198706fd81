"""openchat: tokens and weights against the formula, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizer_makers import ODD_TEXTS, byte_level_json, metaspace_json, save_huggingface, save_sentencepiece

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.schema import parse_record
from grain_sft.prepare.templates import TEMPLATES, TemplateOptions, render
from grain_sft.prepare.tokenizers import load_tokenizer

OPENCHAT = TEMPLATES["openchat"]
EOT = "<|end_of_turn|>"


@pytest.fixture(params=["sentencepiece", "byte level", "llama"])
def tokenizer(request, tmp_path):
    if request.param == "sentencepiece":
        return load_tokenizer(save_sentencepiece(tmp_path, user_defined=(EOT,)))
    if request.param == "byte level":
        return load_tokenizer(save_huggingface(tmp_path / "hf", byte_level_json((EOT, "</s>")), eos=EOT))
    return load_tokenizer(save_huggingface(tmp_path / "hf", metaspace_json(("<s>", "</s>", EOT)), bos="<s>", eos=EOT))


def by_the_formula(tokenizer, record, *, seq_level_weight=False, condition=""):
    """Tokens and weights as the specification writes them, one list after the other."""
    eot = [tokenizer.token_id(EOT)]
    tokens = list(tokenizer.empty_ids)
    weights = [0.0] * len(tokens)
    if record.get("system"):
        system = tokenizer.encode([record["system"]])[0]
        tokens += system + eot
        weights += [0.0] * len(system) + [0.0]
    for item in record["items"]:
        prefix = f"{record.get('condition') or condition} {item['role'].title()}:".strip()
        role, text = tokenizer.encode([prefix, item["content"]])
        weight = item.get("weight", 1.0 if item["role"] == "assistant" else 0.0)
        if seq_level_weight:
            weight /= len(text) + len(eot)
        tokens += role + text + eot
        weights += [0.0] * len(role) + [weight] * (len(text) + 1)
    return tokens, weights


RECORDS = [
    {"items": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {
        "items": [
            {"role": "user", "content": "hi", "weight": 0.0},
            {"role": "assistant", "content": "no", "weight": 0.0},
            {"role": "user", "content": "  again\n", "weight": 0.25},
            {"role": "assistant", "content": "yes", "weight": 2.5},
            {"role": "assistant", "content": "", "weight": 1},
        ],
        "condition": "GPT4 Correct",
        "system": "be kind",
    },
    {"items": [{"role": "assistant", "content": "first"}], "system": "", "condition": ""},
    {"items": [{"role": role, "content": text} for text in ODD_TEXTS for role in ("user", "assistant")], "system": "s"},
]


@pytest.mark.parametrize("seq_level_weight", [False, True])
@pytest.mark.parametrize("condition", [None, "Code"])
def test_tokens_and_weights_follow_the_formula(tokenizer, seq_level_weight, condition):
    options = TemplateOptions(special_text="encode", seq_level_weight=seq_level_weight, condition=condition)
    results = render(OPENCHAT, [parse_record(record) for record in RECORDS], tokenizer, options)
    for record, rendered in zip(RECORDS, results, strict=True):
        tokens, weights = by_the_formula(
            tokenizer, record, seq_level_weight=seq_level_weight, condition=condition or ""
        )
        assert rendered.tokens.tolist() == tokens
        assert rendered.loss.dtype == np.float32
        assert rendered.loss.tolist() == np.array(weights, np.float32).tolist()


def test_a_first_system_message_is_the_system_text(tokenizer):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a"}]
    (result,) = render(OPENCHAT, [parse_record({"messages": messages})], tokenizer, TemplateOptions())
    tokens, _ = by_the_formula(tokenizer, {"system": "be kind", "items": messages[1:]})
    assert result.tokens.tolist() == tokens
    (error,) = render(OPENCHAT, [parse_record({"messages": messages[::-1]})], tokenizer, TemplateOptions())
    assert isinstance(error, RecordError) and "system" in str(error)


@pytest.mark.parametrize("place", ["system", "condition", "content"])
def test_special_text_is_an_error_wherever_it_stands(tokenizer, place):
    record = {"items": [{"role": "user", "content": "a"}], "system": "s", "condition": "c"}
    if place == "content":
        record["items"] = [{"role": "user", "content": f"x {EOT}"}]
    else:
        record[place] = f"x {EOT}"
    (error,) = render(OPENCHAT, [parse_record(record)], tokenizer, TemplateOptions())
    assert isinstance(error, RecordError)
    assert place in str(error) and f"{EOT!r} at character 2" in str(error)
    (rendered,) = render(OPENCHAT, [parse_record(record)], tokenizer, TemplateOptions(special_text="encode"))
    assert rendered.tokens.tolist().count(tokenizer.token_id(EOT)) == 2  # after the system text and the message


def test_a_tokenizer_without_end_of_turn_is_an_error_that_names_it(tmp_path):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path))
    with pytest.raises(PrepareError, match=r"<\|end_of_turn\|>"):
        render(OPENCHAT, [parse_record(RECORDS[0])], tokenizer, TemplateOptions())


def test_its_rules_for_the_caller():
    assert (OPENCHAT.weighted, OPENCHAT.truncation, OPENCHAT.trim_trailing) == (True, "first", True)
