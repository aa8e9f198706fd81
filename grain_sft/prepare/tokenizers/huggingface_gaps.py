"""Errors for characters that have no token in a `tokenizer.json`.

A BPE model may declare no `unk_token`. Then the library `tokenizers` leaves out each character that has no token, and a run
would train on text with gaps. If a model declares an `unk_token` that is not in its vocabulary, the library raises an error
instead. So `refuse` declares an `unk_token` that no vocabulary has.
"""

import json
from collections.abc import Collection
from typing import Any

from grain_sft.errors import RecordError, shortened

_ABSENT = "\0absent\0"  # an unknown token that no vocabulary has


def refuse(content: dict[str, Any], all_bytes: Collection[str]) -> bool:
    """Change a tokenizer so that it refuses characters without a token. Return False if it needs no change.

    A byte-level model needs no change if its vocabulary has all 256 bytes, because it can encode any text. But a
    model that puts a prefix or suffix on subwords is changed: it looks up some bytes as "##x" or "x</w>", which the vocabulary
    may lack.

    Args:
      content: Parsed tokenizer.json, which is changed in place.
      all_bytes: Characters that spell the 256 bytes in a byte-level vocabulary.
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
    """Return the error for a text that a `tokenizers.Tokenizer` could not encode because of `error`."""
    where = shortened(repr(text))
    failure = f"encode {where} ({error})"
    if _ABSENT in str(error):
        character = next((char for char in dict.fromkeys(text) if _fails(tokenizer, char)), None)
        if character is not None:
            failure = f"encode the character {character!r} in {where}"
    return RecordError(
        f"the tokenizer can't {failure}. Remove it, or take a tokenizer with a token for unknown characters or for every byte."
    )


def _fails(tokenizer: Any, text: str) -> bool:
    """Return whether a text can't be encoded."""
    try:
        tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # tokenizers raises bare Exceptions
        return True
    return False
