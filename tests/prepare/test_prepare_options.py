"""`grain-sft prepare` cuts, mixes and shows records as its options state, and takes the command lines of other tools."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from prepared import CHAT_FORMATS, Place, record, stamps, write_chats
from template_rules import render_one

from grain_sft.corpus import open_corpus
from grain_sft.errors import GrainSftError, PrepareError
from grain_sft.prepare import CHAT_TOKENS, TEMPLATES, Dataset, Request, load_tokenizer
from grain_sft.prepare.records import inputs

CHAT_TEMPLATES = [name for name in TEMPLATES if name != "text"]
CUTS = [(None, "episodes"), (None, "olmo"), ("first", "olmo"), ("last", "episodes")]


@pytest.mark.parametrize(("keep", "format"), CUTS)
@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_cut_and_dropped_documents_are_counted(template: str, keep: str | None, format: str, place: Place) -> None:
    rules, most = TEMPLATES[template], 70 if template in ("olmo", "hf") else 24
    request = place.request(template, format, place.chats[:2])
    printed = place.succeeds(place.command(request, "--max-length", str(most), *(["--keep", keep] if keep else [])))
    lines = [(file, line) for file, count in ((0, 60), (1, 61)) for line in range(1, count + 1)]
    tokenizer, expected, kept_of = load_tokenizer(request.tokenizer), {}, []
    names = ("documents", "tokens", "trainable_tokens", "truncated", "cut_tokens", "cut_trainable_tokens")
    for file, line in lines:
        document = render_one(tokenizer, template, record(line - 1))
        tokens, loss = document.tokens.tolist(), document.loss.tolist()
        total, trainable = len(tokens), sum(map(bool, loss))
        part = slice(-most, None) if (keep or rules.truncation) == "last" else slice(most)
        tokens, loss = tokens[part], loss[part]
        while rules.trim_trailing and loss and not loss[-1]:
            tokens, loss = tokens[:-1], loss[:-1]
        if any(loss) or not (format == "olmo" or rules.trim_trailing):
            kept = sum(map(bool, loss))
            kept_of.append((1, len(tokens), kept, len(tokens) < total, total - len(tokens), trainable - kept))
            expected[file, line] = (tokens, loss)
    counts, dropped = dict(zip(names, np.sum(kept_of, axis=0), strict=True)), len(lines) - len(expected)
    documents = open_corpus(place.out).iter_documents()
    assert {each.source: (each.tokens.tolist(), each.loss.tolist()) for each in documents} == expected
    manifest = json.loads((place.out / "prepare.json").read_text())
    assert {name: manifest["splits"]["train"][name] for name in counts} == counts
    assert counts["truncated"] > 20 and sum(manifest["dropped"].values()) == dropped
    printed_as = ("{} examples", "{} tokens", "", "{} cut", "{} tokens", "{} trainable lost")
    for text, count in zip(printed_as, counts.values(), strict=True):
        assert text.format(f"{count:,}") in " ".join(printed.split())
    assert ("\ndropped " in printed) == bool(dropped)
    assert not dropped or f"dropped  {dropped:,}: no trainable token" in printed


def test_an_input_that_gives_no_document_is_an_error_and_leaves_no_folder(place: Place) -> None:
    request = place.request("episode", "olmo", place.chats[:1])
    error = place.fails(place.command(request, "--max-length", "2", "--keep", "first"))
    assert "no document is left for the split 'train': 60 valid records, 60 dropped (no trainable token)" in error
    bad = place.folder / "bad.jsonl"
    bad.write_text("{broken\n[]\n")
    command = place.command(place.request(inputs=[bad]))
    assert place.fails(command).startswith(f"grain-sft prepare: {bad}:1: ")
    error = place.fails([*command, "--on-error", "skip"])
    assert f"0 valid records, 2 rejected. The first: {bad}:1: not valid JSON" in error
    assert place.names() == ["bad.jsonl", "in"]


@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_a_single_record_makes_a_training_split_and_no_validation_split(format: str, place: Place) -> None:
    path = write_chats(place.folder / "a.jsonl", 1)
    for val_frac in (0.0, 0.9):
        out = place.folder / f"out{val_frac}"
        manifest = place.prepare(place.request(format=format, inputs=[path], val_frac=val_frac), out.name)
        assert list(manifest["splits"]) == ["train"] and manifest["splits"]["train"]["documents"] == 1
        assert not [each.name for each in out.rglob("*") if each.name.startswith(("val", "openchat.eval"))]
        assert open_corpus(out).sources.tolist() == [[0, 1]]


AMOUNTS = [("0.5", 41, 20), ("3.0", 30, 90), ("100", 40, 100), ("", 9, 9), ("5", 20, 5), ("2.5", 4, 10), ("0", 5, 0)]
"""For each input: its amount on the command line, its number of records, and how many records the mixture takes."""


def test_a_mixture_with_amounts_takes_the_records_that_open_instruct_takes(place: Place) -> None:
    words, lines = [], []
    for number, (amount, size, count) in enumerate(AMOUNTS):
        words += [str(write_chats(place.folder / f"{number}.jsonl", size)), *([amount] if amount else [])]
        repeats, rest = divmod(count, size)
        extra = np.random.RandomState(42).choice(size, size=rest, replace=False) if rest else []
        lines += [(number, line + 1) for line in [*range(size)] * repeats + [*extra]]
    command = ["prepare", *words, "--template", "primer", "--format", "olmo", "-o", str(place.out)]
    assert f"{len(lines)} examples" in place.succeeds([*command, "--tokenizer", place.tokenizers["primer"]])
    expected = np.array(lines)[np.random.default_rng(42).permutation(len(lines))]
    assert np.array_equal(open_corpus(place.out).sources, expected)


@pytest.mark.parametrize("words", [["5", "a.jsonl"], ["a.jsonl", "1", "2"], ["0.5"]])
def test_an_amount_that_does_not_follow_an_input_is_an_error(words: list[str], place: Place) -> None:
    command = ["prepare", *words, "--template", "primer", "--tokenizer", place.tokenizers["primer"]]
    assert "one amount may follow each input" in place.fails([*command, "-o", str(place.out)])


WRONG_OPTIONS = [
    ("primer", ["--seq-level-weight"], "seq_level_weight is an option of template openchat, not of primer"),
    ("primer", ["--system-prompt", "Be kind."], "system_prompt is an option of template openchat, episode"),
    ("primer", ["--format", "episodes", "--seed", str(1 << 32)], "expected at most 4294967295"),
    ("primer", ["--format", "megatron"], "all tokens of its files take loss, but template primer leaves"),
    ("primer", ["--tokenizer", "none.model"], "none.model: no such file"),
    ("primer", ["--tokenizer", os.fsdecode(b"\xff.model")], "not UTF-8"),
    ("openchat", ["--condition", os.fsdecode(b"\xff")], "not UTF-8"),
    ("hf", ["--chat-template", "none.jinja"], "none.jinja: no such file"),
]


@pytest.mark.parametrize(("template", "options", "expected"), WRONG_OPTIONS)
def test_wrong_options_of_prepare_are_refused(template: str, options: list[str], expected: str, place: Place) -> None:
    for more in ([], ["--dry-run"]):
        assert expected in place.fails(place.command(place.request(template), *options, *more))
    assert place.names() == ["in"]


def test_the_inputs_of_a_request_are_sequences_of_paths_not_one_text(tmp_path: Path) -> None:
    texts = {"template": "text", "tokenizer": "x", "format": "olmo"}
    request = Request(datasets=[Dataset([tmp_path])], **texts)
    assert hash(request) == hash(Request(datasets=(Dataset((str(tmp_path),)),), **texts))
    with pytest.raises(PrepareError, match=r"paths: 'a\.jsonl' is not a sequence"):
        Dataset("a.jsonl")
    with pytest.raises(GrainSftError, match=r"paths is 5 \(int\); expected a path or a list of paths"):
        Dataset(5)
    with pytest.raises(GrainSftError, match=r"datasets: an item is 'a\.jsonl' \(str\); expected a Dataset"):
        Request(datasets=("a.jsonl",), **texts)


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_a_dry_run_shows_text_and_writes_nothing(template: str, place: Place) -> None:
    write_chats(place.chats[0], 3, bad=(2,))
    before = stamps(place.folder)
    printed = place.succeeds(place.command(place.request(template), "--max-length", "20", "--dry-run", "5"))
    assert "4 of the first 5 records can be prepared; nothing was written." in printed
    assert f"rejected   1\n  {place.chats[0]}:2: not valid JSON" in printed
    assert "| the answer 0.0 " in printed and "the question 0.0 " in printed
    assert "longer than 20 tokens" in printed
    assert not re.search(r"^[|.] ?$", printed, re.MULTILINE)  # a newline alone is shown as ⏎
    assert stamps(place.folder) == before


@pytest.mark.parametrize("name", ["prepare-chat-sft", "prepare-tool-sft"])
def test_command_lines_of_the_episode_tools_train_a_tokenizer_and_split_records(name, place, monkeypatch):
    monkeypatch.chdir(place.folder)
    monkeypatch.delenv("GRAIN_SFT_TOKENIZER", raising=False)
    write_chats(Path("data/conversations.jsonl"), 100)
    line = f"{name} --input data/conversations.jsonl --output_dir data/chat_sft --val_split 0.1".split()
    printed = place.succeeds(line)
    assert "90 examples" in printed and "10 examples" in printed and "data/chat_sft/train" in printed
    validation = (np.sort(np.random.RandomState(42).permutation(100)[:10]) + 1).tolist()
    assert open_corpus("data/chat_sft/val").sources[:, 1].tolist() == validation
    train = open_corpus("data/chat_sft/train").sources[:, 1].tolist()
    assert train == [line for line in range(1, 101) if line not in validation]
    before = stamps(place.folder)
    assert "nothing to do" in place.succeeds(line)  # the run finds the tokenizer that it trained
    monkeypatch.setenv("GRAIN_SFT_TOKENIZER", "missing.model")
    assert "$GRAIN_SFT_TOKENIZER: missing.model does not exist" in place.fails(line)
    assert stamps(place.folder) == before
    monkeypatch.delenv("GRAIN_SFT_TOKENIZER")
    with open("data/conversations.jsonl", "a") as file:
        file.write('{"messages": 3}\nnot JSON\n')
    line = f"{name} --input data/conversations.jsonl --output_dir other --on-error".split()
    assert "conversations.jsonl:101: messages" in place.fails([*line, "stop"])
    before = stamps(place.folder)
    assert "data: is not empty" in place.fails(f"{name} --input data/conversations.jsonl --output_dir data".split())
    assert stamps(place.folder) == before  # no tokenizer was trained
    assert "root of the file system" in place.fails(f"{name} --input data/conversations.jsonl --output_dir /".split())
    printed = place.succeeds([*line, "skip"])  # the training of a tokenizer skips bad records, too
    assert "rejected 2: see other.rejected.jsonl" in printed


def test_training_a_tokenizer_again_gives_the_same_file_and_decoding_gives_every_text_back(place: Place) -> None:
    model, again = place.folder / "a.model", place.folder / "b.model"
    for path in (model, again):
        command = ["train-tokenizer", *map(str, place.chats), "-o", str(path), "--vocab-size", "330"]
        assert "of them special: none" in place.succeeds([*command, "--special-tokens", ""])
        assert "pieces  330" in place.succeeds(command)
    assert model.read_bytes() == again.read_bytes()
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocab_size == 330 and set(tokenizer.special_tokens) >= set(CHAT_TOKENS)
    for text in ("", " a  b ", "\n\n", "👩‍👩‍👧‍👦 עברית", "<|eot|>"):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text
    request = dataclasses.replace(place.request(inputs=place.chats[:1]), tokenizer=str(model))
    assert place.prepare(request)["splits"]["train"]["documents"] == 60


OWN_TEMPLATES = """
from grain_sft.prepare.templates.primer import Primer

class Fails(Primer):
    def render(self, conversations):
        raise ZeroDivisionError("of the template")
"""


def test_workers_import_templates_of_the_working_directory_and_name_errors(place, monkeypatch):
    (place.folder / "own_templates.py").write_text(OWN_TEMPLATES)
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(sys, "path", ["", Path("x"), *sys.path])  # as in a notebook; Python ignores a Path
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)
    request = dataclasses.replace(place.request(), template="own_templates:Fails")
    expected = r"Fails: ZeroDivisionError: of the template \(.*own_templates.py:6\)\. Fix its"
    with pytest.raises(PrepareError, match=expected):
        place.prepare(request, workers=2)


def test_a_tokenizer_or_options_that_do_not_fit_are_noticed_before_the_inputs_are_read(place: Place, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "list_inputs", None)
    for change, error in (
        ({"tokenizer": "missing"}, "missing: no such file"),
        ({"template": "hf"}, "has no chat template"),
        ({"bos": True}, "bos is an option of template text"),
    ):
        with pytest.raises(GrainSftError, match=error):
            place.prepare(dataclasses.replace(place.request(), **change))
