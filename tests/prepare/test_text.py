"""`prepare` gives plain documents (template text) the chosen BOS, EOS and normal form, and counts those that it drops."""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from prepared import documents_of, made, request_of, save_trained, texts_of, write, write_chats
from record_files import parquet
from tokenizer_makers import save_huggingface

from grain_sft import open_corpus
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import dry_run, load_tokenizer


def test_a_corpus_of_plain_documents_has_no_masks_and_its_index_opens(spm: Path, tmp_path: Path) -> None:
    corpus, _ = made(spm, write(tmp_path / "a.jsonl", texts_of(300)), part_bytes=4000)
    assert len(corpus.shards) > 5 and not corpus.has_loss and not list(tmp_path.rglob("labels_mask*"))
    corpus.save(tmp_path / "index.json")
    assert open_corpus(tmp_path / "index.json").fingerprint == corpus.fingerprint


def test_plain_documents_end_with_eos_and_conversations_of_primer_with_eot(tmp_path: Path) -> None:
    model = save_trained(tmp_path)
    eos, eot = load_tokenizer(model).eos_token_id, load_tokenizer(model).special_tokens["<|eot|>"]
    texts, path = write(tmp_path / "a.jsonl", ["the answer"]), write_chats(tmp_path / "b.jsonl", 3)
    for format in ("episodes", "primer"):
        for template, source, end in (("text", texts, eos), ("primer", path, eot)):
            corpus, _ = made(model, source, format=format, template=template)
            assert corpus.eos_token_id == end == next(corpus.iter_documents()).tokens[-1]


def with_bos(folder: Path) -> Path:
    """Save a tokenizer with ids <unk> 0, <s> (BOS) 1, </s> (EOS) 2, a 3 and b 4, and return its path."""
    words = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", "a", "b"))}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.add_special_tokens(["<s>", "</s>"])
    return save_huggingface(folder, found.to_str(), bos="<s>", eos="</s>")


CHOICES = [
    ({}, [[3, 4, 2], [4, 2]]),
    ({"bos": True}, [[1, 3, 4, 2], [1, 4, 2]]),
    ({"bos": True, "eos": False}, [[1, 3, 4], [1, 4]]),
    ({"eos": False}, [[3, 4], [4]]),
    ({"empty": "keep"}, [[3, 4, 2], [2], [4, 2]]),
    ({"empty": "keep", "bos": True}, [[1, 3, 4, 2], [1, 2], [1, 4, 2]]),
]


@pytest.mark.parametrize(("options", "expected"), CHOICES)
def test_documents_have_the_chosen_bos_and_eos_and_empty_ones_are_kept_or_dropped(options, expected, tmp_path):
    found, manifest = documents_of(with_bos(tmp_path / "hf"), tmp_path, ["a b", "", "b"], **options)
    assert found == expected
    assert manifest["dropped"] == ({} if options.get("empty") else {"no text": 1})
    tokens = sum(map(len, expected))
    assert manifest["text"] == {"bytes": 4, "tokens": tokens} and manifest["splits"]["train"]["tokens"] == tokens


WRONG_OPTIONS = [
    ({"bos": True}, "documents begin with BOS; this tokenizer has no such token. Give --no-bos"),
    ({"empty": "keep", "eos": False}, "empty=keep: a document without text, BOS and EOS has no tokens"),
    ({"fim_spm_rate": 0.5}, "fim_spm_rate applies to the documents that fim_rate chooses"),
    ({"fim_rate": 0.5, "fim_tokens": ("<|fim_prefix|>",)}, "1 tokens; expected three"),
    ({"fim_rate": 0.5, "fim_tokens": ("<|fim_prefix|>", "7", "<|x|>")}, r"'<\|x\|>'; expected three different"),
    ({"fim_rate": 0.5, "fim_tokens": ("7", "7", "8")}, "expected three different tokens"),
    ({"fim_rate": 0.5, "fim_split_sample": "</s>"}, "only one is given. Give both or neither"),
    ({"fim_rate": 0.5, "fim_split_sample": "x", "fim_fragment_rate": 1}, "'x' is not a special token of the"),
    ({"fim_rate": 1.5}, "fim_rate is 1.5; expected a number"),
    ({"fim_rate": 0.5, "fim_no_prefix": "\uff03", "normalize": "NFKC"}, "fim_no_prefix: '\uff03' is not NFKC"),
    ({"normalize": "NFD"}, "normalize is 'NFD'; expected one of NFC, NFKC"),
    ({"long_documents": "drop"}, "Give max_length"),
    ({"fim_rate": 0.5, "format": "pairs"}, "pairs have a prompt and responses, no middle"),
    ({"min_length": 9, "max_length": 8}, "min_length=9: expected at most max_length=8"),
    ({"val_frac": 1}, r"val_frac is 1; expected a number \(0 or more, less than 1\)"),
    ({"seed": -1}, "seed is -1; expected an integer"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_errors(options, message, spm, tmp_path):
    with pytest.raises(PrepareError, match=message):
        documents_of(spm, tmp_path, ["the answer"], **options)


def test_short_and_long_documents_are_cut_or_dropped_and_the_dropped_ones_counted(spm: Path, tmp_path: Path) -> None:
    texts = ["a" * length for length in range(1, 30)]
    whole, _ = documents_of(spm, tmp_path, texts)
    lengths = [len(document) for document in whole]
    cut, manifest = documents_of(spm, tmp_path, texts, min_length=5, max_length=8)
    assert cut == [document[:8] for document in whole if len(document) >= 5]
    assert manifest["dropped"] == {"fewer than 5 tokens": sum(length < 5 for length in lengths)}
    dropped, manifest = documents_of(spm, tmp_path, texts, min_length=5, max_length=8, long_documents="drop")
    assert dropped == [document for document in whole if 5 <= len(document) <= 8]
    assert manifest["dropped"]["more than 8 tokens"] == sum(length > 8 for length in lengths)


def test_the_error_of_a_conversation_names_the_template_to_give(spm: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "u", "completion": "a"}')
    with pytest.raises(RecordError, match=r"a\.jsonl:1: is a conversation; .* Give --template hf"):
        made(spm, tmp_path / "a.jsonl")


def test_text_is_normalized_before_it_is_searched_for_special_tokens(spm: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(spm)
    texts = ["e\u0301 \ufb01 \u212b", "plain"]
    for form in ("NFC", "NFKC"):
        found, _ = documents_of(spm, tmp_path, texts, normalize=form)
        expected = [unicodedata.normalize(form, text) for text in texts]
        assert [tokenizer.decode(document[:-1]) for document in found] == expected
    wide = "x \uff1c|fim_prefix|\uff1e"
    with pytest.raises(RecordError, match=r"a\.jsonl:2: text, after NFKC: spells the special token '<\|fim_prefix\|>'"):
        documents_of(spm, tmp_path, ["x", wide], normalize="NFKC")
    (document, _), _ = documents_of(spm, tmp_path, [wide, "x"], normalize="NFKC", special_text="encode")
    assert tokenizer.control_ids.isdisjoint(document[:-1])


def test_a_schema_names_the_key_of_the_text_and_the_summary_counts_bytes(spm, tmp_path, run_command):
    path = write(tmp_path / "a.jsonl", ["the answer é", "the question"], key="content")
    words = ["prepare", path, "--template", "text", "--tokenizer", spm, "--output", tmp_path / "out"]
    printed = run_command(*words, "--schema", "text:text=content").out
    manifest = json.loads((tmp_path / "out/prepare.json").read_text())
    assert f"25 bytes {25 / manifest['text']['tokens']:>18.3f} bytes a token" in printed


def test_a_dry_run_counts_what_is_dropped(spm: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["", "the answer", "the " * 40, "x"])
    shown = dry_run(request_of(spm, path, min_length=3, max_length=30, long_documents="drop"), 100).splitlines()
    assert shown[0] == "4 of the first 4 records can be prepared; nothing was written."
    dropped = [line.removeprefix("dropped    1: ") for line in shown if line.startswith("dropped")]
    assert dropped == ["fewer than 3 tokens", "more than 30 tokens", "no text"]
    with pytest.raises(PrepareError, match="records=-1"):
        dry_run(request_of(spm, path), -1)
    assert shown[-1] == "| the answer</s>" and not [line for line in shown if line.startswith("cut")]


def test_a_response_of_a_pair_may_be_empty(spm: Path, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "pairs.jsonl", load_tokenizer(spm)
    path.write_text('{"chosen": "the answer", "rejected": ""}')
    corpus, manifest = made(spm, path, format="pairs")
    [document], eos = corpus.iter_documents(), tokenizer.eos_token_id
    assert document.tokens.tolist() == [*tokenizer.encode(["the answer"])[0], eos, eos]
    path.write_text('{"chosen": "the answer", "rejected": "no"}')
    assert made(spm, path, format="pairs", eos=False)[0].num_documents == 1
    assert not manifest["dropped"] and "label_masks" not in json.loads(next(tmp_path.rglob("corpus.json")).read_text())


def test_texts_in_a_binary_column_of_parquet_must_be_utf_8(spm: Path, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.parquet", load_tokenizer(spm)
    path.write_bytes(parquet([{"text": text} for text in ("the answer é".encode(), b"\xff", b"x")]))
    with pytest.raises(RecordError, match=r"a\.parquet:2: the record\.text: bytes that are not UTF-8 \(byte 0"):
        made(spm, path)
    corpus, manifest = made(spm, path, on_error="skip", shuffle=False)
    assert [tokenizer.decode(each.tokens[:-1].tolist()) for each in corpus.iter_documents()] == ["the answer é", "x"]
    assert manifest["rejected"] == 1
