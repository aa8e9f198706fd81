"""MaterializedLayout: rows that `grain-sft pack --materialize` wrote to disk."""

from grain_sft.arguments import as_sequence_length, check_type
from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import LeftOut, Pieces, expand_counts, pieces_of
from grain_sft.types import Ints


class MaterializedLayout(Layout):
    """Rows that `grain-sft pack --materialize` wrote, in the order of the packing.

    Advantages: the fastest layout to read; a run starts without a plan and without a search for documents. Disadvantages: the
    files also hold positions and segments, which take at most 4 bytes a token in rows of up to 65,536 tokens and 255 segments.
    Another row length or algorithm needs new files.

    Args:
      corpus: Corpus in the format `rows`.
      sequence_length: Number of tokens that a row must have; None for any number.

    Raises:
      LayoutError: The corpus has no rows, or rows of another length.
    """

    kind = "materialized"
    follows_documents = True
    _rows_receipt = property(repr)  # only the options, because `receipt` also has a fingerprint of the files of the rows

    def __init__(self, corpus: Corpus, sequence_length: int | None = None) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        if corpus.rows is None:
            fix = "Write rows with `grain-sft pack --materialize` and open their folder, or use PackedLayout"
            raise LayoutError(f"{corpus.shards[0].path}: a corpus without rows. {fix}.")
        self.corpus, self.row_format, self.sequence_length = corpus, corpus.rows, corpus.rows.sequence_length
        if sequence_length is not None and as_sequence_length(sequence_length) != self.sequence_length:
            problem = f"sequence_length={sequence_length}: the rows were written with {self.sequence_length}"
            raise LayoutError(f"{problem}. Give that.")
        # stored because each batch calls `__len__`: with a division in each call, reading long documents takes 2 % longer
        self._num_rows = corpus.num_tokens // self.sequence_length

    def __len__(self) -> int:
        return self._num_rows

    def pieces(self, rows: Ints) -> Pieces:
        """Return the segments of the stored rows. A document of a corpus in the format `rows` is one segment of one row."""
        starts, lengths = self.corpus.documents
        first_token = rows * self.sequence_length
        first_document = starts.searchsorted(first_token)
        end_document = starts.searchsorted(first_token + self.sequence_length)
        row, segment = expand_counts(end_document - first_document)
        document = first_document[row] + segment
        start, length = starts[document], lengths[document]
        column = start - first_token[row]
        if (beyond := column + length > self.sequence_length).any():
            problem = f"segment {document[beyond][0]} ends after its row, so a file documents_NNNN.idx is damaged"
            raise LayoutError(f"{self.corpus.shards[0].path}: {problem}. Write the rows again.")
        return pieces_of(self.corpus, row, column, start, length, segment + 1, document)

    def left_out(self) -> list[LeftOut]:
        return []

    def __repr__(self) -> str:
        return f"MaterializedLayout(sequence_length={self.sequence_length}, rows={len(self)})"
