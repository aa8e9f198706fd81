"""Preference pairs: the document of a pair, from the documents of its two conversations."""

import numpy as np

from grain_sft.errors import RecordError
from grain_sft.prepare.templates import Rendered, Result

CHOSEN, REJECTED = 1, 2
"""Loss of the tokens of the two responses in the document of a pair; 0 is the prompt."""


def pair_of(chosen: Result, rejected: Result) -> Rendered:
    """Return a prompt, a chosen and a rejected response as one document, whose loss names the part of each token.

    The prompt is what comes before the first token that takes loss, the same in both. Tokens after the last one that takes loss
    are left out. In documents that take loss everywhere, the prompt is the tokens that both begin with, as in MaxText's
    `DPODataFormatting`.

    Raises:
      RecordError: one of the two could not be rendered, their prompts differ, or the responses are equal.
    """
    both: list[Rendered] = []
    for result in (chosen, rejected):
        if isinstance(result, RecordError):
            raise result
        both.append(result)
    if all(each.loss.all() for each in both):
        shortest = min(len(each.tokens) for each in both)
        differing = np.flatnonzero(both[0].tokens[:shortest] != both[1].tokens[:shortest])
        first = int(differing[0]) if len(differing) else shortest
    else:
        firsts = [int(np.argmax(each.loss != 0)) for each in both]
        first = firsts[0]
        if firsts[1] != first or not np.array_equal(both[0].tokens[:first], both[1].tokens[:first]):
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
