"""Tokenizers: what text becomes, what it never becomes, and what a tokenizer says of itself."""

from __future__ import annotations

import cProfile
import hashlib
import pickle
from pathlib import Path

import pytest
import sentencepiece
from tokenizer_makers import (
    ODD_TEXTS,
    PRIMER_TOKENS,
    SENTENCES,
    byte_level_json,
    metaspace_json,
    save_huggingface,
    save_sentencepiece,
    sentencepiece_model,
)

from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.prepare.special_text import special_text_of
from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")


@pytest.fixture(params=["user_defined", "control", "gpt2", "llama3", "first", "always", "never"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """Every kind, with the special tokens of primer."""
    kind = request.param
    if kind in ("user_defined", "control"):
        other = "control" if kind == "user_defined" else "user_defined"
        return load_tokenizer(save_sentencepiece(tmp_path, **{kind: PRIMER_TOKENS, other: ()}))
    if kind in ("gpt2", "llama3"):
        content = byte_level_json(("<|endoftext|>", *PRIMER_TOKENS), style=kind)
        return load_tokenizer(save_huggingface(tmp_path / "hf", content, eos="<|endoftext|>"))
    content = metaspace_json(("<s>", "</s>", *PRIMER_TOKENS), scheme=kind)
    return load_tokenizer(save_huggingface(tmp_path / "hf", content, bos="<s>", eos="</s>"))


def test_sentencepiece_ids_are_those_of_the_library_on_ordinary_text(tmp_path):
    bare = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    texts = [*SENTENCES, *ODD_TEXTS]
    assert load_tokenizer(save_sentencepiece(tmp_path)).encode(texts) == [bare.encode(text) for text in texts]


def test_huggingface_ids_are_those_of_transformers_on_ordinary_text(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, content in (("bytes", byte_level_json(CHATML)), ("metaspace", metaspace_json(("<s>", "</s>")))):
        folder = save_huggingface(tmp_path / name, content)
        bare = transformers.AutoTokenizer.from_pretrained(folder)
        texts = [*SENTENCES, *(text for text in ODD_TEXTS if "</s>" not in text)]
        expected = [bare(text, add_special_tokens=False)["input_ids"] for text in texts]
        assert load_tokenizer(folder).encode(texts) == expected


@pytest.mark.parametrize("spelling", PRIMER_TOKENS)
def test_text_never_becomes_a_special_token(tokenizer, spelling):
    texts = [spelling, f"a {spelling} b", f"{spelling}{spelling}", f"\n{spelling}", spelling[1:], f"<{spelling}>"]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert not set(ids) & set(tokenizer.special_tokens.values())
        assert tokenizer.decode(ids) == text


def test_text_comes_back_by_decoding(tokenizer):
    texts = [*SENTENCES, *ODD_TEXTS, "👩‍👩‍👧‍👦 مرحبا long " * 500]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        decoded = tokenizer.decode(ids)
        # Metaspace puts no second space before a text that starts with one, so that decoding can't give it back
        assert decoded == text or (tokenizer.kind == "huggingface" and text.startswith(" ") and decoded == text[1:])


def test_special_tokens_are_spelled_out_by_decoding(tokenizer):
    ids = [tokenizer.token_id("<|usr|>"), *tokenizer.encode(["hello there"])[0], tokenizer.token_id("<|eot|>")]
    decoded = tokenizer.decode(ids)
    assert decoded.startswith("<|usr|>") and decoded.endswith("hello there<|eot|>")


def test_it_can_be_pickled(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(SENTENCES) == tokenizer.encode(SENTENCES)
    assert again.description() == tokenizer.description()


def test_its_files_make_the_same_tokenizer(tokenizer, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, data in tokenizer.files().items():
        (folder / name).write_bytes(data)
    again = load_tokenizer(folder)
    assert again.description() == tokenizer.description()
    assert again.encode(SENTENCES) == tokenizer.encode(SENTENCES)


def test_the_description_names_ids_and_hash(tmp_path):
    path = save_sentencepiece(tmp_path)
    bare = sentencepiece.SentencePieceProcessor(model_file=str(path))
    described = load_tokenizer(path).description()
    assert described == {
        "kind": "sentencepiece",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "vocab_size": bare.get_piece_size(),
        "eos_token_id": bare.eos_id(),
        "pad_token_id": bare.pad_id(),
        "bos_token_id": bare.bos_id(),
        "special_tokens": {
            text: bare.piece_to_id(text) for text in ("<s>", "</s>", "<pad>", *PRIMER_TOKENS) if bare.piece_to_id(text)
        },
    }


def test_a_tokenizer_without_pad_or_bos_says_none(tmp_path):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path, pad=False))
    assert tokenizer.pad_token_id is None
    assert tokenizer.empty_ids == (tokenizer.bos_token_id,)
    hugging_face = load_tokenizer(save_huggingface(tmp_path / "hf", byte_level_json(CHATML), eos="<|im_end|>"))
    assert (hugging_face.bos_token_id, tuple(hugging_face.empty_ids)) == (None, ())
    assert hugging_face.eos_token_id == hugging_face.token_id("<|im_end|>")


def test_the_chat_template_is_part_of_the_hash(tmp_path):
    hashes = {
        load_tokenizer(save_huggingface(tmp_path / name, byte_level_json(CHATML), chat_template=template)).sha256
        for name, template in (("a", "{{ messages }}"), ("b", "{{ messages[0] }}"), ("c", None))
    }
    assert len(hashes) == 3


def test_a_lone_tokenizer_json_is_enough(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_json(CHATML), encoding="utf-8")
    tokenizer = load_tokenizer(path)
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.files() == {"tokenizer.json": path.read_bytes()}
    assert tokenizer.pad_token_id == tokenizer.token_id("<pad>")
    assert tokenizer.eos_token_id is None  # <|endoftext|> or <|im_end|>: it does not say


def test_a_tokenizer_json_is_read_with_the_config_beside_it(tmp_path):
    folder = save_huggingface(tmp_path / "hf", byte_level_json(CHATML), eos="<|im_end|>", chat_template="x")
    assert load_tokenizer(folder / "tokenizer.json").description() == load_tokenizer(folder).description()


def test_added_tokens_that_are_not_special_stay_ordinary_text(tmp_path):
    content = byte_level_json(CHATML, ordinary=("<think>", "    ", "<|fim|>"))
    tokenizer = load_tokenizer(save_huggingface(tmp_path / "hf", content))
    assert set(tokenizer.special_tokens) == {*CHATML, "<|fim|>"}
    (ids,) = tokenizer.encode(["<think>"])
    assert len(ids) == 1 and tokenizer.decode(ids) == "<think>"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("no marker < here | at all>", None),
        ("<|eot|>", ("<|eot|>", 0)),
        ("é👍 <|eo <|usr|><|eot|>", ("<|usr|>", 8)),
        ("< |eot|>", None),
        ("<|EOT|>", None),
    ],
)
def test_special_text_is_found_with_its_place(tmp_path, text, found):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path))
    assert special_text_of(tuple(tokenizer.special_tokens)).find(text) == found


def test_looking_for_special_text_is_one_search_of_the_text(tmp_path):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path))
    special = tuple(tokenizer.special_tokens)
    special_text_of(special)  # made once

    def calls(text):
        profile = cProfile.Profile()
        profile.runcall(lambda: special_text_of(special).find(text))
        return sum(entry.callcount for entry in profile.getstats())

    assert calls("a <word>") == calls("an ordinary text of a user, without any < of them. " * 2000) < 10


def test_remote_tokenizers_are_those_of_their_files(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    remote = fsspec.filesystem("memory")
    for name, local in (
        ("sp", save_sentencepiece(tmp_path)),
        ("hf", save_huggingface(tmp_path / "hf", byte_level_json(CHATML))),
    ):
        for path in [local] if local.is_file() else local.iterdir():
            remote.pipe_file(f"/tokenizers/{name}/{path.name}", path.read_bytes())
        here = load_tokenizer(local)
        assert load_tokenizer(f"memory://tokenizers/{name}").description() == here.description()
        one = "tokenizer.model" if name == "sp" else "tokenizer.json"
        assert load_tokenizer(f"memory://tokenizers/{name}/{one}").description() == here.description()
    with pytest.raises(CorpusFileError, match="memory://tokenizers/absent"):
        load_tokenizer("memory://tokenizers/absent")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100, b"\x0a\xff\xff\xff\x7f"])
def test_a_file_that_is_no_model_is_named(tmp_path, content):
    path = tmp_path / "broken.model"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"broken\.model"):
        load_tokenizer(path)


def test_every_cut_model_is_an_error_or_loads(tmp_path):
    model = sentencepiece_model()
    path = tmp_path / "cut.model"
    for size in range(0, len(model), len(model) // 50):
        path.write_bytes(model[:size])
        try:
            tokenizer = load_tokenizer(path)
        except CorpusError as error:
            assert str(path) in str(error)
        else:
            assert tokenizer.encode(["hello"])[0]


def test_broken_hugging_face_files_are_named(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "tokenizer.json"
    for content in ("", "{}", "[]", '{"model": 5}'):
        path.write_text(content)
        with pytest.raises(CorpusError, match=r"tokenizer\.json"):
            load_tokenizer(path)


def test_where_there_is_none_the_error_says_what_was_expected(tmp_path):
    with pytest.raises(CorpusFileError, match=r"expected a SentencePiece \.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(CorpusFileError, match="no such directory"):
        load_tokenizer("allenai/OLMo-2-1124-7B")
    with pytest.raises(CorpusFileError, match="no such file"):
        load_tokenizer(tmp_path / "absent.model")
