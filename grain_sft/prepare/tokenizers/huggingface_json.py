"""tokenizer.json of huggingface/tokenizers: copies of a tokenizer that differ in one respect."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

GUARD = "\0"
"""Character around a renamed token. No text has it: records with NUL are refused."""


def renamed(spelling: str) -> str:
    """Return the spelling of a special token in `plain_json`'s tokenizer."""
    return f"{GUARD}{spelling}{GUARD}"


def exact_json(serialized: str) -> str:
    """Return the tokenizer without truncation, padding and post-processing.

    A post-processor adds tokens that are not wanted here, and may trim the space off a token's offsets.
    """
    content = json.loads(serialized)
    for key in ("truncation", "padding", "post_processor"):
        content[key] = None
    return json.dumps(content, ensure_ascii=False)


def plain_json(serialized: str, special: Collection[str]) -> str:
    """Return the tokenizer, ids unchanged, with another spelling of its special tokens.

    Then every text becomes ordinary tokens, and a rendered chat can still name the special tokens that it means.
    """
    content = json.loads(serialized)
    for token in content.get("added_tokens", []):
        if token["content"] in special:
            token["content"] = renamed(token["content"])
            token["normalized"] = False
            token["single_word"] = False
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {_rename(piece, special): number for piece, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: (piece, score)
        model["vocab"] = [[_rename(piece, special), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = _rename(model["unk_token"], special)
    if isinstance(model.get("merges"), list):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, special)]
    return json.dumps(content, ensure_ascii=False)


def _rename(piece: str, special: Collection[str]) -> str:
    return renamed(piece) if piece in special else piece


def _makes(merge: Any, special: Collection[str]) -> bool:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return "".join(parts) in special or any(part in special for part in parts)
