"""Tokenizers from tiktoken files: Llama 3's file is recognized, and wrong files and sidecars are named."""

import base64
import json
import re
import sys
from unittest import mock

import pytest
from tokenizer_makers import CHATML_TOKENS, save_tiktoken, tiktoken_ranks

from grain_sft.corpus import check_tokenizer
from grain_sft.errors import CorpusError, MissingExtraError, RecordError
from grain_sft.prepare import load_tokenizer


def test_llama_3_is_recognized_by_its_ranks(tmp_path):
    """The file of this test has as many ranks as Llama 3's file, and two of its tokens at the same ranks."""
    lines = {rank: (b"%06x" % rank) for rank in range(256, 128_000)}
    lines |= {rank: bytes([rank]) for rank in range(256)} | {279: b" the", 9906: b"Hello"}
    path = tmp_path / "tokenizer.model"
    encoded = b"".join(b"%s %d\n" % (base64.b64encode(lines[rank]), rank) for rank in range(128_000))
    path.write_bytes(encoded)
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 128_256
    names = {"<|begin_of_text|>": 128_000, "<|start_header_id|>": 128_006, "<|eot_id|>": 128_009}
    assert {name: tokenizer.token_id(name) for name in names} == names
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (128_000, 128_001)
    path.write_bytes(encoded.replace(base64.b64encode(b"Hello") + b" 9906", base64.b64encode(b"Hallo") + b" 9906"))
    with pytest.raises(CorpusError, match=r"split pattern.*tokenizer\.model\.json"):
        load_tokenizer(path)


WRONG_SIDECARS = [
    ({"pattern": None}, "Expected `str`, got `null` - at `$.pattern`. Expected an object with the keys pattern, "),
    ({"pattern": "("}, "can't load"),
    ({"pattern": r"\p{L}+|\p{N}+|\s+"}, "pattern: loses text, such as the character '\\u0301'"),
    ({"pattern": r"[^\x0b\x0c]"}, "pattern: loses text, such as the character '\\x0b'"),
    ({"pattern": r"\p{L}*|."}, "pattern: tiktoken can't use it"),
    ({"special_tokens": {"<a>": 5}}, "used twice or is a rank"),
    ({"special_tokens": {"<a>": "b"}}, "Expected `int`, got `str` - at `$.special_tokens[...]`"),
    ({"special_tokens": {"<a>": -1}}, "Expected `int` >= 0 - at `$.special_tokens[...]`"),
    ({"eos_token": "<z>"}, "'<z>' is not in special_tokens"),
    ({"patern": "x"}, "unknown field `patern`"),
]


@pytest.mark.parametrize(("change", "part"), WRONG_SIDECARS)
def test_a_wrong_sidecar_of_tiktoken_is_named(tmp_path, change, part):
    path = save_tiktoken(tmp_path, CHATML_TOKENS)
    sidecar = tmp_path / f"{path.name}.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **change}))
    with pytest.raises(CorpusError, match=re.escape(part)):
        load_tokenizer(path)


DAMAGED_FILES = [
    (200, b"", "single bytes|expected base64"),
    (None, b"YQ== 9999\n", "line [0-9]+: its token already has rank 97"),
    (None, b" 256\n", "expected base64 and a rank"),
    (None, b"cXhxeA== 9_7\n", "expected base64 and a rank"),
    (None, b"cXhxeA== 97\n", "two tokens have one rank"),
]


@pytest.mark.parametrize(("kept", "added", "part"), DAMAGED_FILES)
def test_a_damaged_tiktoken_file_is_named(tmp_path, kept, added, part):
    path = save_tiktoken(tmp_path, CHATML_TOKENS)
    path.write_bytes(tiktoken_ranks()[:kept] + added)
    with pytest.raises(CorpusError, match=part):
        load_tokenizer(path)


def test_special_tokens_have_a_text_and_ids_without_a_token_have_none(tmp_path):
    tokenizer = load_tokenizer(save_tiktoken(tmp_path, CHATML_TOKENS))
    size = tokenizer.vocab_size
    assert [tokenizer.token_text(number) for number in (97, size - 1, size)] == ["a", "<pad>", None]


def test_a_text_that_is_too_long_for_tiktoken_is_refused(tmp_path):
    with pytest.raises(RecordError, match="1,500,000 characters"):
        load_tokenizer(save_tiktoken(tmp_path)).encode(["fine", " " * 1_500_000])


def test_without_tiktoken_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    path = str(save_tiktoken(tmp_path))
    corpus = mock.MagicMock(tokenizer=None, tokenizer_sha256="1" * 64)
    for load in (load_tokenizer, lambda path: check_tokenizer(corpus, path)):
        with pytest.raises(MissingExtraError, match=r"\[tiktoken\]"):
            load(path)
