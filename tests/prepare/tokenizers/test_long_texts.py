"""A long text is encoded in pieces if that gives the ids of the whole text."""

import json
import random
from typing import Any

import pytest
from tokenizer_makers import TIKTOKEN_PATTERN, byte_level_json, metaspace_json

from grain_sft.prepare.tokenizers import huggingface_cuts
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer

GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split(*patterns: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    steps = [{"type": "Split", "pattern": {"Regex": each}, "behavior": behavior, "invert": invert} for each in patterns]
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, by_byte]}


def content(**parts: Any) -> str:
    return json.dumps(json.loads(byte_level_json(("</s>",), ordinary=("  ", "\n\n\n", "<think>"))) | parts)


def normalizers(*names: str) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": name} for name in names]}


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
CUT = {  # tokenizers for which texts may be cut
    "gpt2": content(),
    "gpt4": content(pre_tokenizer=split(TIKTOKEN_PATTERN)),
    "removed": content(pre_tokenizer=split(TIKTOKEN_PATTERN, behavior="Removed", invert=True)),
    "gpt4o": content(pre_tokenizer=split(GPT_4O)),
    "deepseek": content(pre_tokenizer=split(*DEEPSEEK)),
    "normalized": content(normalizer=normalizers("NFKC", "Lowercase"), pre_tokenizer=split(TIKTOKEN_PATTERN)),
    "decomposed": content(normalizer=normalizers("NFD")),
    "prefixed": content(pre_tokenizer=PREFIXED),
    "prefixed digits": content(pre_tokenizer={"type": "Sequence", "pretokenizers": [DIGITS, PREFIXED]}),
    **{scheme: metaspace_json(("<s>", "</s>"), scheme=scheme) for scheme in ("first", "always", "never")},
}


WORDS = "the Don't 我们去\uff0c 答案。 かが 한국어 é e\u0301 ﬁ x\u0301 2,000 '' <think> привет İ"


def text_of(seed: int, count: int) -> str:
    draw, words = random.Random(seed), WORDS.split()
    between = [" ", " ", "  ", "   ", "\n", " \n ", "\n\n\n", "\t", "\u3000", "\u00a0", "", "。", "\uff0c\n", "\r\n"]
    return "".join(draw.choice(words) + draw.choice(between) for _ in range(count))


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("count", [600, pytest.param(30_000, marks=pytest.mark.heavy)])
def test_the_pieces_of_a_text_have_the_ids_of_the_whole(count: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer({"tokenizer.json": CUT[name].encode()}, name)
    texts = [text_of(seed, count) for seed in range(3)]
    whole = tokenizer.encode(texts)
    monkeypatch.setattr(huggingface_cuts, "CUT_CHARACTERS", 1)
    cuts = huggingface_cuts.cuts_of(json.loads(tokenizer.plain.to_str()))
    assert cuts is not None
    for text in texts:
        found = list(huggingface_cuts.pieces(text, cuts))
        assert "".join(found) == text and len(found) > count / 12
    assert tokenizer.encode(texts) == whole


def added(token: str, **options: bool) -> list[dict[str, Any]]:
    chosen = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False} | options
    return [{"id": 0, "content": token, **chosen}]


# patterns that are unknown, and patterns that match no letter or not every space
UNFIT = r"\p{L}+ ?|\s+|.", TIKTOKEN_PATTERN + "|", r"\p{N}{1,3}", r"\p{N}|\s+", r"\s*[\r\n]+", r" ?[^\s\p{L}\p{N}]+"
UNSURE = [
    {"pre_tokenizer": None},
    *({"pre_tokenizer": split(*patterns)} for patterns in ([], *zip(UNFIT))),
    {"pre_tokenizer": split(r" ?\p{L}+|\p{N}"), "normalizer": normalizers("NFD")},  # "が" ends in a mark
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": split(TIKTOKEN_PATTERN)["pretokenizers"][::-1]}},
    {"pre_tokenizer": split(TIKTOKEN_PATTERN, behavior="MergedWithNext")},
    {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    {"normalizer": {"type": "Prepend", "prepend": "▁"}},
    *({"added_tokens": added(text, single_word=text != "Hello world")} for text in ("Hello world", " the", "。")),
    {"added_tokens": added("word", rstrip=True)},
    {"added_tokens": added("ﬁ", normalized=True), "normalizer": normalizers("NFKC")},
]


@pytest.mark.parametrize("parts", UNSURE)
def test_texts_are_encoded_whole_unless_cuts_are_sure_to_keep_the_ids(parts: dict[str, Any]) -> None:
    assert huggingface_cuts.cuts_of(json.loads(content(**parts))) is None
