"""Tokenizers: SentencePiece models, those of Hugging Face, and tiktoken files, local or remote, told apart by content."""

from __future__ import annotations

import os

from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer, list_folder, read_folder
from grain_sft.prepare.tokenizers.recognize import EXPECTED, HUGGINGFACE, SENTENCEPIECE, TIKTOKEN, recognize
from grain_sft.prepare.tokenizers.sentencepiece_model import SentencePieceTokenizer
from grain_sft.prepare.tokenizers.tiktoken_file import TiktokenTokenizer
from grain_sft.prepare.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer
from grain_sft.storage import files

__all__ = ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer", "Tokenizer", "load_tokenizer"]

_BESIDE_JSON = ("tokenizer_config.json", CHAT_TEMPLATE)
_HUGGINGFACE_FOLDER = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"}


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer at `path`, a local or remote file or directory.

    A file is a SentencePiece model, a `tokenizer.json` or a tiktoken file, under any name: its content decides. A
    `tokenizer.json` with a `tokenizer_config.json` or a `chat_template.jinja` beside it is read as their directory is.
    A directory with the files of Hugging Face is theirs, another one has one SentencePiece model or tiktoken file, and
    `chat_template.jinja` where there is a template.

    Raises:
      CorpusFileError: there is no such file, or it can't be read.
      CorpusError: it is not a tokenizer.
      MissingExtraError: it needs the extra `hf` or `tiktoken`.
    """
    where = files.normalize(path).rstrip("/")
    if not _is_folder(where):
        return _of_file(where, None)
    names = list_folder(where)
    template = files.read_text(files.join(where, CHAT_TEMPLATE)).encode() if CHAT_TEMPLATE in names else None
    if _HUGGINGFACE_FOLDER & set(names):
        return HuggingFaceTokenizer(read_folder(where), where)
    candidates = [
        name
        for name in names
        if name.endswith((".model", ".tiktoken")) or (name.startswith("tokenizer.") and not name.endswith(".json"))
    ]
    if len(candidates) == 1:
        return _of_file(files.join(where, candidates[0]), template)
    if candidates:
        raise CorpusFileError(f"{where}: has {', '.join(candidates)}. Give the path of one of them.")
    listed = ", ".join(name for name in names if "/" not in name) or "nothing"
    raise CorpusFileError(
        f"{where}: expected a SentencePiece .model, a tokenizer.json, or another tokenizer in this directory; found "
        f"{listed[:200]}. Give the path of the tokenizer's file."
    )


def _of_file(where: str, template: bytes | None) -> Tokenizer:
    """The tokenizer in a file; `template` is the chat template of its directory, where that was asked for."""
    content = files.read_bytes(where)
    kind, found = recognize(content)
    if kind == SENTENCEPIECE:
        return SentencePieceTokenizer(content, where, template)
    if kind == TIKTOKEN:
        sidecar = f"{where}.json"
        return TiktokenTokenizer(content, where, files.read_bytes(sidecar) if files.exists(sidecar) else None, template)
    if kind == HUGGINGFACE:
        folder = files.parent(where)
        beside = [name for name in _BESIDE_JSON if files.exists(files.join(folder, name))]
        if files.name_of(where) == "tokenizer.json" and beside:
            return HuggingFaceTokenizer(read_folder(folder), where)
        return HuggingFaceTokenizer({"tokenizer.json": content}, where)
    raise CorpusError(f"{where}: expected {EXPECTED}, found {found}")


def _is_folder(where: str) -> bool:
    """Whether a path is a directory.

    Raises:
      CorpusFileError: a local path does not exist.
    """
    if files.is_remote(where):
        return not files.is_file(where)
    if not os.path.lexists(where):
        raise CorpusFileError(
            f"{where}: no such file, and no such directory. Expected a local or gs:// path. If it is a name on Hugging "
            f"Face, download the tokenizer first, as with `hf download NAME --local-dir FOLDER`, and give the folder."
        )
    return os.path.isdir(where)
