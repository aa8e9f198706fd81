"""The data of the demo: docstrings of this machine's Python library, packed as questions and answers."""

from pathlib import Path

import pytest
from small_chat import SMALL_TEXT, Chat, documents

from grain_sft.demo import corpus
from grain_sft.demo.corpus import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH
from grain_sft.errors import GrainSftError


def test_docstrings_come_in_order_from_files_that_are_never_imported(tmp_path: Path) -> None:
    files = {
        "b.py": '"""Module b."""\nraise SystemExit("imported")\n',
        "a.py": '"""Module a."""\nclass A:\n    "Class A."\n    def f(self): "Method f."\nif 1:\n    def g(): "Function g."\n',
        "broken.py": "def (:\n",
        "null.py": "\0",
        "escape.py": '"Bad \\escape."\n',
        "test/t.py": '"""A test."""',
        "site-packages/s.py": '"""A package."""',
        "sub/c.py": '"""Module c."""\n',
        "sub/__init__.py": '"""Package sub."""\n',
        "notes.txt": '"""No Python."""',
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert [entry for entry in corpus.library_docstrings(tmp_path) if entry.text] == [
        ("What is the module a for?", "Module a."),
        ("What is a.A?", "Class A."),
        ("What does a.A.f do?", "Method f."),
        ("What does a.g do?", "Function g."),
        ("What is the module b for?", "Module b."),
        ("What is the module escape for?", "Bad \\escape."),
        ("What is the module sub for?", "Package sub."),
        ("What is the module sub.c for?", "Module c."),
    ]


def test_docstrings_are_the_same_at_each_call_within_their_limit_and_without_repeats() -> None:
    entries = corpus.docstrings(SMALL_TEXT)
    assert entries == corpus.docstrings(SMALL_TEXT)
    fewer = corpus.docstrings(50_000)
    assert fewer and fewer == entries[: len(fewer)]
    texts = {entry.text.strip() for entry in entries} - {""}
    assert len(texts) == len(entries) and 100_000 < sum(map(len, texts)) <= SMALL_TEXT


def test_docstrings_that_are_not_text_or_repeated_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docstrings = ["'NUL \\0.'", "'Half a pair \\ud800.'", "'  '", "'Same.'", "'Same.'", f"'{'Long. ' * 20_000}'"]
    for number, docstring in enumerate(docstrings):
        (tmp_path / f"m{number}.py").write_text(docstring)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    same, long = corpus.docstrings()
    assert (same.question, long.question) == ("What is the module m3 for?", "What is the module m5 for?")
    (tmp_path / "m5.py").unlink()
    with pytest.raises(GrainSftError, match="found 5 characters of docstrings; expected 100000 or more"):
        corpus.docstrings()


def test_every_document_is_a_question_and_its_answer_and_only_the_answer_takes_loss(chat: Chat) -> None:
    cut = 0
    for step in range(10):
        batch = chat.pipeline[step]
        takes_loss, in_documents = batch["targets_segmentation"] != 0, batch["inputs_segmentation"] != 0
        assert batch["inputs"].shape == (GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH)
        assert not (takes_loss & ~in_documents).any()
        assert 0.5 < takes_loss.sum() / in_documents.sum() < 0.95
        for row, mask in documents(batch):
            text = chat.tokenizer.decode(batch["inputs"][row][mask].tolist())
            question, _, answer = text.removeprefix("<|usr|>").partition("<|eot|><|asst|>")
            assert chat.tokenizer.decode(batch["targets"][row][mask & takes_loss[row]].tolist()) == answer
            assert batch["inputs_position"][row][mask].tolist() == list(range(mask.sum()))
            if mask.sum() == SEQUENCE_LENGTH and not answer.endswith("<|eot|>"):
                cut += 1
            else:
                assert answer.removesuffix("<|eot|>") in chat.answers[question]
    assert cut < 20


def test_packed_rows_have_little_padding_and_several_conversations(chat: Chat) -> None:
    found = chat.pipeline.source.layout.statistics
    assert found["segments"] == sum(map(len, chat.answers.values())) and not found["dropped_documents"]
    assert found["padding"] < 0.02 * (found["tokens"] + found["padding"])
    assert found["segments"] > 2 * found["rows"]
