"""What kind of tokenizer a file is, decided by its content."""

from __future__ import annotations

import re

from grain_sft.prepare.tokenizers import sentencepiece_proto as proto

SENTENCEPIECE, HUGGINGFACE, TIKTOKEN = "sentencepiece", "huggingface", "tiktoken"

EXPECTED = "a SentencePiece model, a tokenizer.json or a tiktoken file"

_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")

_SEEMS = (
    (re.compile(rb"\s*\Z"), "an empty file. Download it again."),
    (
        re.compile(rb"version https://git-lfs"),
        "a pointer of Git LFS, not the file itself. Run `git lfs pull` where it came from.",
    ),
    (re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ"), "a compressed file. Decompress it."),
    (re.compile(rb"PK\x03\x04"), "a ZIP archive. Unpack it, or give a tokenizer's file."),
    (re.compile(rb"\s*<(?:!DOCTYPE|html)", re.IGNORECASE), "an HTML page. Download the file itself."),
    (re.compile(rb"#version"), "the merges of a BPE tokenizer. Give its directory, or its tokenizer.json."),
    (re.compile(rb"\x93NUMPY"), "a NumPy array. Give a tokenizer's file."),
    (re.compile(rb"\s*\["), "a list in JSON. Give the tokenizer.json or the directory that has it."),
)


def recognize(content: bytes) -> tuple[str | None, str]:
    """Return the kind of a tokenizer's file, or None and what the file seems to be, with the way out."""
    if content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        return _of_json(content)
    if _RANK.match(content + b"\n"):
        return TIKTOKEN, ""
    for pattern, seems in _SEEMS:
        if pattern.match(content):
            return None, seems
    if proto.begins_model(content):
        return SENTENCEPIECE, ""
    return None, "a file of another kind, or a damaged one. Give the file of a tokenizer, or download it again."


def _of_json(content: bytes) -> tuple[str | None, str]:
    if b'"model"' in content and (b'"added_tokens"' in content or b'"vocab"' in content or b'"merges"' in content):
        return HUGGINGFACE, ""
    if b'"tokenizer_class"' in content or b'"chat_template"' in content:
        return None, "a tokenizer_config.json. Give the directory that it is in."
    if b'"model_type"' in content or b'"architectures"' in content:
        return None, "the config.json of a model. Give the tokenizer.json, or the directory."
    if re.match(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*[0-9]+\s*[,}]', content):
        return None, "a vocabulary (vocab.json). Give the directory that it is in, or a tokenizer.json."
    return None, "JSON without the keys of a tokenizer.json ('model', 'added_tokens'). Give the tokenizer.json."
