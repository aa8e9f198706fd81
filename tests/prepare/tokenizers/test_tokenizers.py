"""Tokenizers turn texts into ids, and no text into a special token. Each kind of file is recognised and described."""

import functools
import hashlib
import json
import os
import pickle
import re
import signal
from pathlib import Path

import fsspec
import pytest
import sentencepiece
import tokenizer_makers as makers
import tokenizers
from python_runs import run_python
from tokenizers import decoders, models, pre_tokenizers

from grain_sft.errors import CorpusError, CorpusFileError, PrepareError, RecordError
from grain_sft.prepare import TEMPLATES, TemplateOptions, parse_record, render
from grain_sft.prepare.tokenizers import Tokenizer, huggingface, load_tokenizer

CHATML_JSON = makers.byte_level_json(makers.CHATML_TOKENS)


@pytest.fixture(params=makers.KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(makers.KINDS[request.param](tmp_path))


def test_text_never_becomes_a_special_token_and_comes_back_by_decoding(tokenizer):
    texts = [*makers.SENTENCES, *makers.ODD_TEXTS, "👩‍👩‍👧‍👦 مرحبا long " * 500]
    for each in makers.PRIMER_TOKENS:
        texts += [each, f"a {each} b", f"{each}{each}", f"\n{each}", each[1:], f"<{each}>"]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        decoded = tokenizer.decode(ids)
        assert not set(ids) & set(tokenizer.special_tokens.values())
        # Metaspace adds a space before a text unless the text starts with one, and decoding removes the first space
        assert decoded == text or (tokenizer.kind == "huggingface" and text.startswith(" ") and decoded == text[1:])
    ids = [tokenizer.token_id("<|usr|>"), *tokenizer.encode(["hello there"])[0], tokenizer.token_id("<|eot|>")]
    assert re.fullmatch(r"<\|usr\|> ?hello there<\|eot\|>", tokenizer.decode(ids))


def test_a_tokenizer_can_be_pickled_and_its_files_make_the_same_tokenizer(tokenizer, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, data in tokenizer.files().items():
        (folder / name).write_bytes(data)
    for again in (load_tokenizer(folder), pickle.loads(pickle.dumps(tokenizer))):
        assert again.description() == tokenizer.description()
        assert again.encode(makers.SENTENCES) == tokenizer.encode(makers.SENTENCES)


@pytest.mark.parametrize("pad", [True, False])
def test_the_description_has_the_ids_of_sentencepiece_and_the_hash_of_the_file(tmp_path, pad):
    path = makers.save_sentencepiece(tmp_path, pad=pad)
    bare = sentencepiece.SentencePieceProcessor(model_file=str(path))
    special = ("<s>", "</s>", *(("<pad>",) if pad else ()), *makers.PRIMER_TOKENS)
    tokenizer = load_tokenizer(path)
    assert tokenizer.description() == {
        "kind": "sentencepiece",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "vocab_size": bare.get_piece_size(),
        "eos_token_id": bare.eos_id(),
        "pad_token_id": bare.pad_id() if pad else None,
        "bos_token_id": bare.bos_id(),
        "special_tokens": {text: bare.piece_to_id(text) for text in special},
    }
    assert tokenizer.empty_ids == (bare.bos_id(),)


def test_a_lone_tokenizer_json_is_enough_and_one_in_a_folder_is_read_with_its_config(tmp_path):
    path = save_lone_json(tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.files() == {"tokenizer.json": path.read_bytes()}
    assert tokenizer.pad_token_id == tokenizer.token_id("<pad>")
    assert tokenizer.eos_token_id is None  # <|endoftext|> or <|im_end|>: the file does not state which
    assert tokenizer.template_variables == {"pad_token": "<pad>"}
    hashes = {tokenizer.sha256}
    for template in ("{{ messages }}", "{{ messages[0] }}", None):
        folder = makers.save_huggingface(tmp_path, path.read_text(), eos="<|im_end|>", chat_template=template)
        found = load_tokenizer(folder)
        assert load_tokenizer(folder / "tokenizer.json").description() == found.description()
        assert (found.chat_template, found.eos_token_id) == (template, found.token_id("<|im_end|>"))
        assert (found.bos_token_id, tuple(found.empty_ids)) == (None, ())
        hashes.add(found.sha256)
    assert len(hashes) == 4
    (tmp_path / "lone.json").write_text(makers.metaspace_json(("<s>", "</s>")), encoding="utf-8")
    with pytest.raises(PrepareError, match=r"writes a BOS, which no file of the tokenizer names.*tokenizer_config\.json"):
        TEMPLATES["hf"](load_tokenizer(tmp_path / "lone.json"), TemplateOptions(chat_template="{{ bos_token }}"))


def test_added_tokens_that_are_not_special_stay_ordinary_text(tmp_path):
    content = makers.byte_level_json(makers.CHATML_TOKENS, ordinary=("<think>", "    ", "<|fim|>", "<\uff5cUser\uff5c>"))
    tokenizer = load_tokenizer(makers.save_huggingface(tmp_path / "hf", content))
    assert set(tokenizer.special_tokens) == {*makers.CHATML_TOKENS, "<|fim|>", "<\uff5cUser\uff5c>"}
    (ids,) = tokenizer.encode(["<think>"])
    assert len(ids) == 1 and tokenizer.decode(ids) == "<think>"


def test_a_tokenizer_that_draws_ids_at_random_is_refused(tmp_path):
    content = json.loads(CHATML_JSON)
    content["model"]["dropout"] = 0.1
    with pytest.raises(CorpusError, match=r"dropout draws ids at random\. Set model\.dropout to null"):
        load_tokenizer(makers.save_huggingface(tmp_path, json.dumps(content)))


@pytest.mark.parametrize(("model", "template"), [("BPE", "text"), ("BPE", "hf"), ("WordLevel", "text")])
def test_a_character_without_a_token_is_an_error_of_its_record(tmp_path, model, template):
    """`tokenizers` itself leaves the character out (BPE), or raises a bare Exception for the whole batch (other models)."""
    made = tokenizers.Tokenizer(getattr(models, model)())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(["a cab\n"])
    made.add_special_tokens(["<|e|>"])
    chat_template = "{% for each in messages %}{{ each.content }}<|e|>{% endfor %}"
    saved = makers.save_huggingface(tmp_path, made.to_str(), eos="<|e|>", chat_template=chat_template)
    tokenizer = load_tokenizer(saved)
    texts = ["a cab", "a \u00e9 cab", " cab"]
    records = [{"text": text} for text in texts]
    if template == "hf":
        records = [{"messages": [{"role": "assistant", "content": text}]} for text in texts]
    parsed = [parse_record(record) for record in records]
    first, second, third = render(TEMPLATES[template], parsed, tokenizer, TemplateOptions())
    assert [tokenizer.decode(each.tokens) for each in (first, third)] == ["a cab<|e|>", " cab<|e|>"]
    with pytest.raises(RecordError, match=r"the tokenizer can't encode .*'a \u00e9 cab.*unknown characters"):
        raise second


@pytest.mark.parametrize("affix", [{"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"}])
def test_bytes_that_lack_a_token_with_the_prefix_or_suffix_are_an_error(tmp_path, affix):
    """The vocabulary has every byte. But the model looks up "##e" or "e</w>" for "e", and leaves out what it doesn't find."""
    content = json.loads(CHATML_JSON)
    content["model"] |= affix | {"merges": []}
    tokenizer = load_tokenizer(makers.save_huggingface(tmp_path, json.dumps(content)))
    with pytest.raises(RecordError, match="can't encode the character"):
        tokenizer.encode(["h\u00e9"])


def test_a_child_that_is_forked_while_a_thread_encodes_can_encode(tmp_path):
    tokenizer = load_tokenizer(makers.save_huggingface(tmp_path, CHATML_JSON))
    expected = tokenizer.encode(makers.SENTENCES)
    # `_environment` holds a lock, which `encode` also takes. So the child is forked as if a thread of the parent encoded.
    with huggingface._environment("TOKENIZERS_PARALLELISM", "false"):
        child = os.fork()
        if not child:
            signal.alarm(60)  # ends a child that would wait forever for this lock
            os._exit(tokenizer.encode(makers.SENTENCES) != expected)
    assert os.waitpid(child, 0)[1] == 0


def test_a_remote_tokenizer_equals_the_local_one(tmp_path):
    remote = fsspec.filesystem("memory")
    hf = makers.save_huggingface(tmp_path / "hf", CHATML_JSON)
    spm = makers.save_sentencepiece(tmp_path / "spm").parent
    for name, local in (("tokenizer.model", spm), ("tokenizer.json", hf)):
        folder = f"memory://tokenizers/{local.name}"
        for path in local.iterdir():
            remote.pipe_file(f"{folder}/{path.name}", path.read_bytes())
        for where in (folder, f"{folder}/{name}"):
            assert load_tokenizer(where).description() == load_tokenizer(local).description()
    with pytest.raises(CorpusFileError, match="memory://tokenizers/absent"):
        load_tokenizer("memory://tokenizers/absent")


def test_a_truncated_model_loads_or_is_named_in_the_error(tmp_path):
    model = makers.sentencepiece_model()
    path = tmp_path / "cut.model"
    for size in range(0, len(model), len(model) // 50):
        path.write_bytes(model[:size])
        try:
            tokenizer = load_tokenizer(path)
        except CorpusError as error:
            assert str(path) in str(error)
        else:
            assert tokenizer.encode(["hello"])[0]


@pytest.mark.parametrize("name", ["tokenizer.gemma3", "x.bin", "spm", "tokenizer.json", "llama.tiktoken"])
@pytest.mark.parametrize("save", [makers.save_sentencepiece, makers.save_tiktoken])
def test_a_tokenizer_is_recognized_under_any_name(tmp_path, save, name):
    saved = save(tmp_path)
    expected = load_tokenizer(saved).description()
    for each in (saved, Path(f"{saved}.json")):
        if each.exists():
            each.rename(tmp_path / each.name.replace(saved.name, name))
    assert load_tokenizer(tmp_path / name).description() == expected
    if save is makers.save_sentencepiece:
        (tmp_path / name).rename(tmp_path / "tokenizer.llama2")
        assert load_tokenizer(tmp_path).description() == expected


def save_lone_json(folder):
    (folder / "tokenizer.json").write_text(CHATML_JSON, encoding="utf-8")
    return folder / "tokenizer.json"


@pytest.mark.parametrize("save", [makers.save_sentencepiece, makers.save_tiktoken, save_lone_json])
def test_a_tokenizer_has_the_chat_template_of_its_directory(tmp_path, save):
    bare = load_tokenizer(save(tmp_path))
    (tmp_path / "old.model").mkdir()  # a folder is not a file of the tokenizer
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}é", encoding="utf-8")
    found = load_tokenizer(tmp_path)
    assert (bare.chat_template, found.chat_template) == (None, "{{ messages }}é")
    assert bare.sha256 != found.sha256 and "chat_template.jinja" in found.files()
    assert pickle.loads(pickle.dumps(found)).chat_template == found.chat_template
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}é", encoding="latin-1")
    with pytest.raises(CorpusError, match=r"chat_template\.jinja is not UTF-8|can't decode byte 0xe9 in position 14"):
        load_tokenizer(tmp_path).chat_template  # noqa: B018


NOT_TOKENIZERS = [
    (b"", "an empty file"),
    (b"garbage", "another kind"),
    (b"\x0a\xff\xff\xff\x7f", "another kind"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    (b"\x1f\x8b\x08rest", "compressed"),
    (b"PK\x03\x04rest", "unpack the archive"),
    (b"<!doctype html><html>", "HTML"),
    (b'{"a": 0, "b": 1}', "JSON without"),
    (b"[]", "JSON without"),
    (b'{"model": 5}', "JSON without"),
    (b'{"vocab": [{"rank": 0, "token_str": "model"}]}', "JSON without"),  # Mistral's tekken.json
    (b"#version: 0.2\na b\n", "merges"),
]


@pytest.mark.parametrize(("content", "part"), NOT_TOKENIZERS)
def test_the_error_of_another_file_names_what_the_file_seems_to_be(tmp_path, content, part):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=re.escape(part)):
        load_tokenizer(path)


def test_user_defined_pieces_are_text_unless_they_look_like_control_tokens(tmp_path):
    """Gemma defines HTML tags, which are ordinary text, and the tags of turns, which are control tokens, as such pieces."""
    pieces = ("<h1>", "<table>", "[BOX]", "<start_of_turn>", "<|x|>")
    tokenizer = load_tokenizer(makers.save_sentencepiece(tmp_path, user_defined=pieces))
    assert set(tokenizer.special_tokens) == {"<s>", "</s>", "<pad>", "<start_of_turn>", "<|x|>"}
    bare = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert tokenizer.encode(["a <h1>b<table>[BOX]"]) == [bare.encode("a <h1>b<table>[BOX]")]
    assert not set(tokenizer.encode(["<start_of_turn> <|x|>"])[0]) & set(tokenizer.special_tokens.values())


NORMALIZING = functools.partial(makers.save_sentencepiece, normalization="nmt_nfkc")


@pytest.mark.parametrize("save", [makers.save_sentencepiece, NORMALIZING, makers.save_tiktoken])
def test_token_spans_cover_the_text_in_order(tmp_path, save):
    """Without normalization, the spans cover the whole text. With it, they still begin in the order of the tokens."""
    tokenizer = load_tokenizer(save(tmp_path))
    for text in [*makers.SENTENCES, *makers.ODD_TEXTS]:
        (ids,) = tokenizer.encode([text])
        starts, stops = tokenizer.token_spans(text, ids)
        assert len(starts) == len(stops) == len(ids)
        assert (starts <= stops).all() and (starts[1:] >= starts[:-1]).all()
        if save is not NORMALIZING and text:
            assert set().union(*(range(a, b) for a, b in zip(starts, stops, strict=True))) == set(range(len(text)))
            for number, a, b in zip(ids, starts, stops, strict=True):
                assert tokenizer.decode([number]).strip() in (text[a:b].strip(), "\ufffd") or b - a == 1


def test_a_path_without_a_tokenizer_is_an_error_that_names_what_was_expected(tmp_path):
    with pytest.raises(CorpusFileError, match=r"expected a SentencePiece \.model"):
        load_tokenizer(tmp_path)
    for name in ("gpt2", "allenai/OLMo-2-1124-7B", tmp_path / "absent.model"):
        with pytest.raises(CorpusFileError, match=r"no such directory.*hf download NAME --local-dir FOLDER"):
            load_tokenizer(name)


def test_loading_a_tokenizer_prints_no_advice_to_install_pytorch(tmp_path):
    folder = makers.save_huggingface(tmp_path, CHATML_JSON)
    code = f"""import os; from grain_sft.prepare.tokenizers import load_tokenizer; load_tokenizer({str(folder)!r})
assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"""
    assert "PyTorch" not in run_python("-c", code).stderr
