"""The demo's corpus: questions about Python's standard library, answered by its docstrings; and the config of its pipeline.

Rows are packed: several conversations share a row, and none sees another. The loss is on the answers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.demo.folder import DemoFolder, remove
from grain_sft.demo.text import MAX_CHARACTERS, Entry, docstrings
from grain_sft.errors import GrainSftError
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, conversation_lines, prepare, train_tokenizer
from grain_sft.storage import atomic_write, write_bytes
from grain_sft.version import __version__

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256  # tokens
GLOBAL_BATCH_SIZE = 8  # rows
QUESTIONS = {"module": "What is the module {} for?", "class": "What is {}?", "function": "What does {} do?"}
"""Questions by the kind of what is asked about."""

_VERSION = 4  # of what `_make` writes


class Prepared(NamedTuple):
    """A corpus, a sentence on what it was made of, and whether an earlier demo made it."""

    corpus: Corpus
    summary: str
    reused: bool


def prepare_corpus(
    folder: DemoFolder, seed: int, say: Callable[[str], None] = lambda text: None, max_characters: int = MAX_CHARACTERS
) -> Prepared:
    """Make the corpus in `folder`, unless an earlier demo made it, and a config; `say` gets a line before slow work."""
    made_with = {
        "version": _VERSION,
        "grain_sft": __version__,
        "python": sys.version,
        "sentencepiece": sentencepiece.__version__,
        "vocab_size": VOCAB_SIZE,
        "max_characters": max_characters,
    }
    prepared = _reuse(folder, made_with)
    if prepared is None:
        say("reading the docstrings of Python's standard library ...")
        remove(folder.corpus)
        folder.corpus.mkdir()
        prepared = _make(folder.corpus, max_characters)
        prepared.corpus.save(folder.index)
        _write_json(folder.record, {"made_with": made_with, "summary": prepared.summary})
    config = {
        "corpus": {"path": str(folder.index)},
        "layout": {"kind": "packed", "sequence_length": SEQUENCE_LENGTH},
        "sampler": {"order": "shuffle", "seed": seed, "global_batch_size": GLOBAL_BATCH_SIZE},
        "transforms": ["shift_targets"],
    }
    _write_json(folder.config, config)
    return prepared


def write_chats(path: Path, entries: Iterable[Entry]) -> None:
    """Write the conversations, one JSON object a line: a question and its answer each."""
    with atomic_write(path) as file:
        for entry in entries:
            question = QUESTIONS[entry.kind].format(entry.name)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": entry.text}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _make(folder: Path, max_characters: int) -> Prepared:
    entries = docstrings(max_characters)
    chats, model, output = str(folder / "chats.jsonl"), str(folder / "tokenizer.model"), folder / "sft"
    write_chats(Path(chats), entries)
    lines = conversation_lines([chats], special_tokens=CHAT_TOKENS)
    write_bytes(model, train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS))
    request = Request((Dataset((chats,)),), template="primer", tokenizer=model, format="primer", special_text="encode")
    counts = prepare(request, output, workers=1)["splits"]["train"]
    characters = sum(len(entry.text) for entry in entries) / 1e6
    share = counts["trainable_tokens"] / counts["tokens"]
    summary = (
        f"{counts['documents']:,} questions, answered by {characters:.1f} M characters of docstrings; "
        f"{share:.0%} of the tokens are answers"
    )
    return Prepared(open_corpus(output), summary, reused=False)


def _reuse(folder: DemoFolder, made_with: dict[str, Any]) -> Prepared | None:
    """Return an earlier demo's corpus; None unless it is complete, made alike, and as its index describes it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, GrainSftError):
        record = json.loads(folder.record.read_text("utf-8"))
        if record["made_with"] == made_with:
            return Prepared(open_corpus(folder.index, format="index"), str(record["summary"]), reused=True)
    return None


def _write_json(path: Path, content: Any) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=2) + "\n")
