"""The demo's corpus, questions about Python's standard library with its docstrings as answers, and the pipeline's config.

The layout packs several conversations into a row, and none attends to another. Only the answers take loss.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sentencepiece

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.demo.text import MAX_CHARACTERS, Entry, docstrings
from grain_sft.errors import GrainSftError
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, conversation_lines, prepare, train_tokenizer
from grain_sft.storage import atomic_write, write_bytes
from grain_sft.version import __version__

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256  # tokens
GLOBAL_BATCH_SIZE = 8  # rows
CONFIG = "config.json"
"""File name of the config in the demo's folder. `grain_sft.load` reads it."""


def prepare_corpus(
    root: Path, seed: int, say: Callable[[str], None] = lambda text: None, max_characters: int = MAX_CHARACTERS
) -> tuple[Corpus, dict[str, Any], bool]:
    """Make the corpus below `root`, or reuse the same corpus of an earlier demo, and write the config.

    Args:
      root: Folder of the demo.
      seed: Seed of the order of rows.
      say: Function that is called with a line of text before slow work.
      max_characters: Upper bound of the characters of all answers together.

    Returns:
      The corpus, its manifest, and whether an earlier demo made it.
    """
    folder = root / "corpus"
    versions = f"Python {sys.version}, grain_sft {__version__}, sentencepiece {sentencepiece.__version__}"
    source = f"docstrings: {max_characters} characters, {VOCAB_SIZE} pieces, {versions}"
    found = _reuse(folder / "sft", source)
    if found is None:
        say("reading the docstrings of Python's standard library ...")
        if folder.exists():
            shutil.rmtree(folder)
        chats, model = str(folder / "chats.jsonl"), str(folder / "tokenizer.model")
        write_chats(Path(chats), docstrings(max_characters))
        lines = conversation_lines([chats], special_tokens=CHAT_TOKENS)
        write_bytes(model, train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS))
        request = Request((Dataset((chats,)),), "primer", model, "primer", special_text="encode", source=source)
        manifest = prepare(request, folder / "sft", workers=1)
        found = open_corpus(folder / "sft"), manifest, False
    config = {
        "corpus": {"path": str(folder / "sft")},
        "layout": {"kind": "packed", "sequence_length": SEQUENCE_LENGTH},
        "sampler": {"order": "shuffle", "seed": seed, "global_batch_size": GLOBAL_BATCH_SIZE},
        "transforms": ["shift_targets"],
    }
    with atomic_write(root / CONFIG) as file:
        json.dump(config, file, indent=2)
    return found


def write_chats(path: Path, entries: Iterable[Entry]) -> None:
    """Write the question and answer of each entry as a conversation, one JSON object a line."""
    with atomic_write(path) as file:
        for question, text in entries:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _reuse(folder: Path, source: str) -> tuple[Corpus, dict[str, Any], bool] | None:
    """Return an earlier demo's corpus; None unless it is complete, was made from `source`, and can be opened."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, GrainSftError):
        manifest = json.loads((folder / "prepare.json").read_text("utf-8"))
        if manifest["request"]["source"] == source:
            return open_corpus(folder), manifest, True
    return None
