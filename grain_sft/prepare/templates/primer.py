"""The template primer: each message is the token of its role (`<|sys|>`, `<|usr|>` or `<|asst|>`), its content and `<|eot|>`.

Each content is encoded by itself, unchanged. The assistant's contents and the `<|eot|>` after them take loss. Source: the
primer specification of niels_gpt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grain_sft.corpus import IGNORED
from grain_sft.errors import RecordError
from grain_sft.prepare.records.conversation import Conversation
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.template import Piece, PiecesTemplate
from grain_sft.prepare.tokenizers import Tokenizer

SPECIAL_TOKENS: Mapping[str, str] = {"sys": "<|sys|>", "usr": "<|usr|>", "asst": "<|asst|>", "eot": "<|eot|>"}
"""Spelling of each special token, by its name in the specification."""

_ROLES: Mapping[str, str] = {"system": "sys", "user": "usr", "assistant": "asst"}
"""Name of the special token that begins a message, by role."""


class Primer(PiecesTemplate):
    """Template of niels_gpt's chats."""

    name = "primer"
    roles = tuple(_ROLES)
    format = "primer"
    messages_schema = "messages"
    truncation = "last"
    min_tokens = 2  # a document of one token has no target

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        self._ids = dict(zip(SPECIAL_TOKENS, self.ids_of(SPECIAL_TOKENS.values()), strict=True))

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return three pieces for the system text and for each message: the role's token, the text, and `<|eot|>`."""
        self.refuse_calls(conversation)
        ids, eot = self._ids, self._ids["eot"]
        pieces: list[Piece] = []
        if conversation.system:
            pieces += [(ids["sys"], 0.0), (conversation.system, 0.0), (eot, 0.0)]
        for message, loss in zip(conversation.messages, self.losses(conversation), strict=True):
            pieces += [(ids[_ROLES[message.role]], 0.0), (message.content, loss), (eot, loss)]
        return pieces


class PrimerTokenizer(Protocol):
    """Methods that `render_chat_sft` needs of a tokenizer."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the ids of an ordinary text."""

    def special_token_ids(self) -> Mapping[str, int]:
        """Return the ids of "sys", "usr", "asst" and "eot" by name."""


def render_chat_sft(
    tokenizer: PrimerTokenizer, messages: Sequence[Mapping[str, Any]], *, add_final_eot: bool = True
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and a label for each token: the id, or -100 if the token takes no loss.

    This is the function of niels_gpt's specification. It makes the same ids as template primer, with any tokenizer object.

    Args:
      tokenizer: Tokenizer of the contents.
      messages: Messages with the keys `role` and `content`.
      add_final_eot: Whether the last message ends with `<|eot|>`.

    Raises:
      RecordError: No message has the role assistant, or a role is unknown.
      KeyError: A message lacks a key.
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
        raise RecordError("messages: no message has the role 'assistant', so no token takes loss. Remove the record.")
    return input_ids, labels
