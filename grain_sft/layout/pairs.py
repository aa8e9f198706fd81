"""PairsLayout: one preference pair in each row."""

import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length, check_choice, check_type
from grain_sft.corpus import Corpus, pair_lengths
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import LeftOut, Pieces, pieces_of
from grain_sft.types import Ints


class PairsLayout(Layout):
    """One preference pair in each row: a prompt, the chosen response, and the rejected response.

    The prompt is segment 1 of the row, the chosen response segment 2, the rejected response segment 3. A long prompt keeps its
    end, and a long response its beginning, as in MaxText's `DPODataFormatting`. The transform `split_pairs` converts rows to
    the arrays of a trainer.

    Args:
      corpus: Corpus of pairs, in format `pairs`.
      sequence_length: Maximum number of tokens of a prompt and one response together; MaxText's `max_target_length`.
      prompt_length: Maximum number of tokens of a prompt; MaxText's `dpo.max_prompt_length`. None means half of
        `sequence_length`.
      long_pairs: Treatment of a pair whose prompt or response is too long: "truncate" cuts the prompt or response, "drop"
        leaves the pair out.

    Attributes:
      sequence_length: Number of columns of a row, which is more than the argument. With the arguments `sequence_length=1024`
        and `prompt_length=512`, it is 512 + 512 + 512 for a prompt and both responses.
      response_length: Maximum number of tokens of a response.

    Raises:
      LayoutError: Arguments contradict each other, or no pair is left.
      CorpusError, CorpusFileError: The documents are not pairs, or their index file can't be read.
    """

    kind = "pairs"
    follows_documents = of_pairs = True
    segment_names = ("prompt", "chosen", "rejected")

    def __init__(
        self, corpus: Corpus, sequence_length: int, *, prompt_length: int | None = None, long_pairs: str = "truncate"
    ) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        longest = as_sequence_length(as_integer("sequence_length", sequence_length, 2, LayoutError))
        self.corpus = corpus
        prompt_length = longest // 2 if prompt_length is None else prompt_length
        self.prompt_length = as_integer("prompt_length", prompt_length, 1, LayoutError)
        self.response_length = longest - self.prompt_length
        if self.prompt_length >= longest:
            raise LayoutError(f"prompt_length={self.prompt_length}: expected 1 to {longest - 1} ({sequence_length=}).")
        check_choice("long_pairs", long_pairs, ("truncate", "drop"), LayoutError)
        self.long_pairs, self.sequence_length = long_pairs, longest + self.response_length
        lengths = pair_lengths(corpus)
        kept = np.minimum(lengths, [self.prompt_length, self.response_length, self.response_length])
        has_row = lengths.any(axis=1)  # false for a pair without tokens
        if long_pairs == "drop":
            has_row &= (lengths == kept).all(axis=1)
        self._document: Ints = np.flatnonzero(has_row)
        if not len(self._document):
            fixes = {"truncate": "Prepare the corpus again", "drop": "Use long_pairs='truncate', or longer rows"}
            raise LayoutError(f"none of the {len(lengths)} pairs is left. {fixes[long_pairs]}.")
        starts = corpus.documents.start[:, None] + lengths.cumsum(axis=1) - lengths
        starts[:, 0] += lengths[:, 0] - kept[:, 0]  # a long prompt keeps its end
        self._length, self._start = kept[has_row], starts[has_row]
        options = {"prompt_length": self.prompt_length, "pad_token_id": corpus.padding_token_id}
        self.transforms = [{"split_pairs": options}]

    def __len__(self) -> int:
        return len(self._document)

    def pieces(self, rows: Ints) -> Pieces:
        length = self._length[rows]
        row, part = np.nonzero(length)  # part 0 is the prompt; a part without tokens has no piece
        column = (length.cumsum(axis=1) - length)[row, part]
        fields = column, self._start[rows][row, part], length[row, part], part + 1, self._document[rows][row]
        return pieces_of(self.corpus, row, *fields)

    def left_out(self) -> list[LeftOut]:
        """Return counts of the pairs that are cut, of the pairs that are dropped, and of the padding."""
        lengths, tokens = pair_lengths(self.corpus), int(self._length.sum())
        in_rows = lengths[self._document]
        longer, dropped = int((in_rows != self._length).any(axis=1).sum()), len(lengths) - len(in_rows)
        return [
            ("truncated pairs", longer, int(in_rows.sum()) - tokens),
            ("dropped pairs", dropped, int(lengths.sum()) - int(in_rows.sum())),
            ("padding of rows", None, len(self) * self.sequence_length - tokens),
        ]

    def __repr__(self) -> str:
        options = f"prompt_length={self.prompt_length}, response_length={self.response_length}"
        return f"PairsLayout({options}, long_pairs={self.long_pairs!r}, rows={len(self)})"
