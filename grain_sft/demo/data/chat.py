"""chat: questions about Python's standard library, answered by its docstrings; packed rows, loss on the answers only.

Several conversations share a row, and none sees another: each is a segment with positions of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from grain_sft.corpus import open_corpus
from grain_sft.demo.data.data import VOCAB_SIZE, Data, Made
from grain_sft.demo.text import Entry, docstrings
from grain_sft.layout import Layout
from grain_sft.prepare import Dataset, Request, prepare, train_tokenizer
from grain_sft.prepare.training import CHAT_TOKENS, conversation_lines
from grain_sft.storage import atomic_write, write_bytes

QUESTIONS = {
    "module": "What is the module {} for?",
    "class": "What is {}?",
    "function": "What does {} do?",
}
"""By the kind of what is asked about."""


def question(entry: Entry) -> str:
    """What `entry.text` answers."""
    return QUESTIONS[entry.kind].format(entry.name)


def write_chats(path: Path, entries: Iterable[Entry]) -> None:
    """Write the conversations, one JSON object a line: a question and its answer each.

    Raises:
      StorageError: the disk is full or can't be written to.
    """
    with atomic_write(path) as file:
        for entry in entries:
            messages = [
                {"role": "user", "content": question(entry)},
                {"role": "assistant", "content": entry.text},
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _make(folder: Path, max_characters: int) -> Made:
    source = docstrings(max_characters)
    chats, model, output = folder / "chats.jsonl", folder / "tokenizer.model", folder / "sft"
    write_chats(chats, source.entries)
    lines = conversation_lines([str(chats)], special_tokens=CHAT_TOKENS)
    write_bytes(str(model), train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS))
    request = Request(
        (Dataset((str(chats),)),), template="primer", tokenizer=str(model), format="primer", special_text="encode"
    )
    counts = prepare(request, output, workers=1)["splits"]["train"]
    share = counts["trainable_tokens"] / counts["tokens"]
    said = (
        f"{counts['documents']:,} questions, answered by {source.num_characters / 1e6:.1f} M characters of docstrings; "
        f"{share:.0%} of the tokens are answers"
    )
    return Made(open_corpus(output), said)


def _describe(layout: Layout) -> str:
    found = layout.statistics
    tokens = found["tokens"] + found["padding"]
    return (
        f"{found['segments'] / found['rows']:.1f} conversations in a row, {found['padding'] / tokens:.1%} padding, "
        f"{found['cut_documents']} cut to a row's length"
    )


CHAT = Data(
    name="chat",
    make=_make,
    layout={"kind": "packed"},
    transforms=("shift_targets",),
    describe=_describe,
)
