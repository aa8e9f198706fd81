"""text: plain documents, as for pretraining. Every token takes loss."""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import PrepareError
from grain_sft.prepare.records.messages import DOCUMENT, Conversation
from grain_sft.prepare.templates.template import Piece, PiecesTemplate, Rendered, Result, TemplateOptions, result_of
from grain_sft.prepare.tokenizers import Tokenizer

_FIM_TOKENS = (
    *(tuple(form.format(part) for part in ("prefix", "middle", "suffix")) for form in ("<|fim_{}|>", "<fim_{}>")),
    *(tuple(form.format(part) for part in ("prefix", "middle", "suffix")) for form in ("<fim-{}>", "<|code_{}|>")),
    *(tuple(form.format(part) for part in ("PRE", "MID", "SUF")) for form in ("<{}>", "\u2581<{}>")),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),  # DeepSeek
)
"""Spellings of the prefix, middle and suffix tokens in tokenizers that have them."""


class Text(PiecesTemplate):
    """A document's text between the BOS and EOS that the options ask for, perhaps with its middle moved to the end."""

    name = "text"
    roles = (DOCUMENT,)
    options = ("bos", "eos", "empty", "normalize", "fim_rate", "fim_spm_rate", "fim_tokens")
    masked = False

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        self._before = self._asked("begin with BOS", tokenizer.bos_token_id) if options.bos else []
        self._after = self._asked("end in EOS", tokenizer.eos_token_id) if options.eos else []
        if options.empty == "keep" and not (self._before or self._after):
            raise PrepareError("empty=keep: a document without text has no token without BOS and EOS. Ask for one.")
        self._fim = self._fim_ids() if options.fim_rate else []
        if options.fim_spm_rate and not options.fim_rate:
            raise PrepareError("fim_spm_rate is a share of the documents that fim_rate chooses. Give fim_rate, too.")
        self._never = np.zeros(tokenizer.vocab_size, np.bool_)
        self._never[[*(number for number in tokenizer.control_ids if number < tokenizer.vocab_size), *self._fim]] = True

    def check(self, conversation: Conversation) -> None:
        if conversation.messages[0].role != DOCUMENT:
            super().check(conversation)  # names the template to give instead
        if self.special is not None:
            self.special.check(conversation.messages[0].content, "text")

    def pieces(self, conversation: Conversation) -> list[Piece]:
        text, form = conversation.messages[0].content, self.chosen.normalize
        if form is not None and not unicodedata.is_normalized(form, text):
            text = unicodedata.normalize(form, text)
            if self.special is not None:
                self.special.check(text, f"text, after {form}")
        return [*self._before, *self._permuted(text), *self._after]

    def encode(self, texts: Sequence[str]) -> Sequence[Any]:
        return self.tokenizer.encode_arrays(texts)

    def documents(self, pieces: list[list[Piece]], ids: list[list[Any]]) -> list[Result]:
        """See `PiecesTemplate.documents`. All documents are slices of one array, which is searched for control tokens once."""
        values = [value for each in pieces for value, _ in each]
        parts = list(itertools.chain.from_iterable(ids))
        sizes = [len(part) for part in parts]
        tokens = np.concatenate([np.empty(0, np.uint32), *parts])
        loss = np.ones(len(tokens), np.bool_)
        controls = np.flatnonzero(self._never.take(tokens))
        refused = {
            part
            for part in np.searchsorted(np.cumsum(sizes), controls, side="right").tolist()
            if isinstance(values[part], str)
        }
        results: list[Result] = []
        first = start = 0
        for each in pieces:
            stop, text_tokens, text_bytes, bad = start, 0, 0, None
            for part in range(first, first + len(each)):
                value = values[part]
                stop += sizes[part]
                if isinstance(value, str):
                    text_tokens += sizes[part]
                    text_bytes += len(value) if value.isascii() else len(value.encode())
                    bad = value if bad is None and part in refused else bad
            kept = slice(start, start if self.chosen.empty == "drop" and not text_tokens else stop)
            made = Rendered(tokens[kept], loss[kept], text_bytes)
            results.append(made if bad is None else result_of(self.refuse_control, bad))
            first, start = first + len(each), stop
        return results

    def _permuted(self, text: str) -> list[Piece]:
        """Return the pieces of a text: whole, or as prefix, suffix and middle, by numbers that its seed and bytes decide.

        The two cuts are drawn alike from all of its characters and its end, as in Megatron-LM.
        """
        if not (self._fim and text):
            return [(text, 1.0)]
        digest = hashlib.blake2b(b"%d:%b" % (self.chosen.seed, text.encode()), digest_size=32).digest()
        draws = np.frombuffer(digest, "<u8").tolist()
        if draws[0] >= self.chosen.fim_rate * 2**64:
            return [(text, 1.0)]
        cuts = sorted(draw % (len(text) + 1) for draw in draws[2:])
        return fim_pieces(text, cuts, self._fim, suffix_first=draws[1] < self.chosen.fim_spm_rate * 2**64)

    def _asked(self, asked: str, number: int | None) -> list[Piece]:
        """Return the piece of the tokenizer's BOS or EOS."""
        if number is None:
            name = asked.split()[-1]
            raise PrepareError(
                f"template text: documents {asked}, and this tokenizer has none. Give one that has, or --no-{name.lower()}."
            )
        return [(np.array([number], np.uint32), 1.0)]

    def _fim_ids(self) -> list[int]:
        """Return the ids of the prefix, middle and suffix tokens: those named, or the tokenizer's own."""
        special = self.tokenizer.special_tokens
        named: Sequence[str] = self.chosen.fim_tokens or ()
        if not named:
            named = next((spellings for spellings in _FIM_TOKENS if special.keys() >= set(spellings)), ())
        if len(named) != 3:
            raise PrepareError(
                f"fim_tokens: {len(named)} tokens; expected three, of prefix, middle and suffix. Name special tokens of the "
                "tokenizer, or give their ids: --fim-tokens PREFIX MIDDLE SUFFIX."
            )
        ids = [special.get(token, int(token) if token.isdecimal() else -1) for token in named]
        for token, number in zip(named, ids, strict=True):
            if not 0 <= number < self.tokenizer.vocab_size or ids.count(number) > 1:
                raise PrepareError(
                    f"fim_tokens: {token!r} is not a special token of the tokenizer or an id below "
                    f"{self.tokenizer.vocab_size} of its own. Name three different ones."
                )
        return ids


def fim_pieces(text: str, cuts: Sequence[int], tokens: Sequence[int], *, suffix_first: bool) -> list[Piece]:
    """Return the pieces of a text whose middle is between two `cuts`, characters in ascending order.

    `tokens` are the ids before prefix, middle and suffix. Source: `GPTFIMDataset` of NVIDIA/Megatron-LM
    (megatron/training/datasets/fim_dataset.py).
    """
    prefix, middle, suffix = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]
    to_prefix, to_middle, to_suffix = (np.array([number], np.uint32) for number in tokens)
    order: list[str | npt.NDArray[np.uint32]] = [to_prefix, prefix, to_suffix, suffix, to_middle, middle]  # PSM
    if suffix_first:
        order = [to_prefix, to_suffix, suffix, to_middle, prefix, middle]  # SPM
    return [(piece, 1.0) for piece in order]
