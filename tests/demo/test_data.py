"""What the demo trains on: text of this machine, and packed conversations made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_chat import SMALL_TEXT, Chat, documents

import grain_sft
from grain_sft.demo import text
from grain_sft.demo.corpus import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, Prepared, prepare_corpus, write_chats
from grain_sft.demo.folder import claim
from grain_sft.demo.text import Entry
from grain_sft.errors import GrainSftError

# --- what is read ---


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
    found = [(entry.kind, entry.name, entry.text) for entry in text.library_docstrings(tmp_path) if entry.text]
    assert found == [
        ("module", "a", "Module a."),
        ("class", "a.A", "Class A."),
        ("function", "a.A.f", "Method f."),
        ("function", "a.g", "Function g."),
        ("module", "b", "Module b."),
        ("module", "escape", "Bad \\escape."),
        ("module", "sub", "Package sub."),
        ("module", "sub.c", "Module c."),
    ]


def test_text_is_the_same_twice_within_its_bound_and_without_repeats() -> None:
    entries = text.docstrings(SMALL_TEXT)
    assert entries == text.docstrings(SMALL_TEXT)
    texts = [entry.text for entry in entries]
    assert 100_000 < sum(map(len, texts)) <= SMALL_TEXT
    assert len(set(texts)) == len(texts) and all(each.strip() for each in texts)


def test_what_the_documents_hold_that_is_no_text_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docstrings = ["'NUL \\0.'", "'Half a pair \\ud800.'", "'  '", "'Same.'", "'Same.'", f"'{'Long. ' * 20_000}'"]
    for number, docstring in enumerate(docstrings):
        (tmp_path / f"m{number}.py").write_text(docstring)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [entry.name for entry in text.docstrings()] == ["m3", "m5"]
    (tmp_path / "m5.py").unlink()
    with pytest.raises(GrainSftError, match="found 5 characters of docstrings; expected 100000 or more"):
        text.docstrings()


# --- chat: packed conversations ---


def test_a_question_asks_for_what_the_docstring_says(tmp_path: Path) -> None:
    questions = {"module": "What is the module x.y for?", "class": "What is x.y?", "function": "What does x.y do?"}
    write_chats(tmp_path / "chats.jsonl", [Entry(kind, "x.y", "It is.") for kind in questions])
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    for line, expected in zip(lines, questions.values(), strict=True):
        asked, answered = json.loads(line)["messages"]
        assert asked == {"role": "user", "content": expected} and answered["content"] == "It is."


def test_every_document_is_a_question_and_its_answer_from_position_0_which_alone_takes_loss(chat: Chat) -> None:
    cut = 0
    for step in range(10):
        batch = chat.pipeline[step]
        takes_loss, in_documents = batch["targets_segmentation"] != 0, batch["inputs_segmentation"] != 0
        assert batch["inputs"].shape == (GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH)
        assert not (takes_loss & ~in_documents).any()
        assert 0.5 < takes_loss.sum() / in_documents.sum() < 0.95
        for row, mask in documents(batch):
            text = chat.tokenizer.decode(batch["inputs"][row][mask].tolist())
            asked, _, answered = text.removeprefix("<|usr|>").partition("<|eot|><|asst|>")
            assert chat.tokenizer.decode(batch["targets"][row][mask & takes_loss[row]].tolist()) == answered
            assert batch["inputs_position"][row][mask].tolist() == list(range(mask.sum()))
            if mask.sum() == SEQUENCE_LENGTH and not answered.endswith("<|eot|>"):
                cut += 1
            else:
                assert answered.removesuffix("<|eot|>") in chat.answers[asked]
    assert cut < 20


def test_packed_rows_have_next_to_no_padding_and_several_conversations(chat: Chat) -> None:
    found = chat.pipeline.source.layout.statistics
    assert found["segments"] == sum(map(len, chat.answers.values())) and not found["dropped_documents"]
    assert found["padding"] < 0.02 * (found["tokens"] + found["padding"])
    assert found["segments"] > 2 * found["rows"]


# --- the corpus in its folder ---


def test_a_corpus_is_made_once_and_made_again_if_it_is_damaged(tmp_path: Path) -> None:
    def make(seed: int) -> Prepared:
        return prepare_corpus(folder, seed, max_characters=SMALL_TEXT)

    with claim(tmp_path / "demo") as folder:
        made, again = make(0), make(1)
        assert (made.reused, again.reused) == (False, True)
        assert (again.corpus.fingerprint, again.summary) == (made.corpus.fingerprint, made.summary)
        pipeline = grain_sft.load(folder.config, host=grain_sft.Host(0, 1))
        assert pipeline.sampler.seed == 1
        assert pipeline[0]["inputs"].shape == (GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH)
        damaged = Path(made.corpus.shards[0].path)
        damaged.write_bytes(damaged.read_bytes()[:-2])
        mended = make(0)
        assert not mended.reused
        assert mended.corpus.fingerprint == made.corpus.fingerprint
        folder.record.unlink()  # a demo that was ended before its corpus was complete
        assert not make(0).reused
