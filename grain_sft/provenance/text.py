"""Documents by what they hold or where they come from: a text, or a record of an input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError
from grain_sft.layout import sources_of
from grain_sft.prepare import Tokenizer, load_tokenizer
from grain_sft.storage import files

Ints = npt.NDArray[np.int64]

_BLOCK = 1 << 22  # tokens searched together
_EDGE = 1  # tokens at either end of a text that may be merged with what stands beside it


def documents_with_text(corpus: Corpus, tokenizer: Tokenizer, text: str) -> Ints:
    """Numbers of the documents whose decoded tokens hold `text`, ascending.

    The tokens of the text, but for its first and its last, which depend on what stands beside them, are looked for in all
    tokens; documents that hold them are decoded. Of a text of one or two tokens every document is decoded. A tokenizer
    that divides the middle of a text differently in another context hides it there; look for a shorter text then.

    Raises:
      CorpusError: an empty text, or where documents are can't be told.
      CorpusFileError: files can't be read.
    """
    if not text:
        raise CorpusError("an empty text is in every document: give some words.")
    needles = {tuple(ids[_EDGE:-_EDGE]) for ids in tokenizer.encode([text, f" {text}"])}
    documents = corpus.documents
    if () in needles:
        chosen: Ints = np.arange(len(documents))
    else:
        chosen = _holding(corpus, sorted(needles))
    found = [number for number in chosen.tolist() if text in tokenizer.decode(corpus.document(number).tokens.tolist())]
    return np.array(found, np.int64)


def documents_of_record(corpus: Corpus, record: str) -> Ints:
    """Numbers of the documents that come from a record of an input, ascending; none where no document does.

    Args:
      corpus: one with a file of sources.
      record: its line or row in the input, from 1, as "17"; or with the input's name, the end of it, or its number
        before: "chats.jsonl:17".

    Raises:
      CorpusError: a corpus that does not know, or no such input.
    """
    table = sources_of(corpus)
    if table is None:
        raise CorpusError(
            f"record {record!r}: this corpus does not say where its documents come from. `grain-sft prepare` writes it "
            "beside what it prepares; else ask for --document or --find."
        )
    name, _, line = record.rpartition(":")
    if not (line.isascii() and line.isdigit()):
        raise CorpusError(f"record {record!r}: expected LINE, or INPUT:LINE, such as chats.jsonl:17.")
    inputs = np.unique(table[:, 0]).tolist()
    if name:
        wanted = _inputs(corpus.source_names, name)
        inputs = [number for number in inputs if number in wanted]
    if len(inputs) != 1:
        listed = ", ".join(corpus.source_names) or f"numbers 0 to {int(table[:, 0].max(initial=0))}"
        found = "several inputs fit" if inputs else "no such input"
        raise CorpusError(f"record {record!r}: {found}. Say which of {listed}: INPUT:LINE.")
    return np.flatnonzero((table[:, 0] == inputs[0]) & (table[:, 1] == int(line)))


def find_tokenizer(corpus: Corpus) -> str | None:
    """Where the folder `tokenizer` beside a corpus is; None where there is none.

    Raises:
      CorpusFileError: a remote file system can't say.
    """
    return files.sidecar(corpus.shards[0].path, "tokenizer")


def tokenizer_of(corpus: Corpus, path: str | None = None) -> Tokenizer:
    """The tokenizer of a corpus: at `path`, or the folder `tokenizer` beside its files.

    Raises:
      CorpusError: there is none, or another than the one that the corpus was made with.
      CorpusFileError, MissingExtraError: it can't be loaded.
    """
    if path is None:
        path = find_tokenizer(corpus)
    if path is None:
        raise CorpusError(
            f"{corpus.shards[0].path}: no folder 'tokenizer' is beside the corpus, so text can't be looked for. Give "
            "the path of its tokenizer: --tokenizer."
        )
    tokenizer = load_tokenizer(path)
    if corpus.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise CorpusError(
            f"{path}: is another tokenizer (sha256 {tokenizer.sha256}) than the corpus was made with "
            f"({corpus.tokenizer_sha256}). Give that one with --tokenizer."
        )
    return tokenizer


def _inputs(names: Sequence[str], name: str) -> list[int]:
    if name.isascii() and name.isdigit():
        return [int(name)]
    exact = [number for number, each in enumerate(names) if each == name]
    return exact or [number for number, each in enumerate(names) if each.endswith(f"/{name}")]


def _holding(corpus: Corpus, needles: Sequence[Sequence[int]]) -> Ints:
    """Documents in which one of `needles`, token for token, stands."""
    start, length = corpus.documents
    order = np.argsort(start, kind="stable")
    starts, stops = start[order], (start + length)[order]
    longest = max(map(len, needles))
    found = [np.zeros(0, np.int64)]
    for begin in range(0, corpus.num_tokens, _BLOCK):
        tokens, _ = corpus.read(begin, min(begin + _BLOCK + longest - 1, corpus.num_tokens))
        for needle in needles:
            at = _places(tokens, needle) + begin
            document = starts.searchsorted(at, side="right") - 1
            inside = (document >= 0) & (at + len(needle) <= stops[document])
            found.append(order[document[inside]])
    return np.unique(np.concatenate(found))


def _places(tokens: npt.NDArray[np.unsignedinteger], needle: Sequence[int]) -> Ints:
    """Where `needle` begins in `tokens`."""
    if max(needle) > np.iinfo(tokens.dtype).max or len(tokens) < len(needle):
        return np.zeros(0, np.int64)
    last = len(tokens) - len(needle) + 1
    at = np.flatnonzero(tokens[:last] == needle[0])
    for offset, token in enumerate(needle[1:], 1):
        at = at[tokens[at + offset] == token]
    return at
