"""SentencePiece models."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece

from grain_sft.errors import CorpusError
from grain_sft.prepare.tokenizers import sentencepiece_proto as proto
from grain_sft.prepare.tokenizers.tokenizer import describe, hash_files

FILE = "tokenizer.model"

_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)


class SentencePieceTokenizer:
    """A `.model` file.

    SentencePiece never makes a CONTROL piece out of text, but does make USER_DEFINED ones. The latter that look like
    markers (`<|eot|>`, `[INST]`) are turned into the former in memory, ids unchanged: so no text becomes a marker,
    whatever it spells.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str = FILE) -> None:
        """Reads a model; `where` is its path, for errors.

        Raises:
          CorpusError: these bytes are no SentencePiece model.
        """
        self._model = model
        self._where = where
        self.sha256 = hash_files({FILE: model})
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
        self._special_texts = {number: text for text, number in special}
        self.vocab_size = int(processor.get_piece_size())
        self.eos_token_id = _id_or_none(processor.eos_id())
        self.pad_token_id = _id_or_none(processor.pad_id())
        self.bos_token_id = _id_or_none(processor.bos_id())
        self.empty_ids: Sequence[int] = () if self.bos_token_id is None else (self.bos_token_id,)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model, self._where)

    def __repr__(self) -> str:
        return f"SentencePieceTokenizer({self._where!r}, vocab_size={self.vocab_size}, sha256={self.sha256[:12]!r})"

    @functools.cached_property
    def _processor(self) -> Any:
        return sentencepiece.SentencePieceProcessor(model_proto=self._safe_model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; see `Tokenizer`. On one thread: several preparations share the cores by themselves."""
        found: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return found

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
        """The model."""
        return {FILE: self._model}

    def description(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return describe(self)


def _id_or_none(number: int) -> int | None:
    return number if number >= 0 else None
