"""Search for the documents that contain a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError
from grain_sft.storage import files
from grain_sft.types import Ints

if TYPE_CHECKING:
    from grain_sft.prepare import Tokenizer

_BLOCK = 1 << 22  # tokens searched at once


def documents_with_text(corpus: Corpus, tokenizer: Tokenizer, text: str) -> Ints:
    """Return the numbers of the documents whose decoded tokens contain `text`, ascending.

    The first and the last token of `text` depend on the words around it. The search decodes only documents that contain the
    inner tokens, those in between. If `text` has at most two tokens or spells a special token, it decodes every document. If
    the words around the text in a document change the inner tokens, the search misses the document. A search for a shorter
    text may find the document.

    Raises:
      CorpusError: The text is empty, the boundaries of documents are unknown or invalid, or a token is not in the
        tokenizer's vocabulary.
      CorpusFileError: Files can't be read.
      RecordError: The tokenizer can't encode the text.
    """
    if not text:
        raise CorpusError("text: expected some words, found an empty text, which every document contains. Give words.")
    # Many tokenizers split the first word in another way after a space than at the beginning of a line. So the inner tokens may
    # differ.
    needles = {tuple(ids[1:-1]) for ids in tokenizer.encode([text, f" {text}"])}
    # An empty needle comes from a text without inner tokens. If the text spells a special token, a document may have that token
    # where `encode` returns ids of ordinary text.
    decodes_all = () in needles or any(spelling in text for spelling in tokenizer.special_tokens)
    candidates = np.arange(len(corpus.documents)) if decodes_all else _containing(corpus, sorted(needles))
    matches = [number for number in candidates.tolist() if text in _decode(corpus, tokenizer, number)]
    return np.array(matches, np.int64)


def _decode(corpus: Corpus, tokenizer: Tokenizer, number: int) -> str:
    """Return the text of document `number`. Raise a CorpusError if it has a token that the tokenizer lacks."""
    tokens = corpus.document(number).tokens
    highest = int(tokens.max(initial=0))
    if highest >= tokenizer.vocab_size:
        expected = f"expected tokens below {tokenizer.vocab_size}, the size of the vocabulary"
        raise CorpusError(f"document {number}: has token {highest}; {expected}. Give the tokenizer of the corpus.")
    return tokenizer.decode(tokens.tolist())


def find_tokenizer(corpus: Corpus) -> str | None:
    """Return the path of the folder `tokenizer` next to a corpus, or up to two folders above; None if none exists.

    Log a warning if the corpus does not record the hash of its tokenizer: the folder may belong to another corpus.
    """
    path = files.sidecar(corpus.shards[0].path, "tokenizer")
    if path is not None and corpus.tokenizer_sha256 is None:
        logging.warning("%s: used as the corpus's tokenizer. No hash confirms it: check it, or give --tokenizer.", path)
    return path


def tokenizer_of(corpus: Corpus, path: str | None = None) -> Tokenizer:
    """Return the tokenizer at `path`; None means the folder `tokenizer` next to the corpus.

    Raises:
      CorpusError: No tokenizer exists at this path, or the corpus was made with another tokenizer.
      CorpusFileError, MissingExtraError: The tokenizer can't be loaded.
    """
    from grain_sft.prepare import load_tokenizer  # imports tokenizers, which takes 0.3 s

    path = find_tokenizer(corpus) if path is None else path
    if path is None:
        problem = f"{corpus.shards[0].path}: no folder 'tokenizer' is next to the corpus"
        raise CorpusError(f"{problem}. Give the path of its tokenizer: --tokenizer.")
    tokenizer = load_tokenizer(path)
    if corpus.tokenizer_sha256 not in (None, tokenizer.sha256):
        problem = f"is another tokenizer (sha256 {tokenizer.sha256}) than the corpus was made with"
        raise CorpusError(f"{path}: {problem} ({corpus.tokenizer_sha256}). Give the corpus's own tokenizer.")
    return tokenizer


def _containing(corpus: Corpus, needles: Sequence[tuple[int, ...]]) -> Ints:
    """Return the numbers, ascending, of the documents that contain one of `needles`, which are sequences of token ids."""
    longest = max(map(len, needles))
    matches: dict[tuple[int, ...], list[Ints]] = {needle: [] for needle in needles}
    for begin in range(0, corpus.num_tokens, _BLOCK):
        # also read the first tokens of the next block: a needle that begins in this block may end there
        tokens, _ = corpus.read(begin, min(begin + _BLOCK + longest - 1, corpus.num_tokens))
        for needle in needles:
            num_begins = max(0, min(_BLOCK, len(tokens) - len(needle) + 1))
            begins = np.flatnonzero(tokens[:num_begins] == needle[0])
            for offset, token in enumerate(needle[1:], 1):
                begins = begins[tokens[begins + offset] == token]
            matches[needle].append(begins + begin)
    start, length = corpus.documents
    contained = np.zeros(len(start), np.bool_)
    for needle, blocks in matches.items():
        begins = np.concatenate([np.zeros(0, np.int64), *blocks])  # ascending
        # A needle lies in a document if it begins there, early enough to end there. These are the numbers of needles that begin
        # before the document, and up to the last place in it where a whole needle fits.
        num_before_document = begins.searchsorted(start)
        num_up_to_last_begin = begins.searchsorted(start + length - len(needle), side="right")
        contained |= num_before_document < num_up_to_last_begin
    return np.flatnonzero(contained)
