"""primer: `<|sys|>`, `<|usr|>` or `<|asst|>`, the content, `<|eot|>`, message after message.

Rules: the primer specification (niels_gpt). What the assistant says and its `<|eot|>` take loss. The special tokens are
inserted by their ids, and contents encoded as they are, each on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.conversation import Conversation
from grain_sft.prepare.special_text import special_text_of
from grain_sft.prepare.templates.pieces import Piece, render_pieces
from grain_sft.prepare.templates.template import (
    Result,
    Template,
    TemplateOptions,
    check_conversation,
    no_assistant,
    takes_loss,
)
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

SPECIAL_TOKENS: Mapping[str, str] = {"sys": "<|sys|>", "usr": "<|usr|>", "asst": "<|asst|>", "eot": "<|eot|>"}
IGNORED = -100
"""The label of a token that takes no loss."""

_ROLES: Mapping[str, str] = {"system": "sys", "user": "usr", "assistant": "asst"}


class PrimerTokenizer(Protocol):
    """All that `render_chat_sft` asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of an ordinary text."""

    def special_token_ids(self) -> Mapping[str, int]:
        """Ids of "sys", "usr", "asst" and "eot"."""


def render_chat_sft(
    tokenizer: PrimerTokenizer, messages: Sequence[Mapping[str, Any]], *, add_final_eot: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and their labels: the token's own id, or -100 where it takes no loss.

    Raises:
      ValueError: there is no message of the assistant, or one of an unknown role.
    """
    special = tokenizer.special_token_ids()
    input_ids: list[int] = []
    labels: list[int] = []
    for index, message in enumerate(messages):
        name = _ROLES.get(message["role"])
        if name is None:
            raise RecordError(f"messages[{index}].role: {message['role']!r}; expected one of {', '.join(_ROLES)}.")
        body = list(tokenizer.encode(message["content"]))
        if add_final_eot or index < len(messages) - 1:
            body.append(special["eot"])
        input_ids += [special[name], *body]
        labels += [IGNORED, *(body if name == "asst" else [IGNORED] * len(body))]
    if not any(message["role"] == "assistant" for message in messages):
        raise no_assistant()
    return input_ids, labels


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the four special tokens.

    Raises:
      PrepareError: the tokenizer lacks some.
    """
    found = {name: tokenizer.token_id(text) for name, text in SPECIAL_TOKENS.items()}
    missing = [SPECIAL_TOKENS[name] for name, number in found.items() if number is None]
    if missing:
        raise PrepareError(
            f"template primer: the tokenizer has no special token {', '.join(missing)}. Train one that has them "
            "(grain-sft train-tokenizer), or choose another template."
        )
    return {name: number for name, number in found.items() if number is not None}


def _render(conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions) -> list[Result]:
    special = special_token_ids(tokenizer)
    starts = {role: [special[name]] for role, name in _ROLES.items()}
    eot = [special["eot"]]
    finder = special_text_of(tuple(tokenizer.special_tokens)) if options.special_text == "error" else None

    def plan(conversation: Conversation) -> list[Piece]:
        check_conversation(conversation, "primer", tuple(_ROLES), finder)
        pieces: list[Piece] = []
        if conversation.system is not None:
            pieces += [(starts["system"], 0.0), (conversation.system, 0.0), (eot, 0.0)]
        assistant = False
        for index, message in enumerate(conversation.messages):
            loss = float(takes_loss(conversation, index))
            assistant |= message.role == "assistant"
            pieces += [(starts[message.role], 0.0), (message.content, loss), (eot, loss)]
        if not assistant:
            raise no_assistant()
        if not options.add_final_eot:
            pieces.pop()
        return pieces

    return render_pieces(conversations, plan, tokenizer, loss_dtype=np.bool_)


PRIMER = Template(
    name="primer",
    render=_render,
    schemas=("messages",),
    roles=tuple(_ROLES),
    truncation="last",
    min_tokens=2,
)
