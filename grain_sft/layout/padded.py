"""PaddedLayout: one document in each row."""

import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length, check_choice, check_type
from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout, RowSegments
from grain_sft.layout.pieces import LeftOut, Pieces, check_documents, pieces_of
from grain_sft.types import Ints


class PaddedLayout(Layout):
    """One document in each row, in the order of the corpus; the rest of the row is padding.

    Args:
      corpus: Corpus whose documents make the rows; see `Corpus.documents`.
      sequence_length: Number of tokens of a row, padding included.
      keep: Tokens that are kept of a document longer than a row: the "last" or the "first".
      min_tokens: Minimum number of tokens of a document. A shorter document has no row.

    Attributes:
      dropped: Number of documents shorter than `min_tokens`.
      cut_tokens: Number of tokens that are cut off documents longer than a row.

    Raises:
      LayoutError: An argument has an invalid value, or no document is left.
      CorpusError, CorpusFileError: The documents cannot be found.
    """

    kind = "padded"
    follows_documents = one_segment = True

    def __init__(self, corpus: Corpus, sequence_length: int, *, keep: str = "last", min_tokens: int = 2) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        self.corpus, self.sequence_length = corpus, as_sequence_length(sequence_length)
        check_choice("keep", keep, ("last", "first"), LayoutError)
        self.keep, self.min_tokens = keep, as_integer("min_tokens", min_tokens, 1, LayoutError)
        start, length = check_documents(corpus.documents)
        self.highest_token = corpus.documents.highest_token
        self._document: Ints = np.flatnonzero(length >= self.min_tokens)
        if not len(self._document):
            raise LayoutError(f"no document of {len(length)} has {self.min_tokens} tokens or more. Give a smaller min_tokens.")
        whole = length[self._document]  # lengths before the cut
        self._length = np.minimum(whole, self.sequence_length)
        self._start = start[self._document] + (whole - self._length if keep == "last" else 0)
        self.dropped = len(length) - len(whole)
        self.cut_tokens = int((whole - self._length).sum())

    def __len__(self) -> int:
        return len(self._document)

    def row_segments(self, row: int) -> RowSegments:
        return [self._start.item(row)], [self._length.item(row)]

    def pieces(self, rows: Ints) -> Pieces:
        column, segment = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
        columns = column, self._start[rows], self._length[rows], segment, self._document[rows]
        return pieces_of(self.corpus, np.arange(len(rows)), *columns)

    def left_out(self) -> list[LeftOut]:
        """Return what is cut from long documents, the documents that are too short, the padding, and tokens in no document."""
        whole, length = self.corpus.documents.length, self.sequence_length
        kept = int(self._length.sum())
        dropped_tokens = int(whole.sum()) - kept - self.cut_tokens
        # A cut document has more tokens than a row, and at least `min_tokens` tokens. A shorter document is dropped instead.
        num_cut = int(np.count_nonzero(whole > max(length, self.min_tokens - 1)))
        return [
            (f"truncated to the {self.keep} {length:,} tokens", num_cut, self.cut_tokens),
            (f"dropped, shorter than {self.min_tokens} tokens", self.dropped, dropped_tokens),
            ("padding of rows", None, len(self) * length - kept),
            ("in no document", None, self.corpus.num_tokens - int(whole.sum())),
        ]

    def __repr__(self) -> str:
        options = f"keep={self.keep!r}, min_tokens={self.min_tokens}"
        return f"PaddedLayout(sequence_length={self.sequence_length}, {options}, rows={len(self)})"
