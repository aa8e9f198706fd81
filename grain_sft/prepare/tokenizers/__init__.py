"""Tokenizers: SentencePiece models and those of Hugging Face, from local or remote files."""

from __future__ import annotations

import os

from grain_sft import files
from grain_sft.errors import CorpusFileError
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer, read_folder
from grain_sft.prepare.tokenizers.sentencepiece_model import SentencePieceTokenizer
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

__all__ = ["HuggingFaceTokenizer", "SentencePieceTokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer at `path`, local or remote: a SentencePiece `.model`, a `tokenizer.json`, or a directory.

    A `tokenizer.json` with a `tokenizer_config.json` beside it is read as their directory is, since that says what its
    EOS and its chat template are. A directory without tokenizer.json and its like but with one `.model` is SentencePiece.

    Raises:
      CorpusFileError: there is no such file, or it can't be read.
      CorpusError: it is no tokenizer.
      MissingExtraError: it needs the extra `hf`.
    """
    where = files.normalize(path).rstrip("/")
    if where.endswith(".model"):
        return SentencePieceTokenizer(files.read_bytes(where), where)
    if where.endswith(".json"):
        folder, _, name = where.rpartition("/")
        if name == "tokenizer.json" and files.exists(files.join(folder or ".", "tokenizer_config.json")):
            return HuggingFaceTokenizer(read_folder(folder or "."), where)
        return HuggingFaceTokenizer({"tokenizer.json": files.read_bytes(where)}, where)
    found = read_folder(where)
    models = [name for name in found if name.endswith(".model")]
    if found.keys() & {"tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"}:
        return HuggingFaceTokenizer(found, where)
    if len(models) == 1:
        return SentencePieceTokenizer(found[models[0]], files.join(where, models[0]))
    listed = ", ".join(sorted(found)) or "nothing of the kind"
    raise CorpusFileError(
        f"{where}: expected a SentencePiece .model, a tokenizer.json, or a directory with one; it has {listed}."
    )
