"""Token ids and loss of a rendered chat, with exactly its expected control tokens."""

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
    """Error of a chat whose `text` becomes an unexpected control token; "" if the text is unknown."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class Encoder(abc.ABC):
    """Encoder of rendered chats by a tokenizer, whose special tokens `special` finds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special = SpecialText(tokenizer.special_tokens)
        self._tokenizer: Any = tokenizer
        self._spellings = {number: text for text, number in tokenizer.special_tokens.items()}
        self._is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self._is_control[list(self._spellings)] = True

    @abc.abstractmethod
    def find(self, text: str) -> list[Control]:
        """Return the control tokens of a text that spells no others."""

    @abc.abstractmethod
    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """Return the document of a rendered chat, whose characters in `spans` take loss.

        Raises:
          UnexpectedControlError: The chat has other control tokens than those expected. With `plain`, a text that becomes
            one is encoded as ordinary text instead.
        """

    def _check(self, controls: list[Control], expected: Expected, text: str) -> None:
        """Raise an UnexpectedControlError if the `controls` of a chat are not those expected."""
        found = [number for number, _, _ in controls]
        if controls == expected.controls or (not expected.placed and found == expected.ids):
            return
        if expected.placed:
            places = [(start, stop) for _, start, stop in expected.controls]
            surplus = [entry for entry in controls if entry[1:] not in places]
        else:
            surplus = [entry for entry in controls if entry[0] not in expected.ids] or controls
        if surplus and len(controls) >= len(expected.controls):
            number, start, stop = surplus[0]
            raise UnexpectedControlError(f"becomes the special token {self._spellings[number]!r}", text[start:stop])
        raise UnexpectedControlError("changes a special token that the chat template writes")


class WholeChats(Encoder):
    """Encoder of whole chats by a tokenizer of Hugging Face. It compares the control tokens of the result."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._unknown = self._spellings.keys() - tokenizer.control_ids
        self._normalizer = self._tokenizer.exact.normalizer

    def find(self, text: str) -> list[Control]:
        return self._encode(self._tokenizer.exact, text)[2]

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        encoded, ids, controls = self._encode(self._tokenizer.strict, text)
        try:
            self._check(controls, expected, text)
        except UnexpectedControlError:
            if plain and expected.placed:
                return self._plain(text, spans, expected.controls)
            raise
        return Rendered(ids, _mask(encoded, spans))

    def _plain(self, text: str, spans: Spans, controls: list[Control]) -> Rendered:
        """Encode the chat by the tokenizer's `plain`, with new names for the template's own control tokens alone."""
        parts, stops, shifts = [], [0], [0]  # shifts: number of characters by which the text after each stop moves
        for number, first, last in controls:
            name = renamed(self._spellings[number])
            parts += [text[stops[-1] : first], name]
            stops.append(last)
            shifts.append(shifts[-1] + len(name) - (last - first))
        changed = "".join([*parts, text[stops[-1] :]])

        def moved(place: int) -> int:
            return place + shifts[bisect.bisect(stops, place) - 1]

        try:
            encoded, ids, found = self._encode(self._tokenizer.plain, changed)
        except CorpusError as error:
            raise RecordError(f"messages: {error}") from error
        expected = Expected([(number, moved(first), moved(last)) for number, first, last in controls], placed=True)
        self._check(found, expected, changed)
        return Rendered(ids, _mask(encoded, [(moved(start), moved(stop)) for start, stop in spans]))

    def _encode(self, tokenizer: Any, text: str) -> tuple[Any, npt.NDArray[np.uint32], list[Control]]:
        """Return the encoding, its ids, and the control tokens, without the whitespace that some of them take in."""
        try:
            encoded = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise refusal(tokenizer, text, error) from error
        ids, found = np.array(encoded.ids, np.uint32), []
        for index in np.flatnonzero(self._is_control[ids]).tolist():
            number = int(ids[index])
            start, stop = encoded.token_to_chars(index)
            piece = text[start:stop]
            if number in self._unknown and not self._spells(number, piece):
                continue
            start += len(piece) - len(piece.lstrip())
            found.append((number, start, max(start, stop - len(piece) + len(piece.rstrip()))))
        return encoded, ids, found

    def _spells(self, number: int, piece: str) -> bool:
        """Return whether the text spells the token for unknown characters."""
        normalized = piece if self._normalizer is None else self._normalizer.normalize_str(piece)
        return self._spellings[number] in piece or self._spellings[number] in normalized


class ChatPieces(Encoder):
    """Encoder of the text between control tokens by SentencePiece or tiktoken, which never make control tokens of text.

    A document ends in the tokenizer's EOS. Whitespace after the template's last EOS is left out; without such an EOS, one
    is added. It takes loss if a turn that takes loss ends there without a control token.
    """

    def find(self, text: str) -> list[Control]:
        ids = self._tokenizer.special_tokens
        return [(ids[match.group()], match.start(), match.end()) for match in self.special.pattern.finditer(text)]

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """See `Encoder.encode`. Each text between control tokens is encoded alone."""
        controls = expected.controls if expected.placed else self.find(text)
        self._check(controls, expected, text)
        eos, cuts = self._tokenizer.eos_token_id, [0, *(stop for _, _, stop in controls)]
        if ended := bool(controls) and controls[-1][0] == eos and not text[cuts[-1] :].strip():
            text = text[: cuts[-1]]
        pieces = list(zip(cuts, [*(start for _, start, _ in controls), len(text)], strict=True))
        encoded = self._tokenizer.encode([text[start:stop] for start, stop in pieces])
        tokens: list[int] = []
        loss: list[npt.NDArray[np.bool_]] = []
        for (start, stop), ids, control in zip(pieces, encoded, [*controls, None], strict=True):
            tokens += ids
            loss.append(self._loss(text[start:stop], ids, [(first - start, last - start) for first, last in spans]))
            if control is not None:
                tokens.append(control[0])
                loss.append(np.array([any(first <= control[1] < last for first, last in spans)]))
        if adds_eos := not ended and eos is not None:
            open_turn = bool(spans) and not text[spans[-1][1] :].strip() and cuts[-1] < spans[-1][1]
            tokens.append(eos)
            loss.append(np.array([open_turn]))
        made = np.array(tokens, np.uint32)
        if np.count_nonzero(self._is_control[made]) != len(controls) + adds_eos:
            raise UnexpectedControlError("becomes a special token of this tokenizer")
        return Rendered(made, np.concatenate(loss))

    def _loss(self, text: str, ids: Sequence[int], spans: Spans) -> npt.NDArray[np.bool_]:
        """Return bool [ids], true from the first token that overlaps a span to the last one."""
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


def _mask(encoded: Any, spans: Spans) -> npt.NDArray[np.bool_]:
    """Return bool [tokens], true from the first token that overlaps a span to the last one.

    Only the tokens at a span's two ends are looked up: all offsets would cost half as much as the tokenization.
    """
    loss = np.zeros(len(encoded), np.bool_)
    for start, stop in spans:
        if start == stop:
            continue
        first, last = encoded.char_to_token(start), encoded.char_to_token(stop - 1)
        if first is None or last is None:  # a character that the tokenizer's normalizer drops
            starts, stops = np.maximum.accumulate(np.array(encoded.offsets, np.int64).reshape(-1, 2), axis=0).T
            first, last = np.searchsorted(stops, start, "right"), np.searchsorted(starts, stop, "left") - 1
        while last + 1 < len(loss) and encoded.token_to_chars(last + 1)[0] < stop:  # more bytes of the same character
            last += 1
        loss[first : last + 1] = True
    return loss
