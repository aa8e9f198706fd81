"""Preference pairs: one document from the two conversations of a pair."""

import numpy as np

from grain_sft.errors import RecordError
from grain_sft.prepare.templates import Rendered, Result

CHOSEN, REJECTED = 1, 2
"""Loss of the tokens of the two responses in the document of a pair; the prompt's is 0."""


def pair_of(chosen: Result, rejected: Result) -> Rendered:
    """Return a prompt, a chosen and a rejected response as one document, in which each token's loss names its part.

    The prompt is the tokens before the first one that takes loss, the same in both conversations. A response is all tokens from
    there to the last one that takes loss. If every token of both takes loss, the prompt is their longest common prefix, as in
    MaxText's `DPODataFormatting`.

    Raises:
      RecordError: A conversation could not be rendered, a response takes no loss, the prompts differ, or the responses are
        equal.
    """
    both: list[Rendered] = []
    for name, result in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(result, RecordError):
            raise result
        if not result.loss.any():
            raise RecordError(f"{name}: no token of the response takes loss. Remove the weight 0 or the record.")
        both.append(result)
    if all(each.loss.all() for each in both):
        shortest = min(len(each.tokens) for each in both)
        differing = np.flatnonzero(both[0].tokens[:shortest] != both[1].tokens[:shortest])
        first = int(differing[0]) if len(differing) else shortest
    else:
        first, other = (int(np.argmax(each.loss != 0)) for each in both)
        if other != first or not np.array_equal(both[0].tokens[:first], both[1].tokens[:first]):
            raise RecordError(
                "prompt: the template renders it differently before the two responses, so they share none. Choose another "
                "template."
            )
    responses = [each.tokens[first : len(each.tokens) - int(np.argmax(each.loss[::-1] != 0))] for each in both]
    if np.array_equal(responses[0], responses[1]):
        raise RecordError("chosen, rejected: the responses are equal. Remove the record.")
    tokens = np.concatenate([both[0].tokens[:first], *responses])
    loss = np.repeat(np.array([0, CHOSEN, REJECTED], np.float32), [first, *map(len, responses)])
    return Rendered(tokens, loss)
