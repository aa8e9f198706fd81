"""Encoders of rendered chats to token ids and loss.

Control tokens are the special tokens in a chat, such as `<|im_end|>`. An encoded chat must have the control tokens that its
template writes, and no others.
"""

import abc
import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError, RecordError
from grain_sft.prepare.templates.chat_controls import Control, Expected
from grain_sft.prepare.templates.chat_template import Spans
from grain_sft.prepare.templates.template import Rendered, SpecialText
from grain_sft.prepare.tokenizers import Tokenizer
from grain_sft.prepare.tokenizers.huggingface import renamed
from grain_sft.prepare.tokenizers.huggingface_gaps import refusal


class UnexpectedControlError(RecordError):
    """Error of a chat with a control token that the template did not write. `text` spells the token; "" if unknown."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class Encoder(abc.ABC):
    """Encoder of rendered chats with one tokenizer. Its attribute `special` finds the tokenizer's special tokens in texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special = SpecialText(tokenizer.special_tokens)
        self._tokenizer: Any = tokenizer
        # spelling of each special token by its id, and whether an id is that of a special token
        self._spellings = {number: text for text, number in tokenizer.special_tokens.items()}
        self._is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self._is_control[list(self._spellings)] = True

    @abc.abstractmethod
    def find(self, text: str) -> list[Control]:
        """Return the control tokens that a text spells."""

    @abc.abstractmethod
    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """Return the document of a rendered chat.

        Args:
          text: The rendered chat.
          spans: Spans of the characters that take loss.
          expected: Control tokens that the template writes.
          plain: Whether a text that spells a control token is encoded as ordinary text, not refused.

        Raises:
          UnexpectedControlError: The chat has other control tokens than those expected.
        """

    def _check(self, controls: list[Control], expected: Expected, text: str) -> None:
        """Raise an UnexpectedControlError, for the first control token that is not expected."""
        ids = [control.id for control in controls]
        # if the expected tokens are not `placed`, their indices may be wrong, so only the ids are compared
        if controls == expected.controls or (not expected.placed and ids == expected.ids):
            return
        if expected.placed:
            unexpected = [control for control in controls if control not in expected.controls]
        else:  # if only the number or order of the ids is wrong, each control may be the unexpected one
            unexpected = [control for control in controls if control.id not in expected.ids] or controls
        if unexpected and len(controls) >= len(expected.controls):
            number, start, stop = unexpected[0]
            raise UnexpectedControlError(f"becomes the special token {self._spellings[number]!r}", text[start:stop])
        # too few control tokens: a control token of the template was merged with the text of a message
        raise UnexpectedControlError("changes a special token that the chat template writes")


class WholeChats(Encoder):
    """Encoder that gives the whole chat to a Hugging Face tokenizer, which finds control tokens itself.

    It uses three forms of the tokenizer, `exact`, `strict` and `plain`, which `HuggingFaceTokenizer` describes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        # ids of special tokens such as <unk>, which unknown characters of a text become
        self._unknown_ids = self._spellings.keys() - tokenizer.control_ids
        self._normalizer = self._tokenizer.exact.normalizer

    def find(self, text: str) -> list[Control]:
        return self._encode(self._tokenizer.exact, text)[2]

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        encoded, ids, controls = self._encode(self._tokenizer.strict, text)
        # `_plain` needs the places of the template's control tokens
        if plain and expected.placed and controls != expected.controls:
            return self._plain(text, spans, expected.controls)
        self._check(controls, expected, text)
        return Rendered(ids, _mask(encoded, spans, controls))

    def _plain(self, text: str, spans: Spans, controls: list[Control]) -> Rendered:
        """Encode a chat whose texts spell control tokens.

        In `HuggingFaceTokenizer.plain`, control tokens have longer names, and `<|im_end|>` is ordinary text. So this function
        replaces the template's own `controls` by their longer names.
        """
        changed = ""
        stops = [0]  # start of the text, then the end of each control token
        shifts = [0]  # number of characters by which the text after each of `stops` moves
        for number, start, stop in controls:
            changed += text[stops[-1] : start] + renamed(self._spellings[number])
            stops.append(stop)
            shifts.append(len(changed) - stop)
        changed += text[stops[-1] :]

        def shifted(index: int) -> int:
            """Return the index in `changed` of character `index` of `text`."""
            return index + shifts[bisect.bisect(stops, index) - 1]

        try:
            encoded, ids, plain_controls = self._encode(self._tokenizer.plain, changed)
        except CorpusError as error:
            raise RecordError(f"messages: {error}") from error
        expected = [Control(number, shifted(start), shifted(stop)) for number, start, stop in controls]
        self._check(plain_controls, Expected(expected, placed=True), changed)
        return Rendered(ids, _mask(encoded, [(shifted(start), shifted(stop)) for start, stop in spans], plain_controls))

    def _encode(self, tokenizer: Any, text: str) -> tuple[Any, npt.NDArray[np.uint32], list[Control]]:
        """Return the encoding, its ids, and its control tokens. The span of a control token excludes spaces at the ends."""
        try:
            encoded = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise refusal(tokenizer, text, error) from error
        ids = np.array(encoded.ids, np.uint32)
        controls = []
        for index in np.flatnonzero(self._is_control[ids]).tolist():
            number = int(ids[index])
            start, stop = encoded.token_to_chars(index)
            piece = text[start:stop]
            if number in self._unknown_ids and not self._spells(number, piece):
                continue
            start += len(piece) - len(piece.lstrip())
            stop -= len(piece) - len(piece.rstrip())
            controls.append(Control(number, start, max(start, stop)))  # a piece of spaces becomes an empty span
        return encoded, ids, controls

    def _spells(self, number: int, piece: str) -> bool:
        """Return whether a piece spells token `number`, such as "<unk>", and is not an unknown character."""
        normalized = piece if self._normalizer is None else self._normalizer.normalize_str(piece)
        return self._spellings[number] in piece or self._spellings[number] in normalized


class ChatPieces(Encoder):
    """Encoder that gives the texts between control tokens to SentencePiece or tiktoken, each text by itself.

    These libraries never make control tokens of text. Whitespace after the template's last EOS is left out. If the template
    writes no EOS at the end, the encoder adds an EOS. The added EOS takes loss if it ends a turn that takes loss.
    """

    def find(self, text: str) -> list[Control]:
        ids = self._tokenizer.special_tokens
        return [Control(ids[match.group()], *match.span()) for match in self.special.pattern.finditer(text)]

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """Encode the texts between control tokens in one call, and put the ids of the control tokens between them."""
        # with known places, other spellings of control tokens in the chat are ordinary text
        controls = expected.controls if expected.placed else self.find(text)
        self._check(controls, expected, text)
        eos = self._tokenizer.eos_token_id
        starts = [0, *(control.stop for control in controls)]  # starts of the texts between control tokens
        ends_in_eos = bool(controls) and controls[-1].id == eos and not text[starts[-1] :].strip()
        if ends_in_eos:
            text = text[: starts[-1]]
        pieces = list(zip(starts, [*(control.start for control in controls), len(text)], strict=True))
        encoded = self._tokenizer.encode([text[start:stop] for start, stop in pieces])
        tokens: list[int] = []
        loss: list[npt.NDArray[np.bool_]] = []
        for (start, stop), piece_ids, control in zip(pieces, encoded, [*controls, None], strict=True):
            tokens += piece_ids
            spans_in_piece = [(first - start, last - start) for first, last in spans]
            loss.append(self._loss(text[start:stop], piece_ids, spans_in_piece))
            if control is not None:
                tokens.append(control.id)
                loss.append(np.array([any(first <= control.start < last for first, last in spans)]))
        adds_eos = not ends_in_eos and eos is not None
        if adds_eos:
            # whether the last turn takes loss, and no control token ends the turn
            ends_turn = bool(spans) and not text[spans[-1][1] :].strip() and starts[-1] < spans[-1][1]
            tokens.append(eos)
            loss.append(np.array([ends_turn]))
        ids = np.array(tokens, np.uint32)
        if np.count_nonzero(self._is_control[ids]) != len(controls) + adds_eos:
            raise UnexpectedControlError("becomes a special token of this tokenizer")
        return Rendered(ids, np.concatenate(loss))

    def _loss(self, text: str, ids: Sequence[int], spans: Spans) -> npt.NDArray[np.bool_]:
        """Return the loss of a piece, bool [ids]. A token takes loss if it overlaps a span."""
        loss = np.zeros(len(ids), np.bool_)
        inside = [(start, stop) for start, stop in spans if start < len(text) and stop > 0 and start < stop]
        if not len(ids) or not inside:
            return loss
        if len(inside) == 1 and inside[0][0] <= 0 and inside[0][1] >= len(text):
            return ~loss
        starts, stops = self._tokenizer.token_spans(text, ids)
        for start, stop in inside:
            loss[np.searchsorted(stops, start, "right") : np.searchsorted(starts, stop, "left")] = True
        return loss


def _mask(encoded: Any, spans: Spans, controls: list[Control]) -> npt.NDArray[np.bool_]:
    """Return the loss of a chat, bool [tokens]. A token takes loss if it overlaps a span; a control, if it begins there.

    Only the tokens at the ends of spans are looked up, because to read all offsets takes half as long as the tokenization.
    """
    loss = np.zeros(len(encoded), np.bool_)
    begins = [start for _, start, stop in controls if start < stop]
    for start, stop in spans:
        if start == stop:
            continue
        first, last = encoded.char_to_token(start), encoded.char_to_token(stop - 1)
        if first is None or last is None:  # a character that the tokenizer's normalizer drops
            # `searchsorted` needs ascending offsets
            starts, stops = np.maximum.accumulate(np.array(encoded.offsets, np.int64).reshape(-1, 2), axis=0).T
            first, last = np.searchsorted(stops, start, "right"), np.searchsorted(starts, stop, "left") - 1
        # `char_to_token` returns only the first token of a character; a character may have a token for each byte
        while last + 1 < len(loss) and encoded.token_to_chars(last + 1)[0] < stop:
            last += 1
        # a control before the span may have the span's first spaces (`rstrip`), and a control after it the last (`lstrip`)
        before, after = bisect.bisect_left(begins, start) - 1, bisect.bisect_left(begins, stop)
        if before >= 0 and encoded.char_to_token(begins[before]) == first:
            first += 1
        if after < len(begins) and encoded.char_to_token(begins[after]) == last:
            last -= 1
        loss[first : last + 1] = True
    return loss
