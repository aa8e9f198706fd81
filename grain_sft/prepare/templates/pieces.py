"""Documents put together from pieces: token ids given as such, and texts that are encoded each on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RecordError
from grain_sft.prepare.conversation import Conversation
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
    return [
        planned if isinstance(planned, RecordError) else _assemble(planned, encoded, loss_dtype, weigh)
        for planned in plans
    ]


def _assemble(
    planned: list[Piece], encoded: Iterator[list[int]], loss_dtype: npt.DTypeLike, weigh: Weigh | None
) -> Rendered:
    ids: list[list[int]] = [next(encoded) if isinstance(value, str) else value for value, _ in planned]
    tokens: list[int] = []
    for part in ids:
        tokens += part
    weights: Any = [weight for _, weight in planned]
    if weigh is not None:
        weights = weigh(ids, weights)
    loss = np.repeat(np.array(weights, loss_dtype), [len(part) for part in ids])
    return Rendered(np.array(tokens, np.uint32), loss)
