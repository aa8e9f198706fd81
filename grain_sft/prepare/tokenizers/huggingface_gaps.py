"""Characters for which a `tokenizer.json` has no token.

A BPE model without an unknown token leaves them out of the ids, as transformers does, and trains on text with gaps. With an
unknown token that is not in the vocabulary, the library raises an error instead, as its other models do.
"""

import json
from collections.abc import Collection
from typing import Any

from grain_sft.errors import RecordError, shortened

_ABSENT = "\0absent\0"  # no vocabulary has it, because no text does


def refuse(content: dict[str, Any], all_bytes: Collection[str]) -> bool:
    """Change a parsed tokenizer.json in place so that a character without a token is an error; return whether it changed.

    Args:
      content: Parsed tokenizer.json.
      all_bytes: The characters that spell bytes in a byte-level vocabulary. With all of them it has a token for any text.
    """
    model, steps = content["model"], json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    if model["type"] != "BPE" or model.get("unk_token") is not None:
        return False
    if '"ByteLevel"' in steps and model["vocab"].keys() >= set(all_bytes):
        return False
    model["unk_token"] = _ABSENT
    return True


def refusal(tokenizer: Any, text: str, error: Exception) -> RecordError:
    """Return the error of a text for which `encode` of a `tokenizers.Tokenizer` raised `error`."""
    where, character = shortened(repr(text)), None
    if _ABSENT in str(error):
        character = next((each for each in dict.fromkeys(text) if _fails(tokenizer, each)), None)
    found = f"encode {where} ({error})" if character is None else f"encode the character {character!r} in {where}"
    return RecordError(
        f"the tokenizer can't {found}. Remove it, or take a tokenizer with a token for unknown characters or for every byte."
    )


def _fails(tokenizer: Any, text: str) -> bool:
    try:
        tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # tokenizers raises bare Exceptions
        return True
    return False
