"""SentencePiece models."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece

from grain_sft.errors import CorpusError
from grain_sft.prepare.tokenizers import sentencepiece_proto as proto
from grain_sft.prepare.tokenizers.tokenizer import CHAT_TEMPLATE, MARKER, Offsets, character_spans, describe, hash_files

FILE = "tokenizer.model"
_MARKER = re.compile(rf"{MARKER.pattern}|<(?:start|end)_of_\w+>", re.DOTALL)
"""User-defined pieces that are control tokens: `<|eot|>`, and the turns of Gemma."""


class SentencePieceTokenizer:
    """A SentencePiece model.

    SentencePiece never makes a CONTROL piece out of text, but does make USER_DEFINED ones. Most of the latter are
    ordinary text that the model has a short way of writing (`<h1>`, runs of spaces). Those that look like control tokens
    (`<|eot|>`, `<start_of_turn>`) are turned into CONTROL pieces in memory, ids unchanged.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str = FILE, chat_template: bytes | None = None) -> None:
        """Reads a model; `where` is its path, for errors.

        Args:
          chat_template: content of the `chat_template.jinja` in the model's directory.

        Raises:
          CorpusError: these bytes are no SentencePiece model.
        """
        self._model = model
        self._where = where
        self._chat_template = chat_template
        self.chat_template = None if chat_template is None else chat_template.decode()
        self.sha256 = hash_files(self.files())
        try:
            typed = list(proto.typed_pieces(model))
            user = [(number, piece) for number, piece in typed if piece.type == proto.USER_DEFINED]
            markers = {number: piece for number, piece in user if _MARKER.fullmatch(piece.text)}
            special = [
                (piece.text, number) for number, piece in typed if piece.type == proto.CONTROL or number in markers
            ]
            self._safe_model = proto.with_type(model, markers.values(), proto.CONTROL)
            if not model:
                raise ValueError("it is empty")
            processor = self._processor
        except (ValueError, RuntimeError, IndexError) as error:
            raise CorpusError(f"{where}: is no SentencePiece model ({error}).") from error
        self.special_tokens: Mapping[str, int] = dict(special)
        self.control_ids = frozenset(self.special_tokens.values())
        self._special_texts = {number: text for text, number in special}
        self.vocab_size = int(processor.get_piece_size())
        self.eos_token_id = _id_or_none(processor.eos_id())
        self.pad_token_id = _id_or_none(processor.pad_id())
        self.bos_token_id = _id_or_none(processor.bos_id())
        self.empty_ids: Sequence[int] = () if self.bos_token_id is None else (self.bos_token_id,)
        named = {"bos": self.bos_token_id, "eos": self.eos_token_id, "pad": self.pad_token_id}
        self.template_variables: Mapping[str, Any] = {
            f"{name}_token": processor.id_to_piece(number) for name, number in named.items() if number is not None
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model, self._where, self._chat_template)

    def __repr__(self) -> str:
        return f"SentencePieceTokenizer({self._where!r}, vocab_size={self.vocab_size}, sha256={self.sha256[:12]!r})"

    @functools.cached_property
    def _processor(self) -> Any:
        return sentencepiece.SentencePieceProcessor(model_proto=self._safe_model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; see `Tokenizer`. On one thread: several preparations share the cores by themselves."""
        found: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return found

    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        """Return where each token of a text begins and ends, in characters of the text.

        Args:
          text: a text.
          ids: its tokens, as `encode` gives them.
        """
        lengths = self._piece_bytes[np.asarray(ids, np.int64)]
        unknown = self._processor.unk_id()
        if unknown in ids:
            pieces = self._processor.encode(text, out_type=str, num_threads=1)
            for place, number in enumerate(ids):
                if number == unknown:
                    lengths[place] = len(pieces[place].encode())
        normalized, offsets = self._processor.normalize(text, with_offsets=True)
        starts, stops = character_spans(normalized, lengths)
        characters = np.asarray(offsets, np.int64)
        return characters[starts], characters[stops]

    @functools.cached_property
    def _piece_bytes(self) -> Offsets:
        """int64 [vocab_size], UTF-8 bytes of each piece in normalized text."""
        processor = self._processor
        pieces = range(self.vocab_size)
        return np.array(
            [1 if processor.is_byte(i) else len(processor.id_to_piece(i).encode()) for i in pieces], np.int64
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; see `Tokenizer`."""
        parts: list[str] = []
        run: list[int] = []
        for number in ids:
            text = self._special_texts.get(number)
            if text is None:
                run.append(int(number))
                continue
            if run:
                parts.append(self._processor.decode(run))
                run = []
            parts.append(text)
        if run:
            parts.append(self._processor.decode(run))
        return "".join(parts)

    def token_id(self, text: str) -> int | None:
        """Id of a special token."""
        return self.special_tokens.get(text)

    def files(self) -> dict[str, bytes]:
        """The model, and the chat template where its directory has one."""
        return {FILE: self._model, **({} if self._chat_template is None else {CHAT_TEMPLATE: self._chat_template})}

    def description(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return describe(self)


def _id_or_none(number: int) -> int | None:
    return number if number >= 0 else None
