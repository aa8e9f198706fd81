"""The little of a SentencePiece model's protobuf that is read and changed here.

Format: google/sentencepiece, src/sentencepiece_model.proto. ModelProto.pieces is field 1; of a piece, the text is
field 1, the score field 2, the type field 3. The package's own generated classes need the protobuf version that made
them, which is often newer than the one that is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

CONTROL = 3
USER_DEFINED = 4

_TYPE_KEY = bytes([3 << 3])  # field 3, varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece's text and type, and the byte of the model that holds the type."""

    text: str
    type: int
    type_at: int


def begins_model(data: bytes) -> bool:
    """Whether a file begins as SentencePiece models do: with a piece that has a text and a score."""
    try:
        field, wire, start, stop = next(_fields(data, 0, len(data)))
        if (field, wire) != (1, _BYTES):
            return False
        inner = {number: kind for number, kind, _, _ in _fields(data, start, stop)}
    except (ValueError, IndexError, StopIteration):
        return False
    return inner.get(1) == _BYTES and inner.get(2, _FIXED32) == _FIXED32 and inner.keys() <= {1, 2, 3}


def typed_pieces(model: bytes) -> Iterator[tuple[int, Piece]]:
    """(id, piece) of each piece that says its type, in order.

    Raises:
      ValueError: these bytes are no model.
    """
    number = 0
    for field, wire, start, stop in _fields(model, 0, len(model)):
        if field != 1 or wire != _BYTES:
            continue
        text, kind, kind_at = b"", 0, 0
        if model.find(_TYPE_KEY, start, stop) < 0:  # nearly all: NORMAL is not written
            number += 1
            continue
        for inner, _, first, last in _fields(model, start, stop):
            if inner == 1:
                text = model[first:last]
            elif inner == 3:
                kind, kind_at = model[first], first
        if kind:
            yield number, Piece(text.decode(), kind, kind_at)
        number += 1


def with_type(model: bytes, changed: Iterable[Piece], kind: int) -> bytes:
    """The model with these pieces of another type; ids stay."""
    altered = bytearray(model)
    for piece in changed:
        altered[piece.type_at] = kind
    return bytes(altered)


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, start, stop) of each field's value between two places."""
    while position < end:
        key, position = _varint(data, position, end)
        wire = key & 7
        start = position
        if wire == _VARINT:
            _, position = _varint(data, position, end)
        elif wire == _BYTES:
            size, start = _varint(data, position, end)
            position = start + size
        elif wire in (_FIXED64, _FIXED32):
            position += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"byte {position}: unknown wire type {wire}")
        if position > end:
            raise ValueError(f"byte {start}: a field runs over its end")
        yield key >> 3, wire, start, position


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"byte {position}: a number runs over the end")
