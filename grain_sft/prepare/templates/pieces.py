"""Documents put together from pieces: token ids given as such, and texts that are encoded each on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RecordError
from grain_sft.prepare.conversation import Conversation
from grain_sft.prepare.strict_json import shown
from grain_sft.prepare.templates.template import Rendered, Result
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

Piece = tuple[str | list[int], float]
"""A text or ids, and the loss of each of its tokens."""

Weigh = Callable[[list[list[int]], list[float]], list[float]]
"""From the ids of each piece and its weight to the weight that counts."""


def render_pieces(
    conversations: Sequence[Conversation],
    plan: Callable[[Conversation], list[Piece]],
    tokenizer: Tokenizer,
    *,
    loss_dtype: npt.DTypeLike,
    weigh: Weigh | None = None,
) -> list[Result]:
    """Documents of conversations whose pieces `plan` lists; all texts are encoded in one call.

    A RecordError that `plan` raises stands in its conversation's place.
    """
    plans: list[list[Piece] | RecordError] = []
    texts: list[str] = []
    for conversation in conversations:
        try:
            planned = plan(conversation)
        except RecordError as error:
            plans.append(error)
            continue
        plans.append(planned)
        texts += [value for value, _ in planned if type(value) is str]
    encoded = iter(tokenizer.encode(texts))
    is_control = np.zeros(tokenizer.vocab_size, np.bool_)
    is_control[list(tokenizer.control_ids)] = True
    results: list[Result] = []
    for plan_or_error in plans:
        if isinstance(plan_or_error, RecordError):
            results.append(plan_or_error)
            continue
        try:
            results.append(_assemble(plan_or_error, encoded, loss_dtype, weigh, is_control))
        except RecordError as error:
            results.append(error)
    return results


def check_no_control(text: str, ids: Sequence[int], control_ids: frozenset[int]) -> None:
    """Refuse the ids of a text if a control token is among them.

    Raises:
      RecordError: one is.
    """
    if not control_ids.isdisjoint(ids):
        raise RecordError(f"messages: the text {shown(text)} becomes a special token of this tokenizer. Change it.")


def _assemble(
    planned: list[Piece],
    encoded: Iterator[list[int]],
    loss_dtype: npt.DTypeLike,
    weigh: Weigh | None,
    is_control: npt.NDArray[np.bool_],
) -> Rendered:
    ids: list[list[int]] = [next(encoded) if isinstance(value, str) else value for value, _ in planned]
    tokens: list[int] = []
    for part in ids:
        tokens += part
    weights: Any = [weight for _, weight in planned]
    if weigh is not None:
        weights = weigh(ids, weights)
    loss = np.repeat(np.array(weights, loss_dtype), [len(part) for part in ids])
    made = np.array(tokens, np.uint32)
    given = sum(bool(is_control[number]) for value, _ in planned if not isinstance(value, str) for number in value)
    if np.count_nonzero(is_control[made]) != given:
        for (value, _), part in zip(planned, ids, strict=True):
            if isinstance(value, str):
                check_no_control(value, part, frozenset(np.flatnonzero(is_control).tolist()))
    return Rendered(made, loss)
