"""text: a plain document, its text and the tokenizer's EOS; every token takes loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grain_sft.errors import PrepareError
from grain_sft.prepare.conversation import DOCUMENT, Conversation
from grain_sft.prepare.special_text import special_text_of
from grain_sft.prepare.templates.pieces import Piece, render_pieces
from grain_sft.prepare.templates.template import Result, Template, TemplateOptions, check_conversation
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer


def _render(conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions) -> list[Result]:
    if tokenizer.eos_token_id is None:
        raise PrepareError(
            "template text: ends each document in the tokenizer's EOS token, and this tokenizer has none. Give one that has."
        )
    eos = [tokenizer.eos_token_id]
    finder = special_text_of(tuple(tokenizer.special_tokens)) if options.special_text == "error" else None

    def plan(conversation: Conversation) -> list[Piece]:
        check_conversation(conversation, "text", (DOCUMENT,), finder)
        return [(conversation.messages[0].content, 1.0), (eos, 1.0)]

    return render_pieces(conversations, plan, tokenizer, loss_dtype=np.bool_)


TEXT = Template(name="text", render=_render, schemas=("text",), roles=(DOCUMENT,), min_tokens=2)
