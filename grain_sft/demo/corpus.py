"""The demo's corpus, questions about Python's standard library with its docstrings as answers, and the pipeline's config.

The layout packs several conversations into a row, and none attends to another. Only the answers take loss.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.demo.text import MAX_CHARACTERS, Entry, docstrings
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, conversation_lines, prepare, train_tokenizer
from grain_sft.storage import atomic_write, write_bytes

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256  # tokens
GLOBAL_BATCH_SIZE = 8  # rows
CONFIG = "config.json"
"""File name of the config in the demo's folder. `grain_sft.load` reads it."""


def prepare_corpus(root: Path, seed: int, max_characters: int = MAX_CHARACTERS) -> tuple[Corpus, Mapping[str, Any]]:
    """Make the corpus below `root`, write the config, and return the corpus and its manifest.

    Args:
      root: Folder of the demo.
      seed: Seed of the order of rows.
      max_characters: Upper bound of the characters of all answers together.
    """
    folder = root / "corpus"
    if folder.exists():
        shutil.rmtree(folder)
    print("reading the docstrings of Python's standard library ...", flush=True)
    chats, model = str(folder / "chats.jsonl"), str(folder / "tokenizer.model")
    write_chats(Path(chats), docstrings(max_characters))
    lines = conversation_lines([chats], special_tokens=CHAT_TOKENS)
    write_bytes(model, train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS))
    request = Request((Dataset((chats,)),), "primer", model, "primer", special_text="encode")
    manifest = prepare(request, folder / "sft", workers=1)
    config = {
        "corpus": {"path": str(folder / "sft")},
        "layout": {"kind": "packed", "sequence_length": SEQUENCE_LENGTH},
        "sampler": {"order": "shuffle", "seed": seed, "global_batch_size": GLOBAL_BATCH_SIZE},
        "transforms": ["shift_targets"],
    }
    with atomic_write(root / CONFIG) as file:
        json.dump(config, file, indent=2)
    return open_corpus(folder / "sft"), manifest


def write_chats(path: Path, entries: Iterable[Entry]) -> None:
    """Write the question and answer of each entry as a conversation, one JSON object a line."""
    with atomic_write(path) as file:
        for question, text in entries:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
