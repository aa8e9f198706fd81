"""`pair_of`: joins the two rendered conversations of a preference pair to one document."""

import numpy as np

from grain_sft.errors import RecordError
from grain_sft.prepare.templates import Rendered, Result

PROMPT, CHOSEN, REJECTED = 0, 1, 2
"""Code of each part of a pair's document, stored as the loss of its tokens."""


def pair_of(chosen: Result, rejected: Result) -> Rendered:
    """Return the document of a pair: the prompt, the chosen response and the rejected response.

    Both conversations begin with the prompt. The prompt ends before the first token that takes loss, and the response ends with
    the last token that takes loss. If every token of both conversations takes loss, the prompt is the longest common prefix of
    the conversations, as in MaxText's `DPODataFormatting`.

    Raises:
      RecordError: `chosen` or `rejected` is a RecordError, the prompts differ, a response takes no loss or is empty, or both
        responses are equal.
    """
    rendered: list[Rendered] = []
    for name, result in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(result, RecordError):
            raise result
        if not result.loss.any():
            raise RecordError(f'{name}: no token of the response takes loss. Remove its "weight": 0 or the record.')
        rendered.append(result)
    chosen, rejected = rendered
    if chosen.loss.all() and rejected.loss.all():
        shortest = min(len(chosen.tokens), len(rejected.tokens))
        is_different = chosen.tokens[:shortest] != rejected.tokens[:shortest]
        prompt_end = int(np.argmax(is_different)) if is_different.any() else shortest
    else:
        prompt_end = int(np.argmax(chosen.loss != 0))
        same_end = prompt_end == int(np.argmax(rejected.loss != 0))
        if not same_end or not np.array_equal(chosen.tokens[:prompt_end], rejected.tokens[:prompt_end]):
            problem = "prompt: the template renders the prompt differently for each response, but a pair has one prompt"
            raise RecordError(f"{problem}. Choose another template.")
    responses = [result.tokens[prompt_end : np.flatnonzero(result.loss)[-1] + 1] for result in rendered]
    if np.array_equal(responses[0], responses[1]) or not all(map(len, responses)):
        raise RecordError("chosen, rejected: the responses are equal, or one has no token. Remove the record.")
    tokens = np.concatenate([chosen.tokens[:prompt_end], *responses])
    loss = np.repeat(np.array([PROMPT, CHOSEN, REJECTED], np.float32), [prompt_end, *map(len, responses)])
    return Rendered(tokens, loss)
