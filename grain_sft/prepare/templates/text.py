"""Template `text`, for plain documents such as those of pretraining. Every token takes loss."""

import unicodedata
from collections.abc import Sequence

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import DOCUMENT, Conversation
from grain_sft.prepare.request import TEXT_OPTIONS, TemplateOptions
from grain_sft.prepare.templates.fim import FillInTheMiddle
from grain_sft.prepare.templates.template import Ids, Piece, PiecesTemplate, Rendered, SpecialText
from grain_sft.prepare.tokenizers import Tokenizer


class Text(PiecesTemplate):
    """Template of plain documents: BOS, the text and EOS."""

    name = "text"
    roles = (DOCUMENT,)
    options = TEXT_OPTIONS
    masked = False

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        self._before = [_piece(tokenizer.bos_token_id, "begin with BOS", "--no-bos")] if options.bos else []
        self._after = [_piece(tokenizer.eos_token_id, "end in EOS", "--no-eos")] if options.eos else []
        if options.empty == "keep" and not (self._before or self._after):
            raise PrepareError("empty=keep: a document without text, BOS and EOS has no tokens. Give bos or eos.")
        self._fim = FillInTheMiddle(tokenizer, options) if options.fim_rate else None
        fim_options = [name for name in TEXT_OPTIONS if name.startswith("fim_") and getattr(options, name)]
        if self._fim is None and fim_options:
            raise PrepareError(f"{fim_options[0]} applies to the documents that fim_rate chooses. Give fim_rate, too.")
        for name in ("fim_split_sample", "fim_no_prefix"):
            form, text = options.normalize, getattr(options, name) or ""
            if form is not None and not unicodedata.is_normalized(form, text):
                raise PrepareError(f"{name}: {text!r} is not {form}, so no normalized text has it. Leave out normalize.")
        # texts must not spell special tokens, except `fim_split_sample`, which divides a text into parts
        self.special = SpecialText(self.special.spellings - {options.fim_split_sample})
        if self._fim is not None:
            self.forbid(self._fim.ids)

    def check(self, conversation: Conversation) -> None:
        if conversation.messages[0].role != DOCUMENT:
            super().check(conversation)  # raises an error that names the right template
        self.special.check(conversation.messages[0].content, "text")

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return BOS, the normalized text, which fill-in-the-middle may divide, and EOS."""
        text, form = conversation.messages[0].content, self.chosen.normalize
        if form is not None and not unicodedata.is_normalized(form, text):
            before, text = text, unicodedata.normalize(form, text)
            self.special.check(text, f"text, after {form}")
            if (split := self.chosen.fim_split_sample) and text.count(split) != before.count(split):
                raise RecordError(f"text: {form} makes or breaks the token {split!r}. Remove the token's other spelling.")
        pieces: list[Piece] = [(text, 1.0)] if self._fim is None else self._fim.pieces(text)
        return [*self._before, *pieces, *self._after]

    def document(self, pieces: list[Piece], ids: Sequence[Ids]) -> Rendered:
        """See `PiecesTemplate.document`. With `empty` "drop", a text without tokens becomes an empty document."""
        rendered = super().document(pieces, ids)
        text_bytes = sum(len(value.encode()) for value, _ in pieces if isinstance(value, str))
        has_text = any(len(part) for (value, _), part in zip(pieces, ids, strict=True) if isinstance(value, str))
        stop = len(rendered.tokens) if has_text or self.chosen.empty == "keep" else 0
        return Rendered(rendered.tokens[:stop], rendered.loss[:stop], text_bytes)


def _piece(number: int | None, place: str, option: str) -> Piece:
    """Return BOS or EOS as a piece. Raise a PrepareError with `place` and `option` if the tokenizer has no such token."""
    if number is None:
        raise PrepareError(f"template text: documents {place}; this tokenizer has no such token. Give {option}.")
    return [number], 1.0
