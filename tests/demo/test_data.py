"""What the demo trains on: text of this machine, conversations made of it, and token files with a mix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from small_chat import SMALL_TEXT, Chat, documents

import grain_sft
from grain_sft.demo import text
from grain_sft.demo.data import DATA, GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, mix
from grain_sft.demo.data.chat import question
from grain_sft.demo.folder import claim
from grain_sft.demo.prepare import Prepared, prepare
from grain_sft.demo.text import Entry, Source
from grain_sft.errors import GrainSftError

DOCUMENTS = (
    "One line.",
    "Two lines,\n\n    the second one set in.",
    "Ünïcode, 漢字 and\ttabs.",
    "one two three " * 50,
)


def source_of(label: str, texts: tuple[str, ...]) -> Source:
    return Source(label, tuple(Entry("topic", "", each) for each in texts))


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
    first = text.python_sources(SMALL_TEXT)
    assert first == text.python_sources(SMALL_TEXT)
    documents = [document for source in first for document in source.documents]
    assert 100_000 < sum(map(len, documents)) <= SMALL_TEXT
    assert all(len(set(source.documents)) == len(source.documents) for source in first)
    assert all(document.strip() for document in documents)


def test_what_the_documents_hold_that_is_no_text_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docstrings = ["'NUL \\0.'", "'Half a pair \\ud800.'", "'  '", "'Same.'", "'Same.'", f"'{'Long. ' * 20_000}'"]
    for number, docstring in enumerate(docstrings):
        (tmp_path / f"m{number}.py").write_text(docstring)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [entry.name for entry in text.docstrings().entries] == ["m3", "m5"]
    (tmp_path / "m5.py").unlink()
    with pytest.raises(GrainSftError, match="found 5 characters of the 100000 that it needs"):
        text.docstrings()


# --- text: a mix of token files ---


def test_tokens_give_back_every_document_and_eos_ends_each() -> None:
    trained = mix.train_tokenizer(DOCUMENTS, vocab_size=330)
    assert trained == mix.train_tokenizer(DOCUMENTS, vocab_size=330)
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained)
    (shard,) = mix.tokenize(processor, DOCUMENTS)
    assert shard.dtype == np.uint16
    ends = np.flatnonzero(shard == processor.eos_id())
    assert len(ends) == len(DOCUMENTS)
    pieces = np.split(shard, ends + 1)[:-1]
    assert [processor.decode(piece[:-1].tolist()) for piece in pieces] == list(DOCUMENTS)


def test_text_can_not_forge_an_eos() -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=mix.train_tokenizer(DOCUMENTS, vocab_size=330))
    assert processor.eos_id() not in processor.encode("before</s>after")


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert [mix.token_dtype(size).name for size in (256, 257, 2048, 65_536, 65_537)] == [
        *("uint8", "uint16", "uint16", "uint16", "uint32")
    ]


def test_a_mix_lists_raw_files_by_label_that_end_with_a_document(tmp_path: Path) -> None:
    trained = mix.train_tokenizer(DOCUMENTS, vocab_size=330)
    sources = [source_of("one", DOCUMENTS * 3), source_of("two", DOCUMENTS[:1])]
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained)
    mix.write_mix(tmp_path / "mix.txt", "tokens", "small", trained, sources)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.npy")) == [
        "tokens/small/one/part-00000.npy",
        "tokens/small/two/part-00000.npy",
    ]
    lines = (tmp_path / "mix.txt").read_text().splitlines()
    assert lines[0].startswith("#")
    assert lines[1] == "one,tokens/{TOKENIZER}/one/part-00000.npy"
    corpus = grain_sft.open_corpus(
        tmp_path / "mix.txt", dtype="uint16", eos_token_id=processor.eos_id(), tokenizer="small"
    )
    assert [shard.label for shard in corpus.shards] == ["one", "two"]
    assert all(shard.data_offset == 0 for shard in corpus.shards)
    assert corpus.num_documents == 3 * len(DOCUMENTS) + 1
    assert len(list(mix.tokenize(processor, DOCUMENTS, shard_tokens=1))) == len(DOCUMENTS)


# --- chat: packed conversations ---


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("module", "json", "What is the module json for?"),
        ("class", "json.JSONEncoder", "What is json.JSONEncoder?"),
        ("function", "json.dumps", "What does json.dumps do?"),
    ],
)
def test_a_question_asks_for_what_the_docstring_says(kind: str, name: str, expected: str) -> None:
    assert question(Entry(kind, name, "It is.")) == expected


def test_every_document_of_a_batch_is_a_question_and_its_answer_from_position_0(chat: Chat) -> None:
    cut = 0
    for step in range(10):
        batch = chat.pipeline[step]
        assert batch["inputs"].shape == (GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH)
        for row, mask in documents(batch):
            said = chat.tokenizer.decode(batch["inputs"][row][mask].tolist())
            asked, _, answered = said.removeprefix("<|usr|>").partition("<|eot|><|asst|>")
            if mask.sum() == SEQUENCE_LENGTH and not answered.endswith("<|eot|>"):
                cut += 1
                continue
            assert answered.removesuffix("<|eot|>") in chat.answers[asked]
            assert batch["inputs_position"][row][mask].tolist() == list(range(mask.sum()))
    assert cut < 20


def test_what_takes_loss_is_the_answers_and_nothing_else(chat: Chat) -> None:
    whole = 0
    for step in range(10):
        batch = chat.pipeline[step]
        takes_loss = batch["targets_segmentation"] != 0
        for row, mask in documents(batch):
            said = chat.tokenizer.decode(batch["inputs"][row][mask].tolist())
            _, marker, answered = said.partition("<|asst|>")
            learned = chat.tokenizer.decode(batch["targets"][row][mask & takes_loss[row]].tolist())
            assert marker and learned == answered
            whole += learned.endswith("<|eot|>")
        in_documents = batch["inputs_segmentation"] != 0
        assert not (takes_loss & ~in_documents).any()
        assert 0.5 < takes_loss.sum() / in_documents.sum() < 0.95
    assert whole > 200


def test_packed_rows_have_next_to_no_padding_and_several_conversations(chat: Chat) -> None:
    found = chat.pipeline.source.layout.statistics
    assert found["segments"] == sum(map(len, chat.answers.values())) and not found["dropped_documents"]
    assert found["padding"] < 0.02 * (found["tokens"] + found["padding"])
    assert found["segments"] > 2 * found["rows"]


# --- the corpus in its folder ---


@pytest.mark.parametrize("name", DATA)
def test_a_corpus_is_made_once_and_made_again_if_it_is_damaged(name: str, tmp_path: Path) -> None:
    def make(seed: int) -> Prepared:
        return prepare(folder, DATA[name], seed, max_characters=SMALL_TEXT)

    with claim(tmp_path / "demo") as folder:
        made, again = make(0), make(1)
        assert (made.reused, again.reused) == (False, True)
        assert (again.corpus.fingerprint, again.said) == (made.corpus.fingerprint, made.said)
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


def test_other_data_in_the_same_folder_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        for name, file in (("chat", "chats.jsonl"), ("text", "mix.txt")):
            assert not prepare(folder, DATA[name], 0, max_characters=SMALL_TEXT).reused
            assert (folder.corpus / file).exists()
        assert not (folder.corpus / "chats.jsonl").exists()
