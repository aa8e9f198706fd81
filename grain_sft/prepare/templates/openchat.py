"""The template openchat: BOS, the system text, then `User:` or `Assistant:` and the text of each message.

A record may have a condition, such as "GPT4 Correct", which comes before each `User:` or `Assistant:`.
`<|end_of_turn|>` follows the system text and each message. The weight of a message is the loss weight of its text and of the
`<|end_of_turn|>` after it. The default is 1 for the assistant and 0 for the user. Source: `ochat/config` in imoneoi/openchat.
"""

from collections.abc import Mapping, Sequence

from grain_sft.errors import RecordError
from grain_sft.prepare.records.conversation import Conversation
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.template import Ids, Piece, PiecesTemplate, Rendered
from grain_sft.prepare.tokenizers import Tokenizer

_PREFIXES: Mapping[str, str] = {"user": "User:", "assistant": "Assistant:"}
_WEIGHTS: Mapping[str, float] = {"user": 0.0, "assistant": 1.0}


class OpenChat(PiecesTemplate):
    """Template of OpenChat's training data."""

    name = "openchat"
    roles = ("system", *_PREFIXES)
    format = "openchat"
    options = ("seq_level_weight", "condition", "system_prompt")
    weighted = True
    trim_trailing = True

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        (self._end,) = self.ids_of(["<|end_of_turn|>"])
        self._bos = list(tokenizer.empty_ids)  # ids that the tokenizer's library adds to a text, such as BOS

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return BOS, the system text, and for each message its prefix, its content and `<|end_of_turn|>`."""
        self.refuse_calls(conversation)
        system, messages = conversation.system, conversation.messages
        if messages[0].role == "system":  # then the record has no other system text
            if messages[0].weight:
                raise RecordError("messages[0].weight: a system text takes no loss in template openchat. Give 0.")
            system, messages = messages[0].content, messages[1:]
        elif system is None:
            system = self.chosen.system_prompt
        condition = conversation.condition or self.chosen.condition or ""
        pieces: list[Piece] = [(self._bos, 0.0)]
        if system:
            pieces += [(system, 0.0), (self._end, 0.0)]
        for message in messages:
            if message.role == "system":
                raise RecordError("messages: a later system message; template openchat expects it first. Put it first.")
            weight = _WEIGHTS[message.role] if message.weight is None else message.weight
            prefix = f"{condition} {_PREFIXES[message.role]}".strip()
            pieces += [(prefix, 0.0), (message.content, weight), (self._end, weight)]
        return pieces

    def document(self, pieces: list[Piece], ids: Sequence[Ids]) -> Rendered:
        """See `PiecesTemplate.document`. With `seq_level_weight`, divide a weight by the number of tokens that get it."""
        if self.chosen.seq_level_weight:
            pieces = list(pieces)
            # From the end, every three pieces are a message: prefix, text and end of turn. Pieces before the first message have
            # the weight 0, which stays 0.
            for end in range(len(pieces) - 1, 1, -3):
                weighted, num_tokens = slice(end - 1, end + 1), len(ids[end - 1]) + len(ids[end])
                pieces[weighted] = [(value, weight / num_tokens) for value, weight in pieces[weighted]]
        return super().document(pieces, ids)
