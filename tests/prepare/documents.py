"""Helpers for tests that prepare plain documents: texts without roles, in the template `text`."""

import base64
import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batches import golden_values

from grain_sft import open_corpus
from grain_sft.corpus import Corpus
from grain_sft.prepare import Dataset, Request, prepare

FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


def save_golden_tokenizer(folder: Path) -> Path:
    """Save the SentencePiece model of the golden files `fim.json` and `text_olmo.json`. Return its path."""
    path = folder / "fim.model"
    path.write_bytes(zlib.decompress(base64.b64decode(golden_values("fim.json")["model"])))
    return path


def write(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": n}) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
    return path


def texts_of(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("the answer\n\t é漢😀<|", k=draw.randrange(1, 200))) for _ in range(count)]


def request_of(tokenizer: Path, *paths: Path | str, **options: Any) -> Request:
    options = {"template": "text", "format": "olmo", **options}
    return Request((Dataset(tuple(map(str, paths))),), tokenizer=str(tokenizer), **options)


def made(spm: Path, path: Path, **options: Any) -> tuple[Corpus, dict[str, Any]]:
    """Prepare a file. Return the corpus and its manifest."""
    out = path.parent / f"out-{len(list(path.parent.iterdir()))}"
    manifest = prepare(request_of(spm, path, **options), out, workers=1)
    return open_corpus(out), manifest


def documents_of(spm: Path, folder: Path, texts: Sequence[str], **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Prepare `texts`. Return the tokens of the documents, in the order of `texts`, and the manifest."""
    corpus, manifest = made(spm, write(folder / "a.jsonl", texts), shuffle=False, **options)
    return [document.tokens.tolist() for document in corpus.iter_documents()], manifest
