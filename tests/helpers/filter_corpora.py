"""Documents with about `LIMIT` repetitions, the limit of OLMo-core's n-gram filter. Tests and a golden script use them."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

EOS, PAD = 1, 0
SEQUENCE_LENGTH = 256
FILES, PACKED_FILES = 14, 12
VOCABULARIES = (2, 50, 1000)
LIMIT = 32

Tokens = npt.NDArray[np.uint16]


def documents_of(file: int) -> list[Tokens]:
    """Return the documents of a file, each with its EOS, in a random order. No two have equal lengths.

    A file with an even number has one document of each length from 1 to `SEQUENCE_LENGTH`. Most of them repeat an n-gram.
    A file with an odd number has one document of each length from 120 to `SEQUENCE_LENGTH`. Few of them repeat an n-gram, and
    most leave padding in a packed row. Files from number `PACKED_FILES` on are not packed. Their documents are longer than
    `SEQUENCE_LENGTH`, so rows cut them.
    """
    rng = np.random.default_rng([20260101, file])
    first, stop = (120 if file % 2 else 1), SEQUENCE_LENGTH + 1
    if file >= PACKED_FILES:
        first, stop = SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH + 101
    share = 0.15 if file % 2 and file < PACKED_FILES else 0.9
    return [_document(int(length), share, rng) for length in rng.permutation(np.arange(first, stop))]


def write_files(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part_{file:02}.npy" for file in range(FILES)]
    for file, path in enumerate(paths):
        np.concatenate(documents_of(file)).astype("<u2").tofile(path)
    return paths


def _document(length: int, share: float, rng: np.random.Generator) -> Tokens:
    """Return a document of `length` tokens. With probability `share`, it repeats an n-gram if it has room."""
    room = length - 1
    vocabulary = VOCABULARIES[int(rng.integers(len(VOCABULARIES)))]
    body = rng.integers(2, 2 + vocabulary, room)
    period = int(rng.integers(1, max(2, min(15, room // LIMIT + 1))))
    span = period * int(rng.integers(LIMIT - 3, LIMIT + 4)) + int(rng.integers(period))
    if rng.random() < 0.1:  # the n-gram fills the whole document
        span = room
    if rng.random() < share and 0 < span <= room:
        at = int(rng.choice([0, room - span, int(rng.integers(room - span + 1))]))
        gram = rng.integers(2, 2 + max(vocabulary, 50), period)
        if rng.random() < 0.2:
            gram[:] = PAD  # tokens of the document that look like padding
        body[at : at + span] = np.resize(gram, span)
        if rng.random() < 0.2:
            body[at + int(rng.integers(span))] = 5000
    return np.append(body, EOS).astype(np.uint16)
