"""The tokenizer of a SentencePiece model."""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import sentencepiece
from google.protobuf import message

from grain_sft.errors import CorpusError
from grain_sft.prepare.protobuf import message_class
from grain_sft.prepare.tokenizers.tokenizer import MARKER, Offsets, OneFileTokenizer, character_spans

FILE = "tokenizer.model"
BEGINS = re.compile(rb"\n[\x03-\x7f]\n.{1,122}?\x15", re.DOTALL)
"""First bytes of a model file: a piece with a text and a score, in protobuf's encoding."""

_SPACE = "\u2581"  # SentencePiece's character for a space
_CONTROL, _USER_DEFINED = 3, 4  # types of pieces in sentencepiece_model.proto
_MARKER = re.compile(rf"{MARKER.pattern}|<(?:start|end)_of_\w+>", re.DOTALL)
"""Texts of control tokens, such as `<|eot|>` and Gemma's `<start_of_turn>`."""

_SCHEMA = """
name: "pieces.proto" package: "pieces" syntax: "proto2"
message_type {
  name: "Piece"
  field { name: "text" number: 1 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field { name: "type" number: 3 type: TYPE_INT32 label: LABEL_OPTIONAL }
}
message_type {
  name: "Model" field { name: "pieces" number: 1 type: TYPE_MESSAGE type_name: ".pieces.Piece" label: LABEL_REPEATED }
}
"""
"""The fields of sentencepiece_model.proto that this module reads. Protobuf keeps other fields unchanged."""


class SentencePieceTokenizer(OneFileTokenizer):
    """Tokenizer of a SentencePiece model.

    SentencePiece encodes text to USER_DEFINED pieces, but never to CONTROL pieces. Some USER_DEFINED pieces look like control
    tokens, such as `<|eot|>`. This class makes them CONTROL pieces in memory, with the same ids.

    Raises:
      CorpusError: The bytes are not a SentencePiece model.
    """

    kind = "sentencepiece"

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        super().__init__(contents, where)
        try:
            model, special_tokens = _with_control_pieces(self._contents[FILE])
            processor = self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (ValueError, RuntimeError, message.DecodeError) as error:
            raise CorpusError(f"{where}: is not a SentencePiece model ({error}). Copy it again.") from error
        self.vocab_size = int(processor.get_piece_size())
        ids = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id(), "pad_token": processor.pad_id()}
        named = {name: processor.id_to_piece(number) for name, number in ids.items() if number >= 0}
        self._set_special(special_tokens, named)
        self._special_texts = {number: text for text, number in special_tokens.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode`. One thread encodes, because a preparation has a process for each core."""
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """See `Tokenizer.encode_arrays`. Recent versions of SentencePiece return arrays. These are 5 % faster than lists."""
        if not hasattr(sentencepiece, "_ENCODE_DISPATCH"):  # an older version
            return super().encode_arrays(texts)
        return [ids.view(np.uint32) for ids in self._processor.encode(list(texts), num_threads=1, out_type="numpy")]

    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        """See `OneFileTokenizer.token_spans`. The spans in the normalized text are mapped back to `text`."""
        lengths = self._piece_bytes[np.asarray(ids, np.int64)]
        unknown = self._processor.unk_id()
        if unknown in ids:
            # an unknown piece has the length of its text, not of "<unk>"
            pieces = self._processor.encode(text, out_type=str, num_threads=1)
            lengths = np.where(np.asarray(ids) == unknown, [len(piece.encode()) for piece in pieces], lengths)
        normalized, offsets = self._processor.normalize(text, with_offsets=True)
        starts, stops = character_spans(normalized, lengths)
        # index in `text` of each character of `normalized`, then the length of `text`
        characters = np.asarray(offsets, np.int64)
        return characters[starts], characters[stops]

    @functools.cached_property
    def _piece_bytes(self) -> Offsets:
        """int64 [vocab_size], number of UTF-8 bytes of each piece."""
        pieces = [self._processor.id_to_piece(number).encode() for number in range(self.vocab_size)]
        lengths = [1 if self._processor.is_byte(number) else len(piece) for number, piece in enumerate(pieces)]
        return np.array(lengths, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        # A group has equal special tokens, and their text, or ordinary tokens, and None. The library itself would leave out the
        # special tokens, because they are CONTROL pieces.
        groups = [(text, list(group)) for text, group in itertools.groupby(map(int, ids), self._special_texts.get)]
        return "".join(self._processor.decode(group) if text is None else text * len(group) for text, group in groups)

    def token_text(self, number: int) -> str | None:
        if not 0 <= number < self.vocab_size:
            return None
        text = str(self._processor.id_to_piece(number))
        if self._processor.is_byte(number):
            # the text is "<0x0A>" for a newline
            return bytes.fromhex(text[3:5]).decode("utf-8", "surrogateescape")
        return text.replace(_SPACE, " ")


def _with_control_pieces(model: bytes) -> tuple[bytes, dict[str, int]]:
    """Return the model with its user-defined markers as CONTROL pieces, and the ids of all CONTROL pieces by text."""
    parsed = message_class(_SCHEMA, "pieces.Model").FromString(model)
    special: dict[str, int] = {}
    for number, piece in enumerate(parsed.pieces):
        if piece.type == _USER_DEFINED and _MARKER.fullmatch(piece.text.decode()):
            piece.type = _CONTROL
        if piece.type == _CONTROL:
            special[piece.text.decode()] = number
    return parsed.SerializeToString(), special
