"""SentencePiece models."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from grain_sft.errors import CorpusError
from grain_sft.prepare.tokenizers.tokenizer import (
    CHAT_TEMPLATE,
    MARKER,
    Offsets,
    Tokenizer,
    character_spans,
    hash_files,
    text_of_bytes,
)

FILE = "tokenizer.model"
BEGINS = re.compile(rb"\n[\x03-\x7f]\n.{1,122}?\x15", re.DOTALL)
"""The first bytes of a model: a piece (field 1) with a text (field 1) and a score (field 2)."""

_SPACE = "\u2581"  # how SentencePiece writes a space
_CONTROL, _USER_DEFINED = 3, 4
_MARKER = re.compile(rf"{MARKER.pattern}|<(?:start|end)_of_\w+>", re.DOTALL)
"""User-defined pieces that are control tokens: `<|eot|>`, and the turns of Gemma."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    SentencePiece never makes a CONTROL piece out of text, but does make USER_DEFINED ones. Most of the latter are
    ordinary text that the model has a short way of writing (`<h1>`, runs of spaces). Those that look like control tokens
    (`<|eot|>`, `<start_of_turn>`) are turned into CONTROL pieces in memory, ids unchanged.

    Args:
      model: Content of the model's file.
      where: Path of the file, for errors.
      chat_template: Content of the `chat_template.jinja` in the model's directory.

    Raises:
      CorpusError: The bytes are not a SentencePiece model.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str = FILE, chat_template: bytes | None = None) -> None:
        self._model = model
        self._where = where
        self._chat_template = chat_template
        self.chat_template = None if chat_template is None else chat_template.decode()
        self.sha256 = hash_files(self.files())
        try:
            self._safe_model, self.special_tokens = _with_control_pieces(model)
            processor = self._processor
        except (ValueError, RuntimeError, message.DecodeError) as error:
            raise CorpusError(f"{where}: is not a SentencePiece model ({error}).") from error
        self.control_ids = frozenset(self.special_tokens.values())
        self._special_texts = {number: text for text, number in self.special_tokens.items()}
        self.vocab_size = int(processor.get_piece_size())
        ids = [processor.bos_id(), processor.eos_id(), processor.pad_id()]
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (None if number < 0 else number for number in ids)
        self.empty_ids = () if self.bos_token_id is None else (self.bos_token_id,)
        self.template_variables = {
            f"{name}_token": processor.id_to_piece(number)
            for name, number in zip(("bos", "eos", "pad"), ids, strict=True)
            if number >= 0
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model, self._where, self._chat_template)

    @functools.cached_property
    def _processor(self) -> Any:
        return sentencepiece.SentencePieceProcessor(model_proto=self._safe_model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`. One thread: several preparations share the cores by themselves."""
        found: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return found

    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        lengths = self._piece_bytes[np.asarray(ids, np.int64)]
        unknown = self._processor.unk_id()
        if unknown in ids:
            pieces = self._processor.encode(text, out_type=str, num_threads=1)
            for index, number in enumerate(ids):
                if number == unknown:
                    lengths[index] = len(pieces[index].encode())
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

    def token_text(self, number: int) -> str | None:
        processor = self._processor
        if not 0 <= number < self.vocab_size:
            return None
        text = str(processor.id_to_piece(number))
        if processor.is_byte(number):
            return text_of_bytes(bytes.fromhex(text[3:5]))
        return text if processor.is_unknown(number) else text.replace(_SPACE, " ")

    def files(self) -> dict[str, bytes]:
        """Return the model, and the chat template where its directory has one."""
        return {FILE: self._model, **({} if self._chat_template is None else {CHAT_TEMPLATE: self._chat_template})}


def _with_control_pieces(model: bytes) -> tuple[bytes, dict[str, int]]:
    """Return the model with CONTROL pieces for user-defined markers, and the id of each control piece."""
    parsed = _model_class().FromString(model)
    if not parsed.pieces:
        raise ValueError("it has no pieces")
    special: dict[str, int] = {}
    changed = False
    for number, piece in enumerate(parsed.pieces):
        kind = piece.type
        if kind == _USER_DEFINED and _MARKER.fullmatch(piece.text.decode()):
            kind = piece.type = _CONTROL
            changed = True
        if kind == _CONTROL:
            special[piece.text.decode()] = number
    return (parsed.SerializeToString() if changed else model), special


@functools.cache
def _model_class() -> Any:
    """Return the protobuf class of a model's pieces; it keeps all other fields as they are.

    Format: google/sentencepiece, src/sentencepiece_model.proto. The sentencepiece package's own class refuses to load
    beside a protobuf older than the one that generated it.
    """
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces", syntax="proto2")
    kinds = descriptor_pb2.FieldDescriptorProto
    piece, model = file.message_type.add(name="Piece"), file.message_type.add(name="Model")
    piece.field.add(name="text", number=1, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
    piece.field.add(name="type", number=3, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    model.field.add(
        name="pieces", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=".pieces.Piece"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))
