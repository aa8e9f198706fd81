"""Fixture `chat`: a small corpus of the demo's conversations, as batches and as texts."""

import json
from typing import NamedTuple

import numpy as np
import pytest

import grain_sft
from grain_sft.demo.corpus import CONFIG, prepare_corpus
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
