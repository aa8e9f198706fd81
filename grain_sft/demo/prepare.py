"""The demo's corpus: made once in a folder, and taken up again where it is complete and of this Python."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import sentencepiece

import grain_sft
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.demo.data import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Data
from grain_sft.demo.folder import DemoFolder, remove, writing
from grain_sft.demo.text import MAX_CHARACTERS
from grain_sft.errors import GrainSftError
from grain_sft.storage import atomic_write

_VERSION = 2  # of what `data` writes


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What training starts from.

    Attributes:
      corpus: the tokens.
      said: of what they were made, for people.
      reused: whether an earlier demo made them.
    """

    corpus: Corpus
    said: str
    reused: bool


def prepare(
    folder: DemoFolder,
    data: Data,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    max_characters: int = MAX_CHARACTERS,
) -> Prepared:
    """The corpus of `data` and its index in `folder`, made where they are not there yet, and a config for `seed`.

    Args:
      folder: claimed.
      data: what to make.
      seed: of the order of rows.
      say: is told what takes a while.
      max_characters: of text, at most.

    Raises:
      StorageError: the disk is full or can't be written to.
      GrainSftError: this Python carries too little text.
    """
    made_with = _made_with(data, max_characters)
    prepared = _reuse(folder, made_with)
    if prepared is None:
        say("reading the docstrings of Python's standard library ...")
        prepared = _make(folder, data, max_characters, made_with)
    with writing(folder.config), atomic_write(folder.config) as file:
        json.dump(config(folder, data, seed), file, indent=2)
        file.write("\n")
    return prepared


def config(folder: DemoFolder, data: Data, seed: int) -> dict[str, Any]:
    """The config of the demo's pipeline, as `grain_sft.load` takes it."""
    return {
        "corpus": {"path": str(folder.index)},
        "layout": {**data.layout, "sequence_length": SEQUENCE_LENGTH},
        "sampler": {"order": "shuffle", "seed": seed, "global_batch_size": GLOBAL_BATCH_SIZE},
        "transforms": list(data.transforms),
    }


def _make(folder: DemoFolder, data: Data, max_characters: int, made_with: dict[str, Any]) -> Prepared:
    remove(folder.corpus)
    with writing(folder.corpus):
        folder.corpus.mkdir()
        made = data.make(folder.corpus, max_characters)
        made.corpus.save(folder.index)
        record = {"made_with": made_with, "said": made.said, "sha256": _hashes(folder)}
        with atomic_write(folder.record) as file:
            json.dump(record, file, indent=2)
            file.write("\n")
    return Prepared(made.corpus, made.said, reused=False)


def _reuse(folder: DemoFolder, made_with: dict[str, Any]) -> Prepared | None:
    """An earlier demo's corpus; None unless every file of it is there and as it was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, GrainSftError):
        record = json.loads(folder.record.read_text("utf-8"))
        if record["made_with"] == made_with and record["sha256"] == _hashes(folder):
            return Prepared(open_corpus(folder.index, format="index"), str(record["said"]), reused=True)
    return None


def _made_with(data: Data, max_characters: int) -> dict[str, Any]:
    """All that decides the corpus."""
    return {
        "version": _VERSION,
        "data": data.name,
        "grain_sft": grain_sft.__version__,
        "python": sys.version,
        "sentencepiece": sentencepiece.__version__,
        "vocab_size": VOCAB_SIZE,
        "max_characters": max_characters,
    }


def _hashes(folder: DemoFolder) -> dict[str, str]:
    """SHA-256 of every file of the corpus but its record, by name."""
    paths = sorted(path for path in folder.corpus.rglob("*") if path.is_file() and path != folder.record)
    return {path.relative_to(folder.corpus).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
