"""openchat: BOS, system, then `User:` or `Assistant:`, text and `<|end_of_turn|>` message after message, with weights.

Rules: imoneoi/openchat, ochat/config. A message's text and its end of turn take its weight: what the record says, or 1
for the assistant and 0 for the user. Each part is encoded on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.conversation import Conversation, Message
from grain_sft.prepare.special_text import special_text_of
from grain_sft.prepare.templates.pieces import Piece, check_no_control, render_pieces
from grain_sft.prepare.templates.template import Result, Template, TemplateOptions, check_conversation
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

END_OF_TURN = "<|end_of_turn|>"

_PREFIXES: Mapping[str, str] = {"user": "User:", "assistant": "Assistant:"}
_ROLES = ("system", *_PREFIXES)
_WEIGHTS: Mapping[str, float] = {"user": 0.0, "assistant": 1.0}


def _render(conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions) -> list[Result]:
    eot_id = tokenizer.token_id(END_OF_TURN)
    if eot_id is None:
        raise PrepareError(
            f"template openchat: the tokenizer has no special token {END_OF_TURN}. Choose another tokenizer or template."
        )
    bos, eot = list(tokenizer.empty_ids), [eot_id]
    finder = special_text_of(tuple(tokenizer.special_tokens)) if options.special_text == "error" else None
    prefixes: dict[str, list[int]] = {}

    def plan(conversation: Conversation) -> list[Piece]:
        check_conversation(conversation, "openchat", _ROLES, finder)
        system, messages = _system(conversation, options.system_prompt)
        condition = conversation.condition or options.condition or ""
        pieces: list[Piece] = [(bos, 0.0)]
        if system:
            pieces += [(system, 0.0), (eot, 0.0)]
        for message in messages:
            if message.role == "system":
                raise RecordError("messages: a message of the system after the first; OpenChat has one system text.")
            prefix = f"{condition} {_PREFIXES[message.role]}".strip()
            if prefix not in prefixes:
                (ids,) = tokenizer.encode([prefix])
                check_no_control(prefix, ids, tokenizer.control_ids)
                prefixes[prefix] = ids
            weight = _WEIGHTS[message.role] if message.weight is None else message.weight
            pieces += [(prefixes[prefix], 0.0), (message.content, weight), (eot, weight)]
        return pieces

    return render_pieces(
        conversations,
        plan,
        tokenizer,
        loss_dtype=np.float32,
        weigh=_by_length if options.seq_level_weight else None,
    )


def _system(conversation: Conversation, prompt: str | None) -> tuple[str | None, tuple[Message, ...]]:
    """The system text, which records of other schemas have as their first message, and the other messages."""
    messages = conversation.messages
    if conversation.system is None and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return (prompt if conversation.system is None else conversation.system), messages


def _by_length(ids: list[list[int]], weights: list[float]) -> list[float]:
    """Each message's weight divided by its length with the end of turn, which is the piece after its text."""
    found = list(weights)
    for place in range(len(ids) - 2, 0, -3):  # from the last message back: prefix, text, end of turn
        found[place] /= len(ids[place]) + len(ids[place + 1])
        found[place + 1] = found[place]
    return found


OPENCHAT = Template(
    name="openchat",
    render=_render,
    schemas=("openchat", "messages", "prompt_completion"),
    roles=_ROLES,
    weighted=True,
    truncation="first",
    trim_trailing=True,
    options=("seq_level_weight", "condition", "system_prompt"),
)
