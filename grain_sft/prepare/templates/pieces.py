"""Templates that list a conversation's pieces: token ids, and texts that are encoded each on its own."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.messages import DOCUMENT, Conversation
from grain_sft.prepare.records.strict_json import shown
from grain_sft.prepare.templates.template import Rendered, Result, Template, TemplateOptions
from grain_sft.prepare.tokenizers import Tokenizer

Piece = tuple[str | list[int], float]
"""A text or ids, and the loss of each of its tokens."""


class PiecesTemplate(Template):
    """A template whose subclasses define `pieces`; the texts of a batch are encoded in one call."""

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        self._is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self._is_control[list(tokenizer.control_ids)] = True

    @abc.abstractmethod
    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return the pieces of a conversation that `check` has passed. A RecordError stands in its document's place."""

    def weights(self, ids: list[list[int]], weights: list[float]) -> list[float]:
        """Return the loss of each piece's tokens, from the ids and the loss of each piece."""
        return weights

    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        plans: list[list[Piece] | RecordError] = []
        texts: list[str] = []
        for conversation in conversations:
            try:
                self.check(conversation)
                planned = self.pieces(conversation)
            except RecordError as error:
                plans.append(error)
                continue
            plans.append(planned)
            texts += [value for value, _ in planned if type(value) is str]
        encoded = iter(self.tokenizer.encode(texts))
        results: list[Result] = []
        for plan in plans:
            if isinstance(plan, RecordError):
                results.append(plan)
                continue
            ids = [next(encoded) if isinstance(value, str) else value for value, _ in plan]
            try:
                results.append(self._assemble(plan, ids))
            except RecordError as error:
                results.append(error)
        return results

    def check_no_control(self, text: str, ids: Sequence[int]) -> None:
        """Refuse the ids of a text if a control token is among them."""
        if not self.tokenizer.control_ids.isdisjoint(ids):
            raise RecordError(f"messages: the text {shown(text)} becomes a special token of this tokenizer. Change it.")

    def _assemble(self, plan: list[Piece], ids: list[list[int]]) -> Rendered:
        tokens: list[int] = []
        for part in ids:
            tokens += part
        weights: Any = self.weights(ids, [weight for _, weight in plan])
        dtype = np.dtype(np.float32 if self.weighted else np.bool_)
        loss: Any = np.repeat(np.array(weights, dtype), [len(part) for part in ids])
        made = np.array(tokens, np.uint32)
        given = sum(
            bool(self._is_control[number]) for value, _ in plan if not isinstance(value, str) for number in value
        )
        if np.count_nonzero(self._is_control[made]) != given:
            for (value, _), part in zip(plan, ids, strict=True):
                if isinstance(value, str):
                    self.check_no_control(value, part)
        return Rendered(made, loss)


class Text(PiecesTemplate):
    """text: a plain document, its text and the tokenizer's EOS; every token takes loss."""

    name = "text"
    roles = (DOCUMENT,)
    min_tokens = 2

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        if tokenizer.eos_token_id is None:
            raise PrepareError(
                "template text: ends each document in the tokenizer's EOS token, and this tokenizer has none. Give one "
                "that has."
            )
        super().__init__(tokenizer, options)
        self._eos = [tokenizer.eos_token_id]

    def pieces(self, conversation: Conversation) -> list[Piece]:
        return [(conversation.messages[0].content, 1.0), (self._eos, 1.0)]
