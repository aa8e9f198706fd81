"""Places where a long text can be cut so that a `tokenizer.json` encodes it to the same ids.

The tokenizers library keeps about 400 bytes for each token until the whole text is encoded: 1 GB for a text of 10 MB. So a long
text is cut between a letter and the space after it, and between a Han character and the Chinese comma or full stop after it.
Because the library encodes each word alone, the pieces have the ids of the whole text under these conditions, which `cuts_of`
checks:

- Each normalizer depends only on a character and its combining marks. No normalizer strips or adds spaces.
- The pre-tokenizer splits the uncut text at each cut. Its patterns consist of `_ALTERNATIVES`. No alternative matches both the
  letter before a cut and the space or stop after it. No alternative has a lookbehind. Only alternatives for spaces have a
  lookahead. At least one pattern matches all spaces, and also all Han letters, all stops, or both. So a match begins or ends
  at each cut. No step before this pattern turns spaces into letters.
- The pre-tokenizer adds nothing at the cut. With `add_prefix_space`, texts are cut only before spaces.
- No added token contains a letter and then a space or stop. None ends in a letter and takes the spaces after it (`rstrip`).
  None begins with a space or stop and is found only where no letter comes before it (`single_word`).

Source: huggingface/tokenizers, `TokenizerImpl::encode`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

CUT_CHARACTERS = 1 << 18  # minimum number of characters of a piece; the last piece may be shorter

# Latin, Cyrillic, kana, Han and Hangul: letters in every version of Unicode and after every normalization
_LETTERS = "A-Za-z\u0430-\u044f\u0410-\u042f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_BEFORE_SPACE = re.compile(f"[{_LETTERS}](?= )")
_BEFORE_SPACE_OR_STOP = re.compile(f"[{_LETTERS}](?= )|[\u4e00-\u9fa5](?=[\u3002\u3001\uff0c])")
_SPANS_CUT = re.compile(f"[{_LETTERS}][\\s\u3002\u3001\uff0c]")  # a cut could divide an added token that matches

# two classes in the pattern of GPT-4o: all letters but small letters, and all letters but capitals, with combining marks
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ALTERNATIVES = (
    *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}{first}{_CASED[1]}{second}{short}"
      for first, second in (("*", "+"), ("+", "*")) for short in ("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")),
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
)  # fmt: skip
"""Alternatives of the patterns of GPT-2, GPT-4, GPT-4o, Llama 3, OLMo 2, Qwen and DeepSeek."""
_ANY = f"(?:{'|'.join(map(re.escape, _ALTERNATIVES))})"  # matches the source of one alternative
_KNOWN = re.compile(rf"{_ANY}(?:\|{_ANY})*")
# A pattern with "\p{L" that ends in "\s+" matches all spaces, and also all Han letters, all stops, or both.
_MATCHES_CUTS = re.compile(r"\\p\{L.*\\s\+$")


def cuts_of(content: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern whose matches end where a text may be cut. Return None if a cut could change the ids.

    `content` is the parsed result of the library's `to_str`, because the user's own tokenizer.json may lack keys.
    """
    steps = list(_flat(content.get("pre_tokenizer"), "pretokenizers"))
    normalizers = [step["type"] for step in _flat(content.get("normalizer"), "normalizers")]
    if not {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}.issuperset(normalizers):
        return None
    for token in content.get("added_tokens", ()):
        text = token["content"]
        # a token with `single_word` is found only where no letter comes before it, so a cut after a letter could add a match
        in_text = f"a{text}" if token["single_word"] else text
        if _SPANS_CUT.search(in_text) or (token["rstrip"] and re.search(f"[{_LETTERS}]$", text)):
            return None
        # normalization may turn a no-break space of the token into a space
        if normalizers and token["normalized"] and not text.isascii():
            return None
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"]:  # unless `split` is False, this step splits the text before each space
        return _BEFORE_SPACE if steps[0].get("split", True) else None
    # with `use_regex`, ByteLevel splits by the pattern of GPT-2
    splits = [step.get("use_regex") or _MATCHES_CUTS.search(step.get("pattern", {}).get("Regex", "")) for step in steps]
    # ByteLevel turns a space into "\u0120", a letter, so no step may follow it
    if not any(splits) or "ByteLevel" in kinds[:-1] or not all(map(_keeps_words, steps)):
        return None
    return _BEFORE_SPACE if any(step.get("add_prefix_space") for step in steps) else _BEFORE_SPACE_OR_STOP


def pieces(text: str, cuts: re.Pattern[str] | None) -> Iterator[str]:
    """Yield consecutive pieces of a text, each of at least `CUT_CHARACTERS` characters except the last."""
    start = 0
    while cuts and (cut := cuts.search(text, start + CUT_CHARACTERS)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _flat(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer. A sequence has them under the key `parts`."""
    if step is not None and step["type"] == "Sequence":
        for inner_step in step[parts]:
            yield from _flat(inner_step, parts)
    elif step is not None:
        yield step


def _keeps_words(step: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits a word in the same way in a piece and in the whole text."""
    if step["type"] == "Split":
        is_known = _KNOWN.fullmatch(step["pattern"].get("Regex", "")) is not None
        return step["behavior"] in ("Isolated", "Removed") and is_known
    return step["type"] in ("ByteLevel", "Digits")
