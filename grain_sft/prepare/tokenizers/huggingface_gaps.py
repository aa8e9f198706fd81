"""Errors for characters that have no token in a `tokenizer.json`.

If a BPE model declares no `unk_token`, the library leaves out characters without a token. If the declared `unk_token` is not in
the vocabulary, the library raises an error. So `refuse` declares an `unk_token` that is not in the vocabulary.
"""

import json
from collections.abc import Collection
from typing import Any

from grain_sft.errors import RecordError, shortened

_ABSENT = "\0absent\0"  # an unknown token that no vocabulary has


def refuse(content: dict[str, Any], all_bytes: Collection[str]) -> bool:
    """Change a parsed tokenizer.json, so that its tokenizer refuses characters without a token. Return whether it was changed.

    A byte-level model with tokens for `all_bytes`, the characters of the 256 bytes, can encode any text, so it stays unchanged.
    A model with a prefix or suffix of subwords looks up "##x" or "x</w>" for a byte, and may lack this token.
    """
    model = content["model"]
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    if model["type"] != "BPE" or model.get("unk_token") is not None:
        return False
    has_affix = bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    if '"ByteLevel"' in steps and not has_affix and model["vocab"].keys() >= set(all_bytes):
        return False
    model["unk_token"] = _ABSENT
    return True


def refusal(tokenizer: Any, text: str, error: Exception) -> RecordError:
    """Return the error for a text that a `tokenizers.Tokenizer` could not encode."""
    where = shortened(repr(text))
    failure = f"encode {where} ({error})"
    if _ABSENT in str(error):
        character = next((char for char in dict.fromkeys(text) if _fails(tokenizer, char)), None)
        if character is not None:
            failure = f"encode the character {character!r} in {where}"
    return RecordError(f"the tokenizer can't {failure}. Remove it, or use a tokenizer with a token for unknown characters.")


def _fails(tokenizer: Any, text: str) -> bool:
    try:
        tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # tokenizers raises bare Exceptions
        return True
    return False
