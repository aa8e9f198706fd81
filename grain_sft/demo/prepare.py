"""The demo's corpus: made once in a folder, and taken up again where it is complete and of this Python."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.demo.folder import DemoFolder, remove, writing
from grain_sft.demo.text import MAX_CHARACTERS, Source, python_sources
from grain_sft.demo.tokens import SHARD_TOKENS, VOCAB_SIZE, token_dtype, train_tokenizer, write_mix
from grain_sft.errors import GrainSftError
from grain_sft.files import atomic_write

SEQUENCE_LENGTH = 256  # tokens
GLOBAL_BATCH_SIZE = 8  # rows
TOKENIZER_NAME = f"python_docs_{VOCAB_SIZE}"

_VERSION = 1  # of what this module writes


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What training starts from.

    Attributes:
      corpus: the tokens.
      vocab_size: of the tokenizer.
      num_characters: of the text that they were made of.
      reused: whether an earlier demo made them.
    """

    corpus: Corpus
    vocab_size: int
    num_characters: int
    reused: bool


def prepare(
    folder: DemoFolder,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    read: Callable[[], list[Source]] = python_sources,
) -> Prepared:
    """Tokenizer, token files, mix and index in `folder`, made where they are not there yet, and a config for `seed`.

    Args:
      folder: claimed.
      seed: of the order of rows.
      say: is told what takes a while.
      read: the text, if it is needed.

    Raises:
      StorageError: the disk is full or can't be written to.
      GrainSftError: this Python carries too little text.
    """
    prepared = _reuse(folder)
    if prepared is None:
        say("reading the docstrings of Python's standard library ...")
        prepared = _make(folder, read())
    with writing(folder.config), atomic_write(folder.config) as file:
        json.dump(config(folder, seed), file, indent=2)
        file.write("\n")
    return prepared


def config(folder: DemoFolder, seed: int) -> dict[str, Any]:
    """The config of the demo's pipeline, as `grain_sft.load` takes it."""
    return {
        "corpus": {"path": str(folder.index)},
        "layout": {"kind": "windows", "sequence_length": SEQUENCE_LENGTH},
        "sampler": {"order": "shuffle", "seed": seed, "global_batch_size": GLOBAL_BATCH_SIZE},
        "transforms": ["ngram_filter", "shift_targets"],
    }


def _make(folder: DemoFolder, sources: Sequence[Source]) -> Prepared:
    with writing(folder.root):
        folder.record.unlink(missing_ok=True)
    remove(folder.tokens)
    model = train_tokenizer(document for source in sources for document in source.documents)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    with writing(folder.root):
        with atomic_write(folder.tokenizer, "wb") as file:
            file.write(model)
        written = write_mix(folder.mix, folder.tokens.name, TOKENIZER_NAME, model, sources)
        dtype = token_dtype(processor.vocab_size()).name
        corpus = open_corpus(
            folder.mix, format="mix", dtype=dtype, eos_token_id=processor.eos_id(), tokenizer=TOKENIZER_NAME
        )
        corpus.save(folder.index)
        record: dict[str, Any] = {
            "made_with": _made_with(),
            "vocab_size": processor.vocab_size(),
            "num_characters": sum(source.num_characters for source in sources),
            "sha256": {
                str(path.relative_to(folder.root)): _sha256(path)
                for path in (folder.tokenizer, folder.mix, folder.index, *written)
            },
        }
        with atomic_write(folder.record) as file:
            json.dump(record, file, indent=2)
            file.write("\n")
    return Prepared(corpus, record["vocab_size"], record["num_characters"], reused=False)


def _reuse(folder: DemoFolder) -> Prepared | None:
    """An earlier demo's corpus; None unless every file of it is there and as it was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, GrainSftError):
        record = json.loads(folder.record.read_text("utf-8"))
        unchanged = all(_sha256(folder.root / name) == sha256 for name, sha256 in record["sha256"].items())
        if unchanged and record["made_with"] == _made_with():
            corpus = open_corpus(folder.index, format="index")
            return Prepared(corpus, int(record["vocab_size"]), int(record["num_characters"]), reused=True)
    return None


def _made_with() -> dict[str, Any]:
    """All that decides the corpus."""
    return {
        "version": _VERSION,
        "python": sys.version,
        "sentencepiece": sentencepiece.__version__,
        "vocab_size": VOCAB_SIZE,
        "shard_tokens": SHARD_TOKENS,
        "max_characters": MAX_CHARACTERS,
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
