"""The demo's data are docstrings of this machine's Python library, packed as questions and answers.

Its model keeps packed conversations apart, takes loss from answers alone, and saves and loads every bit.
"""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from batches import assert_same

import grain_sft
from grain_sft.demo import corpus
from grain_sft.demo.corpus import CONFIG, GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, prepare_corpus
from grain_sft.demo.run import newest_step
from grain_sft.demo.train import ADAM, init_params, load, logits, loss, save, update
from grain_sft.errors import GrainSftError
from grain_sft.prepare import Tokenizer, load_tokenizer

SMALL_TEXT = 150_000  # characters

Batch = dict[str, np.ndarray]


class Chat(NamedTuple):
    """The demo's pipeline over packed conversations, its tokenizer, and all answers to each question."""

    pipeline: grain_sft.Pipeline
    tokenizer: Tokenizer
    answers: dict[str, set[str]]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    root = tmp_path_factory.mktemp("chat") / "demo"
    prepare_corpus(root, 0, max_characters=SMALL_TEXT)
    pipeline = grain_sft.load(root / CONFIG, host=grain_sft.Host(0, 1))
    answers: dict[str, set[str]] = {}
    for line in (root / "corpus" / "chats.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        answers.setdefault(question["content"], set()).add(answer["content"])
    return Chat(pipeline, load_tokenizer(root / "corpus" / "tokenizer.model"), answers)


def documents(batch: Batch) -> list[tuple[int, np.ndarray]]:
    """Return (row, mask bool [L]) of every document of a batch. The mask is True at the document's tokens."""
    segments = batch["inputs_segmentation"]
    return [(row, found == n) for row, found in enumerate(segments) for n in range(1, found.max() + 1)]


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


LOGITS = jax.jit(logits)
LOSS = jax.jit(loss)
LOSS_AND_GRADIENTS = jax.jit(jax.value_and_grad(loss))
PARAMS = init_params(VOCAB_SIZE, 0, width=16)


def scores(batch: Batch) -> np.ndarray:
    return np.asarray(LOGITS(PARAMS, batch))


def other_tokens(batch: Batch, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, batch["inputs"].shape).astype(np.int32)


def test_a_later_token_changes_no_earlier_score(chat: Chat) -> None:
    batch = dict(chat.pipeline[0])
    before = scores(batch)
    inputs = batch["inputs"].copy()
    inputs[:, -1] = (inputs[:, -1] + 1) % VOCAB_SIZE
    after = scores({**batch, "inputs": inputs})
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] != after[:, -1]).any(axis=1).all()


def test_scores_of_a_document_do_not_change_with_its_neighbours(chat: Chat) -> None:
    """Scores are equal to the last bit: the weight of a masked score is exactly 0, and adding 0 changes no sum."""
    batch = dict(chat.pipeline[0])
    before = scores(batch)
    middle = [(row, found == 2) for row, found in enumerate(batch["inputs_segmentation"]) if found.max() > 2]
    assert len(middle) > 2  # documents with neighbours on both sides
    for row, mask in middle:
        others = other_tokens(batch, row)
        others[row][mask] = batch["inputs"][row][mask]
        removed = {key: np.zeros_like(array) for key, array in batch.items()}
        for key, array in removed.items():
            array[row][mask] = batch[key][row][mask]
        for changed in ({**batch, "inputs": others}, removed):
            after = scores(changed)
            np.testing.assert_array_equal(before[row][mask], after[row][mask])
            assert (before[row][~mask] != after[row][~mask]).any()  # the neighbours' scores change


def test_loss_and_gradients_come_from_the_answers_alone(chat: Chat) -> None:
    batch = dict(chat.pipeline[0])
    takes_loss = batch["targets_segmentation"] != 0
    others = other_tokens(batch)
    other_questions = {**batch, "targets": np.where(takes_loss, batch["targets"], others)}
    other_answers = {**batch, "targets": np.where(takes_loss, others, batch["targets"])}
    loss, gradients = LOSS_AND_GRADIENTS(PARAMS, batch)
    same_loss, same_gradients = LOSS_AND_GRADIENTS(PARAMS, other_questions)
    assert loss == same_loss and loss != LOSS(PARAMS, other_answers)
    assert_same(gradients, same_gradients)


def test_a_checkpoint_restores_every_bit_and_the_newest_has_the_highest_step(chat: Chat, tmp_path: Path) -> None:
    state, batch = ADAM.init_fn(PARAMS), dict(chat.pipeline[0])
    first_state, first_loss = update(state, 0, batch)
    for step in (2, 10):
        save(tmp_path, step, first_state)
    (tmp_path / ".step-00000011.npz.x.tmp").touch()  # a process was killed while it wrote this
    assert newest_step(tmp_path) == 10
    loaded = load(tmp_path, 10, state)
    assert jax.tree.structure(loaded) == jax.tree.structure(first_state)
    assert_same(*(dict(enumerate(jax.tree.leaves(each))) for each in (loaded, first_state)))
    assert update(loaded, 1, batch)[1] < first_loss
    with pytest.raises(GrainSftError, match="contains no checkpoint"):
        newest_step(tmp_path / "none")
