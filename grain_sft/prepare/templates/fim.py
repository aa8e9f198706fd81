"""Fill-in-the-middle: documents whose middle moves to their end.

Source: `GPTFIMDataset` of NVIDIA/Megatron-LM (megatron/training/datasets/fim_dataset.py).
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from grain_sft.errors import PrepareError
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.template import Piece
from grain_sft.prepare.tokenizers import Tokenizer

_SPELLINGS = (
    *(tuple(form.format(part) for part in ("prefix", "middle", "suffix")) for form in ("<|fim_{}|>", "<fim_{}>")),
    *(tuple(form.format(part) for part in ("prefix", "middle", "suffix")) for form in ("<fim-{}>", "<|code_{}|>")),
    *(tuple(form.format(part) for part in ("PRE", "MID", "SUF")) for form in ("<{}>", "\u2581<{}>")),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),  # DeepSeek
)
"""Spellings of the prefix, middle and suffix tokens in tokenizers that have them."""

Draws = Sequence[int]
"""Four numbers in [0, 2**64): whether a text is chosen, whether its suffix comes first, and its two cuts."""


class FillInTheMiddle:
    """The choice, the cuts and the order of each document's pieces.

    Attributes:
      ids: Ids of the prefix, middle and suffix tokens.

    Args:
      tokenizer: Tokenizer with the three tokens and the split token.
      options: Options whose names begin with "fim", and the seed.

    Raises:
      PrepareError: The tokenizer lacks a token, or one of two options is missing that need each other.
    """

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        self.ids = _token_ids(tokenizer, options.fim_tokens)
        self._options = options
        self._split = options.fim_split_sample
        if (self._split is None) != (options.fim_fragment_rate is None):
            raise PrepareError("fim_split_sample and fim_fragment_rate: one without the other. Give both or neither.")
        if self._split is not None:
            if self._split not in tokenizer.special_tokens:
                raise PrepareError(
                    f"fim_split_sample: {self._split!r} is not a special token of the tokenizer. Name one of: "
                    f"{' '.join(tokenizer.special_tokens)}."
                )
            self._split_piece: Piece = _piece(tokenizer.special_tokens[self._split])

    def pieces(self, text: str) -> list[Piece]:
        """Return the pieces of a text, by draws that depend on the text and the seed alone."""
        return self.drawn(text, _draws(text, self._options.seed))

    def drawn(self, text: str, draws: Iterator[Draws]) -> list[Piece]:
        """Return the pieces of a text, with `draws` for the text and then for each of its fragments.

        As in Megatron-LM, a chosen text of several fragments loses its empty fragments, except the last, with the split
        tokens that follow them.
        """
        fragments = [text] if self._split is None else text.split(self._split)
        if len(fragments) == 1:
            return self._permuted(text, next(draws), self._options.fim_rate) if text else [(text, 1.0)]
        chosen = next(draws)[0] < self._options.fim_rate * 2**64
        found: list[Piece] = []
        for number, fragment in enumerate(fragments):
            last = number == len(fragments) - 1
            if not chosen:
                found.append((fragment, 1.0))
            elif fragment or last:
                found += self._permuted(fragment, next(draws), self._options.fim_fragment_rate or 0.0)
            if not last and (fragment or not chosen):
                found.append(self._split_piece)
        return found

    def _permuted(self, text: str, draws: Draws, rate: float) -> list[Piece]:
        """Return the pieces of a text or fragment: whole, or with its middle at the end."""
        without = self._options.fim_no_prefix
        if draws[0] >= rate * 2**64 or (without is not None and text.startswith(without)):
            return [(text, 1.0)]
        first, second = sorted(draw % (len(text) + 1) for draw in draws[2:])
        prefix, middle, suffix = ((part, 1.0) for part in (text[:first], text[first:second], text[second:]))
        to_prefix, to_middle, to_suffix = map(_piece, self.ids)
        if draws[1] < self._options.fim_spm_rate * 2**64:
            return [to_prefix, to_suffix, suffix, to_middle, prefix, middle]  # SPM
        return [to_prefix, prefix, to_suffix, suffix, to_middle, middle]  # PSM


def _draws(text: str, seed: int) -> Iterator[Draws]:
    """Yield the draws of a text, then those of its fragments, without end."""
    digest = hashlib.blake2b(b"%d:%b" % (seed, text.encode()), digest_size=32).digest()
    yield np.frombuffer(digest, "<u8").tolist()
    for number in itertools.count():
        yield np.frombuffer(hashlib.blake2b(b"%d" % number, digest_size=32, key=digest).digest(), "<u8").tolist()


def _piece(number: int) -> Piece:
    ids: npt.NDArray[np.uint32] = np.array([number], np.uint32)
    return ids, 1.0


def _token_ids(tokenizer: Tokenizer, names: Sequence[str] | None) -> list[int]:
    """Return the ids of the prefix, middle and suffix tokens: those named, or the tokenizer's own."""
    special = tokenizer.special_tokens
    named = names or next((spellings for spellings in _SPELLINGS if special.keys() >= set(spellings)), ())
    if len(named) != 3:
        raise PrepareError(
            f"fim_tokens: {len(named)} tokens; expected three, of prefix, middle and suffix. Name special tokens of the "
            "tokenizer, or give their ids: --fim-tokens PREFIX MIDDLE SUFFIX."
        )
    ids = [special.get(token, int(token) if token.isdecimal() else -1) for token in named]
    for token, number in zip(named, ids, strict=True):
        if not 0 <= number < tokenizer.vocab_size or ids.count(number) > 1:
            raise PrepareError(
                f"fim_tokens: {token!r} is not a special token of the tokenizer or an id below "
                f"{tokenizer.vocab_size} of its own. Name three different ones."
            )
    return ids
