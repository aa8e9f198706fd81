"""Fill-in-the-middle: moves the middle of some documents to their end, so that a model learns to fill a gap.

"abcdef", cut after "b" and "d", becomes PREFIX "ab" SUFFIX "ef" MIDDLE "cd".
Source: `GPTFIMDataset` of NVIDIA/Megatron-LM (megatron/training/datasets/fim_dataset.py).
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from grain_sft.errors import PrepareError
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.template import Piece
from grain_sft.prepare.tokenizers import Tokenizer

_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
    ("<PRE>", "<MID>", "<SUF>"),
    ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),  # DeepSeek
)
"""Spellings of the prefix, middle and suffix tokens in well-known tokenizers."""

Draws = Sequence[int]
"""Four random numbers in [0, 2**64). They decide whether a text is changed, whether the suffix comes first, and both cuts."""


class FillInTheMiddle:
    """Fill-in-the-middle of documents, by the options `seed` and `fim_…`.

    Attributes:
      ids: Ids of the prefix, middle and suffix tokens.

    Raises:
      PrepareError: The tokenizer lacks a token, or only one of fim_split_sample and fim_fragment_rate is given.
    """

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        self.ids = _token_ids(tokenizer, options.fim_tokens)
        self._options = options
        self._split = options.fim_split_sample
        if (self._split is None) != (options.fim_fragment_rate is None):
            raise PrepareError("fim_split_sample and fim_fragment_rate: only one is given. Give both or neither.")
        if self._split is not None:
            if self._split not in tokenizer.special_tokens:
                problem = f"fim_split_sample: {self._split!r} is not a special token of the tokenizer"
                raise PrepareError(f"{problem}. Name one of: {' '.join(tokenizer.special_tokens)}.")
            self._split_piece: Piece = ([tokenizer.special_tokens[self._split]], 1.0)

    def pieces(self, text: str) -> list[Piece]:
        """Return the parts of a text and the special tokens between them. The same text and options make the same pieces."""
        return self.pieces_by_draws(text, _draws(text, self._options.seed))

    def pieces_by_draws(self, text: str, draws: Iterator[Draws]) -> list[Piece]:
        """Return the pieces of a text. `draws` yields the draws of the text, then those of its fragments.

        Split tokens divide a text into fragments: "a<S><S>b<S>" has the fragments "a", "", "b" and "". As in Megatron-LM, a
        changed text loses its empty fragments, except the last. The example becomes "a<S>b<S>". Lost fragments have no draws.
        """
        fragments = [text] if self._split is None else text.split(self._split)
        if len(fragments) == 1:
            # an empty text has no middle to move
            return self._permuted(text, next(draws), self._options.fim_rate) if text else [(text, 1.0)]
        # the draws of a text of several fragments decide only whether its fragments may change
        if next(draws)[0] < self._options.fim_rate * 2**64:
            kept = [*filter(None, fragments[:-1]), fragments[-1]]
            rate = self._options.fim_fragment_rate or 0.0
            parts = [self._permuted(fragment, next(draws), rate) for fragment in kept]
        else:
            parts = [[(fragment, 1.0)] for fragment in fragments]
        pieces = [piece for part in parts for piece in (*part, self._split_piece)]
        return pieces[:-1]  # without the split token after the last part

    def _permuted(self, text: str, draws: Draws, rate: float) -> list[Piece]:
        """Return the pieces of a text or a fragment. `rate` is the probability that the middle moves to the end."""
        change, suffix_first, *cuts = draws
        no_prefix = self._options.fim_no_prefix
        if change >= rate * 2**64 or (no_prefix is not None and text.startswith(no_prefix)):
            return [(text, 1.0)]
        first, second = sorted(cut % (len(text) + 1) for cut in cuts)
        prefix, middle, suffix = ((part, 1.0) for part in (text[:first], text[first:second], text[second:]))
        prefix_token, middle_token, suffix_token = (([number], 1.0) for number in self.ids)
        if suffix_first < self._options.fim_spm_rate * 2**64:
            # As in Megatron-LM: "abcdef", cut after "b" and "d", becomes PREFIX SUFFIX "ef" MIDDLE "ab" "cd".
            return [prefix_token, suffix_token, suffix, middle_token, prefix, middle]
        return [prefix_token, prefix, suffix_token, suffix, middle_token, middle]


def _draws(text: str, seed: int) -> Iterator[Draws]:
    """Yield the draws of a text, then those of its fragments, without end."""
    digest = hashlib.blake2b(b"%d:%b" % (seed, text.encode()), digest_size=32).digest()
    yield np.frombuffer(digest, "<u8").tolist()
    for number in itertools.count():
        yield np.frombuffer(hashlib.blake2b(b"%d" % number, digest_size=32, key=digest).digest(), "<u8").tolist()


def _token_ids(tokenizer: Tokenizer, names: Sequence[str] | None) -> list[int]:
    """Return the ids of three tokens, from their spellings or ids in `names`.

    Without `names`, return those of the first entry of `_SPELLINGS` whose tokens the tokenizer has.
    """
    special = tokenizer.special_tokens
    named = names or next((spellings for spellings in _SPELLINGS if special.keys() >= set(spellings)), ())
    if len(named) != 3:
        raise PrepareError(f"fim_tokens: {len(named)} tokens; expected three. Give --fim-tokens PREFIX MIDDLE SUFFIX.")
    ids = [special.get(token, int(token) if token.isdecimal() else -1) for token in named]
    for token, number in zip(named, ids, strict=True):
        if not 0 <= number < tokenizer.vocab_size or ids.count(number) > 1:
            expected = f"three different tokens: special tokens of the tokenizer, or ids below {tokenizer.vocab_size}"
            raise PrepareError(f"fim_tokens: {token!r}; expected {expected}. Name others.")
    return ids
