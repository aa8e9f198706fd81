"""Token ids and loss of a rendered chat, with exactly the control tokens that it must have.

With a tokenizer of Hugging Face a chat is encoded whole, as `apply_chat_template` does. With SentencePiece and tiktoken
the text between control tokens is encoded on its own, and a document ends in EOS.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError, RecordError
from grain_sft.prepare.special_text import special_text_of
from grain_sft.prepare.templates.chat_source import Control, Expected
from grain_sft.prepare.templates.chat_template import Spans
from grain_sft.prepare.templates.template import Rendered
from grain_sft.prepare.tokenizers.huggingface import HuggingFaceTokenizer
from grain_sft.prepare.tokenizers.huggingface_json import renamed
from grain_sft.prepare.tokenizers.sentencepiece_model import SentencePieceTokenizer
from grain_sft.prepare.tokenizers.tiktoken_file import TiktokenTokenizer
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer


class Encoder(Protocol):
    """A tokenizer's way to encode rendered chats."""

    def find(self, text: str) -> list[Control]:
        """Return the control tokens of a text that has no others than it must have."""

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """Return the document of a chat.

        Args:
          spans: what takes loss.
          expected: the control tokens that the chat must have.
          plain: whether a text that becomes a control token is encoded as ordinary text.

        Raises:
          UnexpectedControlError: the chat would have other control tokens.
        """


class UnexpectedControlError(RecordError):
    """A chat with other control tokens than the same chat with harmless texts.

    Attributes:
      text: the characters that become one; "" where one is missing.
    """

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


@functools.lru_cache(maxsize=8)
def encoder_of(tokenizer: Tokenizer) -> Encoder:
    """The encoder of a tokenizer, made once."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return WholeChats(tokenizer)
    assert isinstance(tokenizer, SentencePieceTokenizer | TiktokenTokenizer)
    return ChatPieces(tokenizer)


class WholeChats:
    """Encodes chats whole, with a tokenizer of Hugging Face, and compares the control tokens that come out."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings = {number: text for text, number in tokenizer.special_tokens.items()}
        self._is_control = _table(tokenizer)
        self._unknown = self._spellings.keys() - tokenizer.control_ids
        self._normalizer = tokenizer.exact.normalizer

    def find(self, text: str) -> list[Control]:
        """See `Encoder`."""
        encoded = self._tokenizer.exact.encode(text, add_special_tokens=False)
        return self._controls(encoded, np.array(encoded.ids, np.uint32), text)

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """See `Encoder`."""
        encoded = self._tokenizer.exact.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, np.uint32)
        controls = self._controls(encoded, ids, text)
        if _are(controls, expected):
            return Rendered(ids, _mask(encoded, spans))
        if not plain or expected.spans is None:
            raise _difference(controls, expected, text, self._spellings)
        return self._plain(text, spans, expected)

    def _plain(self, text: str, spans: Spans, expected: Expected) -> Rendered:
        """The chat by the tokenizer that knows its control tokens by another spelling, which only the template's own
        have."""
        parts, stop = [], 0
        moves = [(0, 0)]  # from this character of the chat on, how far the renamed one is ahead
        controls: list[Control] = []
        for number, (first, last) in zip(expected.ids, expected.spans or (), strict=True):
            name = renamed(self._spellings[number])
            start = first + moves[-1][1]
            parts += [text[stop:first], name]
            moves.append((last, start + len(name) - last))
            controls.append((number, start, start + len(name)))
            stop = last
        changed = "".join([*parts, text[stop:]])
        try:
            encoded = self._tokenizer.plain.encode(changed, add_special_tokens=False)
        except CorpusError as error:
            raise UnexpectedControlError(f"messages: {error}", "") from error
        ids = np.array(encoded.ids, np.uint32)
        found = self._controls(encoded, ids, changed)
        if found != controls:
            raise _difference(found, Expected(expected.ids, [(a, b) for _, a, b in controls]), changed, self._spellings)
        return Rendered(ids, _mask(encoded, [(_moved(start, moves), _moved(stop, moves)) for start, stop in spans]))

    def _controls(self, encoded: Any, ids: npt.NDArray[np.uint32], text: str) -> list[Control]:
        """The control tokens, and their characters without the whitespace that some take with them."""
        found = []
        for place in np.flatnonzero(self._is_control[ids]).tolist():
            number = int(ids[place])
            start, stop = encoded.token_to_chars(place)
            piece = text[start:stop]
            if number in self._unknown and not self._spells(number, piece):
                continue
            start += len(piece) - len(piece.lstrip())
            found.append((number, start, max(start, stop - len(piece) + len(piece.rstrip()))))
        return found

    def _spells(self, number: int, piece: str) -> bool:
        """Whether the token for unknown characters is one because the text spells it."""
        normalized = piece if self._normalizer is None else self._normalizer.normalize_str(piece)
        return self._spellings[number] in piece or self._spellings[number] in normalized


class ChatPieces:
    """Encodes the text between control tokens, with SentencePiece or tiktoken, which make no control tokens of text.

    A document ends in the tokenizer's EOS: where the template's last EOS is followed by nothing but whitespace, that
    whitespace is left out; else EOS is added. It takes loss if a turn that takes loss ends there without a control token.
    """

    def __init__(self, tokenizer: SentencePieceTokenizer | TiktokenTokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings = {number: text for text, number in tokenizer.special_tokens.items()}
        self._special = special_text_of(tuple(tokenizer.special_tokens))
        self._is_control = _table(tokenizer)

    def find(self, text: str) -> list[Control]:
        """See `Encoder`."""
        ids = self._tokenizer.special_tokens
        return [(ids[match.group()], match.start(), match.end()) for match in self._special.pattern.finditer(text)]

    def encode(self, text: str, spans: Spans, expected: Expected, *, plain: bool) -> Rendered:
        """See `Encoder`."""
        if expected.spans is None:
            controls = self.find(text)
            if not _are(controls, expected):
                raise _difference(controls, expected, text, self._spellings)
        else:
            controls = [(number, *span) for number, span in zip(expected.ids, expected.spans, strict=True)]
        eos = self._tokenizer.eos_token_id
        last = controls[-1] if controls else (-1, 0, 0)
        if last[0] == eos and not text[last[2] :].strip():
            text = text[: last[2]]
        return self._assemble(text, controls, spans, ends=eos is None or (last[0] == eos and last[2] == len(text)))

    def _assemble(self, text: str, controls: list[Control], spans: Spans, *, ends: bool) -> Rendered:
        cuts = [0, *(stop for _, _, stop in controls)]
        pieces = list(zip(cuts, [*(start for _, start, _ in controls), len(text)], strict=True))
        encoded = self._tokenizer.encode([text[start:stop] for start, stop in pieces])
        tokens: list[int] = []
        loss: list[npt.NDArray[np.bool_]] = []
        for place, ((start, stop), ids) in enumerate(zip(pieces, encoded, strict=True)):
            tokens += ids
            loss.append(self._loss(text[start:stop], ids, [(a - start, b - start) for a, b in spans]))
            if place < len(controls):
                number, first, _ = controls[place]
                tokens.append(number)
                loss.append(np.array([any(a <= first < b for a, b in spans)]))
        if not ends:
            open_turn = bool(spans) and not text[spans[-1][1] :].strip() and cuts[-1] < spans[-1][1]
            tokens.append(int(self._tokenizer.eos_token_id or 0))
            loss.append(np.array([open_turn]))
        made = np.array(tokens, np.uint32)
        if np.count_nonzero(self._is_control[made]) != len(controls) + (not ends):
            raise UnexpectedControlError("messages: a text becomes a control token of this tokenizer. Remove it.", "")
        return Rendered(made, np.concatenate(loss) if loss else np.zeros(0, np.bool_))

    def _loss(self, text: str, ids: Sequence[int], spans: Spans) -> npt.NDArray[np.bool_]:
        """bool [ids]: from the first token that overlaps a span to the last that does."""
        loss = np.zeros(len(ids), np.bool_)
        inside = [(start, stop) for start, stop in spans if start < len(text) and stop > 0 and start < stop]
        if not len(ids) or not inside:
            return loss
        if len(inside) == 1 and inside[0][0] <= 0 and inside[0][1] >= len(text):
            return ~loss
        starts, stops = self._tokenizer.token_spans(text, ids)
        for start, stop in inside:
            first, after = int(np.searchsorted(stops, start, "right")), int(np.searchsorted(starts, stop, "left"))
            loss[first:after] = True
        return loss


def _table(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """bool [vocab_size]: whether an id is a control token."""
    table = np.zeros(tokenizer.vocab_size, np.bool_)
    table[list(tokenizer.special_tokens.values())] = True
    return table


def _are(controls: list[Control], expected: Expected) -> bool:
    if [number for number, _, _ in controls] != expected.ids:
        return False
    return expected.spans is None or [(start, stop) for _, start, stop in controls] == expected.spans


def _difference(
    controls: list[Control], expected: Expected, text: str, spellings: dict[int, str]
) -> UnexpectedControlError:
    """The error of a chat that has other control tokens than expected."""
    if expected.spans is None:
        surplus = [entry for entry in controls if entry[0] not in expected.ids] or controls
    else:
        surplus = [entry for entry in controls if entry[1:] not in expected.spans]
    if surplus and len(controls) >= len(expected.ids):
        number, start, stop = surplus[0]
        return UnexpectedControlError(f"becomes the special token {spellings[number]!r}", text[start:stop])
    return UnexpectedControlError("changes a special token that the chat template writes", "")


def _moved(place: int, moves: list[tuple[int, int]]) -> int:
    return place + next(move for start, move in reversed(moves) if start <= place)


def _mask(encoded: Any, spans: Spans) -> npt.NDArray[np.bool_]:
    """bool [tokens]: from the first token that overlaps a span to the last that does.

    Asks for the tokens at a span's two ends; all offsets at once would cost as much as half the tokenization.
    """
    loss = np.zeros(len(encoded), np.bool_)
    for start, stop in spans:
        if start == stop:
            continue
        first, last = encoded.char_to_token(start), encoded.char_to_token(stop - 1)
        if first is None or last is None:  # a character that the tokenizer's normalizer drops
            first, last = _overlapping(encoded.offsets, start, stop)
        while last + 1 < len(loss) and encoded.token_to_chars(last + 1)[0] < stop:  # more bytes of the same character
            last += 1
        loss[first : last + 1] = True
    return loss


def _overlapping(offsets: Any, start: int, stop: int) -> tuple[int, int]:
    """First and last token that overlap a span; the last is before the first where none does."""
    starts, stops = np.maximum.accumulate(np.array(offsets, np.int64).reshape(-1, 2), axis=0).T
    return int(np.searchsorted(stops, start, "right")), int(np.searchsorted(starts, stop, "left")) - 1
