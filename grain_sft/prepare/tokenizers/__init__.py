"""SentencePiece, Hugging Face and tiktoken tokenizers."""

import glob
import os
import re
from collections.abc import Mapping

from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.prepare.tokenizers import sentencepiece_model, tiktoken_file
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer
from grain_sft.prepare.tokenizers.sentencepiece_model import SentencePieceTokenizer
from grain_sft.prepare.tokenizers.tiktoken_file import TiktokenTokenizer
from grain_sft.prepare.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer
from grain_sft.storage import file_stamp, files

__all__ = ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer", "Tokenizer", "load_tokenizer"]

# a tokenizer.json next to one of these files is read with the other files of its folder
_SIDECARS = ("tokenizer_config.json", CHAT_TEMPLATE)
# a folder with one of these files holds a Hugging Face tokenizer
_HUGGINGFACE_FOLDER = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"}
_HUGGINGFACE_NAMES = _HUGGINGFACE_FOLDER | {  # files that are read from such a folder
    *("special_tokens_map.json", "added_tokens.json", "config.json", CHAT_TEMPLATE, "chat_template.json", "merges.txt")
}
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")  # line of a tiktoken file
_JSON = rb"(?:\xef\xbb\xbf)?\s*\{"  # beginning of a JSON object, perhaps after a byte order mark
_MISTAKES = (
    (rb"\s*\Z", "an empty file. Download it again."),
    (file_stamp.LFS_POINTER, "a pointer of Git LFS. Run `git lfs pull` where it came from."),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ|PK\x03\x04", "a compressed file. Decompress it, or unpack the archive."),
    (rb"(?i:\s*<(?:!DOCTYPE|html))", "an HTML page. Download the file itself."),
    (rb"#version", "the merges of a BPE tokenizer. Give its directory, or its tokenizer.json."),
    (rb"\s*\[|" + _JSON, "JSON without 'model' and 'added_tokens'. Give the tokenizer.json, or its directory."),
    (b"", "a file of another kind, or a damaged one. Give the file of a tokenizer, or download it again."),
)
"""Files that users give by mistake: pattern of the first bytes, and end of the error message. The first match counts."""


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer at `path`, a local or remote file or directory.

    The content of a file, not its name, decides its kind. A `tokenizer.json` is read with the other files of its directory if
    one of them is `tokenizer_config.json` or `chat_template.jinja`. A directory holds the files of a Hugging Face tokenizer, or
    one SentencePiece model or tiktoken file, perhaps with a `chat_template.jinja`.

    Raises:
      CorpusFileError: The path does not exist or can't be read, or the directory has no tokenizer or several tokenizers.
      CorpusError: The file is not a tokenizer.
      MissingExtraError: The tokenizer needs the extra `hf` or `tiktoken`.
    """
    where = files.normalize(path).rstrip("/")
    if not files.exists(where):
        fix = "If it is a name on Hugging Face, run `hf download NAME --local-dir FOLDER`, and give the folder"
        raise CorpusFileError(f"{where}: no such file, and no such directory. {fix}.")
    if not files.is_folder(where):
        return _load_file(where, {})
    names = _names_in(where)
    if _HUGGINGFACE_FOLDER & set(names):
        return HuggingFaceTokenizer(_read_folder(where), where)
    # names such as a.model, a.tiktoken and tokenizer.bin, but not tokenizer.tiktoken.json, which is a sidecar
    is_candidate = re.compile(r".*\.(model|tiktoken)|tokenizer\..*(?<!\.json)").fullmatch
    candidates = [name for name in names if is_candidate(name) and not files.is_folder(files.join(where, name))]
    if len(candidates) == 1:
        templates = {name: files.read_bytes(files.join(where, name)) for name in names if name == CHAT_TEMPLATE}
        return _load_file(files.join(where, candidates[0]), templates)
    if candidates:
        raise CorpusFileError(f"{where}: has {', '.join(candidates)}. Give the path of one of them.")
    problem = f"{where}: expected a SentencePiece .model, a tokenizer.json, or another tokenizer"
    found = ", ".join(names)[:200] or "nothing"
    raise CorpusFileError(f"{problem}; found {found}. Give the path of the tokenizer's file.")


def _load_file(where: str, templates: Mapping[str, bytes]) -> Tokenizer:
    """Load a tokenizer file. `templates` is {} or {CHAT_TEMPLATE: content of this file}."""
    content = files.read_bytes(where)
    has_vocabulary = any(key in content for key in (b'"added_tokens"', b'"vocab"', b'"merges"'))
    if re.match(_JSON, content) and re.search(rb'"model"\s*:\s*\{', content) and has_vocabulary:
        folder = files.parent(where)
        has_sidecar = any(files.exists(files.join(folder, name)) for name in _SIDECARS)
        if files.name_of(where) == "tokenizer.json" and has_sidecar:
            return HuggingFaceTokenizer(_read_folder(folder), where)
        return HuggingFaceTokenizer({"tokenizer.json": content}, where)
    if _RANK_LINE.match(content + b"\n"):  # the only line of a file may have no newline
        sidecar = f"{where}.json"
        settings = {tiktoken_file.SIDECAR: files.read_bytes(sidecar)} if files.exists(sidecar) else {}
        return TiktokenTokenizer({tiktoken_file.FILE: content, **settings, **templates}, where)
    if sentencepiece_model.BEGINS.match(content):
        return SentencePieceTokenizer({sentencepiece_model.FILE: content, **templates}, where)
    mistake = next(text for pattern, text in _MISTAKES if re.match(pattern, content, re.DOTALL))
    raise CorpusError(f"{where}: expected a SentencePiece model, a tokenizer.json or a tiktoken file, found {mistake}")


def _names_in(folder: str, pattern: str = "*") -> list[str]:
    return [files.name_of(path) for path in files.glob(files.join(glob.escape(folder), pattern))]


def _read_folder(folder: str) -> dict[str, bytes]:
    """Return the content of the files of a Hugging Face tokenizer in `folder`, by name."""
    names = [name for name in _names_in(folder) if name in _HUGGINGFACE_NAMES or name.endswith(".model")]
    subfolder = "additional_chat_templates"
    names += [f"{subfolder}/{name}" for name in _names_in(files.join(folder, subfolder), "*.jinja")]
    return {name: files.read_bytes(path) for name in names if not files.is_folder(path := files.join(folder, name))}
