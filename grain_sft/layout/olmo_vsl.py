"""`OlmoVslLayout`, whose rows are chunks of documents, as in OLMo-core's `NumpyVSLDataset`."""

from typing import Annotated, get_args

import msgspec
import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length, check_choice, check_type
from grain_sft.corpus import Corpus, Documents, read_unjoined_documents
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.packing import Boundaries
from grain_sft.layout.pieces import LeftOut, Pieces, check_documents, expand_counts, pieces_of
from grain_sft.types import Ints


class OlmoVslLayout(Layout):
    """Rows of several lengths: the powers of two from `min_sequence_length` to `sequence_length`.

    A document is cut into chunks of `sequence_length` tokens. The remainder is cut into shorter chunks, longest first. Their
    lengths are the powers of two that add up to the remainder. Chunks shorter than `min_sequence_length` are dropped. Each row
    holds one chunk, without padding. The rows of one length are a bucket. A `CurriculumSampler` takes the rows of a batch from
    one bucket.

    Rows are numbered bucket by bucket, shortest first, and by document within a bucket.

    Args:
      corpus: Corpus whose documents are cut.
      sequence_length: Number of tokens of the longest rows, a power of two.
      min_sequence_length: Number of tokens of the shortest rows: a power of two that is less than `sequence_length`.
      boundaries: Ends of documents. "eos" ends a document after each EOS token, as OLMo-core does for local files. Tokens after
        the last EOS of a file are left out. "auto" reads the ends from the boundary files, as OLMo-core does for remote files.
        A document that continues in the next file is cut between the files. Without boundary files, "auto" means "eos".

    Attributes:
      row_counts: Number of rows of each length in `row_lengths`.

    Raises:
      LayoutError: A length is not a power of two, `min_sequence_length` is not below `sequence_length`, every document is
        shorter than `min_sequence_length`, or `boundaries` has another value.
      CorpusError, CorpusFileError: The documents cannot be found.
    """

    kind = "olmo_vsl"
    follows_documents = one_segment = True

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: Annotated[int, msgspec.Meta(ge=2)],
        *,
        min_sequence_length: Annotated[int, msgspec.Meta(ge=1)] = 256,
        boundaries: Boundaries = "auto",
    ) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        self.corpus, self.sequence_length = corpus, as_sequence_length(sequence_length)
        self.min_sequence_length = as_integer("min_sequence_length", min_sequence_length, 1, LayoutError)
        for name in ("sequence_length", "min_sequence_length"):
            if (length := getattr(self, name)) & (length - 1):
                raise LayoutError(f"{name}={length}: expected a power of two, such as {1 << length.bit_length()}.")
        if self.min_sequence_length >= self.sequence_length:
            expected = f"expected less than sequence_length={self.sequence_length}"
            raise LayoutError(f"min_sequence_length={self.min_sequence_length}: {expected}.")
        check_choice("boundaries", boundaries, get_args(Boundaries), LayoutError)
        exponents = range(self.min_sequence_length.bit_length() - 1, self.sequence_length.bit_length())
        self.row_lengths = tuple(1 << exponent for exponent in exponents)
        self.boundaries, self.finder = boundaries, corpus.find_documents(boundaries)
        documents = check_documents(self.finder.documents)
        self.highest_token = documents.highest_token
        has_sidecars = corpus.has_boundary_files and boundaries == "auto"
        # boundary files list the parts of a document that continues in the next file, and OLMo-core cuts each part
        to_cut = read_unjoined_documents(corpus) if has_sidecars else documents
        chunks = [_chunks(to_cut, length, self.sequence_length) for length in self.row_lengths]
        self.row_counts = tuple(len(starts) for _, starts in chunks)
        self._document: Ints = np.concatenate([numbers for numbers, _ in chunks])
        self._start: Ints = np.concatenate([starts for _, starts in chunks])
        if not len(self._start):
            problem = f"min_sequence_length={self.min_sequence_length} leaves no row"
            found = f"the longest of {len(to_cut)} documents has {to_cut.length.max(initial=0)} tokens"
            raise LayoutError(f"{problem}: {found}. Give a smaller min_sequence_length.")
        if has_sidecars:
            # A document that crosses a shard border is two documents in `to_cut`. So after 3 crossed borders, document 10 of
            # `to_cut` is document 7 of `documents`. `crossed[i]` is the number of crossed borders before shard i.
            assert to_cut.shard_ends is not None and documents.shard_ends is not None
            crossed = to_cut.shard_ends - documents.shard_ends
            self._document -= crossed[to_cut.shard_ends.searchsorted(self._document, side="right")]
        self._ends: Ints = np.cumsum(self.row_counts)
        self._lengths = np.array(self.row_lengths, np.int64)
        self._num_tokens = int(np.dot(self.row_counts, self._lengths))
        self._dropped = int(to_cut.length.sum()) - self._num_tokens

    def __len__(self) -> int:
        return len(self._start)

    def width(self, rows: Ints) -> int:
        # longer rows have higher numbers
        return self.row_lengths[int(self._bucket(rows.max()))] if len(rows) else self.sequence_length

    def pieces(self, rows: Ints) -> Pieces:
        column, segment, bucket = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64), self._bucket(rows)
        columns = column, self._start[rows], self._lengths[bucket], segment, self._document[rows]
        pieces = pieces_of(self.corpus, np.arange(len(rows)), *columns)
        have_no_padding = not len(rows) or (bucket == bucket[0]).all()
        return pieces._replace(segment=None, position=None) if have_no_padding else pieces

    def _bucket(self, rows: Ints) -> Ints:
        """Return the bucket of each row: the index of the row's length in `row_lengths`."""
        return self._ends.searchsorted(rows, side="right")

    @property
    def statistics(self) -> dict[str, int]:
        count = len(self)
        return {"rows": count, "tokens": self._num_tokens, "padding": 0, "segments": count, "max_segments": 1}

    def left_out(self) -> list[LeftOut]:
        outside = self.corpus.num_tokens - self._num_tokens - self._dropped
        shortest = f"ends of documents, shorter than {self.min_sequence_length:,} tokens"
        return [(shortest, None, self._dropped), ("in no document", None, outside)]

    def __repr__(self) -> str:
        lengths = f"sequence_length={self.sequence_length}, min_sequence_length={self.min_sequence_length}"
        return f"OlmoVslLayout({lengths}, boundaries={self.boundaries!r}, rows={len(self)})"


def _chunks(documents: Documents, length: int, longest: int) -> tuple[Ints, Ints]:
    """Return two arrays with an item for each chunk of `length` tokens: its document, and its token offset in the corpus.

    With `longest` 8, a document of 29 = 3 * 8 + 4 + 1 tokens has three chunks of 8 tokens, then one of 4 and one of 1. There is
    a chunk of 4 because the bit of value 4 is set in 29. The chunk begins at token 24, the sum of the higher bits: 16 + 8.
    """
    if length < longest:
        document = np.flatnonzero(documents.length & length)
        tokens_before = documents.length[document] & -(2 * length)
        return document, documents.start[document] + tokens_before
    document, number = expand_counts(documents.length // length)
    return document, documents.start[document] + number * length
