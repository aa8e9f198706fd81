"""Columns of a trace that the layout alone does not give: origins of documents, their numbers, and trainable tokens."""

import itertools

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.corpus import LossReader
from grain_sft.errors import CorpusError, RowIndexError
from grain_sft.layout import Layout, Pieces, RunDocuments, run_documents_named
from grain_sft.pipeline import Pipeline
from grain_sft.source import Element, RowSource
from grain_sft.transforms import trait

Ints = npt.NDArray[np.int64]

_BLOCK_TOKENS = 1 << 23  # tokens whose loss is read together
_LONG = 512  # mean length of pieces from which a call for each is faster than one pass: 16 times at 2,000 tokens


class Sources:
    """Sources of a layout's documents: the inputs in the corpus's file of sources, or else the labels of a mix's shards.

    In a mixture, names have the form `SOURCE/INPUT`, or `SOURCE` where that source of the mixture has only one input.

    Attributes:
      names: Names of the sources; "" for a source without a name.
    """

    def __init__(self, layout: Layout) -> None:
        self.names: tuple[str, ...] = ()
        self._parts: list[tuple[int, int, int, Ints | None, Ints]] = []
        """First shard, document and name of each part, its table of sources, and the source of each shard."""
        shards = 0
        for name, part in layout.parts.items():
            corpus, table = part.corpus, part.sources
            first = layout.first_document(name) if part.follows_documents else 0
            labels = [shard.label for shard in corpus.shards]
            own: tuple[str, ...] = tuple(dict.fromkeys(labels))
            numbers = {label: number for number, label in enumerate(own)}
            by_shard = np.array([numbers[label] for label in labels], np.int64)
            if table is not None:
                count = max(len(corpus.source_names), int(table[:, 0].max(initial=-1)) + 1)
                own = (*corpus.source_names, *[""] * (count - len(corpus.source_names)))
            self._parts.append((shards, first, len(self.names), table, by_shard))
            shards += len(labels)
            if name:
                own = tuple(f"{name}/{each or number}" for number, each in enumerate(own)) if len(own) > 1 else (name,)
            self.names += own

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        """Return the source of each piece, an index into `names`, and its line in the source, from 1; -1 if that is unknown."""
        source, record = np.zeros(len(shards), np.int64), np.full(len(shards), -1, np.int64)
        part = np.array([first for first, *_ in self._parts]).searchsorted(shards, side="right") - 1
        for number, (first_shard, first_document, first_name, table, by_shard) in enumerate(self._parts):
            here = part == number
            if table is None:
                source[here] = by_shard[shards[here] - first_shard] + first_name
                continue
            own = documents[here] - first_document
            if len(own) and int(own.max()) >= len(table):
                raise CorpusError(
                    f"the corpus's file of sources lists {len(table)} documents, but the corpus has a document "
                    f"{int(own.max())}. Give the corpus's own file, or the boundaries that it was made with."
                )
            source[here], record[here] = table[own, 0] + first_name, table[own, 1]
        return source, record


def numbers_of_document(run: RunDocuments, source: str, number: int) -> Ints:
    """Return the numbers in a trace of document `number` of a mixture's source. They are several if stages have different
    corpora under that name. Without a source, `number` is itself that of a trace.

    Raises:
      RowIndexError: No stage has the source or the document.
      CorpusError, CorpusFileError: The documents of a source of windows can't be found.
    """
    name = f"{source}:{number}" if source else str(number)
    named = list(dict.fromkeys(part for layout in run.layouts for part in layout.parts if part))
    if source and source not in named:
        expected = f"expected one of {', '.join(named)}" if named else "the run is not a mixture"
        raise RowIndexError(f"document {name}: no such source; {expected}.")
    return run_documents_named(run, [name])


class TrainableTokens:
    """Counter of the trainable tokens of each piece: those whose `targets_segmentation` is not 0.

    A segment's first token has no input before it, so it is never a target. The corpus's loss files and the transforms before
    `ShiftTargets` decide which of the others take loss. Tokens are read only if there are such transforms.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._source = pipeline, pipeline.source
        before = itertools.takewhile(lambda each: not trait(each, "shifts_targets"), pipeline.transforms)
        self._transforms: list[grain.transforms.Map] = [each for each in before if not trait(each, "trims_columns")]
        corpus = pipeline.source.layout.corpus
        self._loss = LossReader(corpus.loss_files, scattered=True, remote=corpus.remote) if corpus.has_loss else None

    def count(self, rows: Ints, pieces: Pieces) -> Ints:
        """Return the number of trainable tokens of each of the `pieces` of `rows`, which have no `FILL_ROW`."""
        first = (pieces.column if pieces.position is None else pieces.position) == 0
        if self._source.layout.of_pairs:
            first[:] = False  # the first token of a response follows the prompt
        found: Ints = pieces.length - first
        if not self._transforms and self._loss is None:
            return found
        layout = self._source.layout
        per_block = max(1, _BLOCK_TOKENS // layout.sequence_length)
        for block in range(0, len(rows), per_block):
            some = slice(*pieces.row.searchsorted((block, block + per_block)).tolist())
            lengths = pieces.length[some]
            if self._transforms:
                block_rows = rows[block : block + per_block]
                loss = self._element(self._source, block_rows)["loss_mask"].reshape(-1)  # padding included
                offsets = (pieces.row[some] - block) * layout.width(block_rows) + pieces.column[some]
            else:
                assert self._loss is not None
                offsets = lengths.cumsum() - lengths
                loss = self._loss.gather(pieces.shard[some], pieces.start[some], offsets, lengths, int(lengths.sum()))
                loss = loss if loss.dtype == np.bool_ else loss != 0
            found[some] = _count(loss, offsets, lengths) - (loss[offsets] & first[some])
        return found

    def recount(self, counts: Ints, changed: Ints, steps: Ints, rows: Ints, pieces: Pieces) -> None:
        """Correct `counts` for the rows at the indices `changed`, which lack withdrawn documents at their `steps`."""
        for at in changed.tolist():
            element = self._element(self._pipeline.source_at(int(steps[at])), rows[at : at + 1])
            segments, taken = element["segment_ids"][0], element["loss_mask"][0].copy()
            taken[0] = False
            taken[1:] &= (segments[1:] != 0) & (segments[1:] == segments[:-1])
            some = slice(*pieces.row.searchsorted((at, at + 1)).tolist())
            counts[some] = _count(taken, pieces.column[some], pieces.length[some])

    def _element(self, source: RowSource, rows: Ints) -> Element:
        """Return `rows` of `source` after the transforms."""
        element = source.read(rows)
        for transform in self._transforms:
            element = transform.map(element)
        return element


def _count(loss: npt.NDArray[np.bool_], offsets: Ints, lengths: Ints) -> Ints:
    """Return the number of True elements in `loss[offset : offset + length]` for each offset and length."""
    if len(loss) >= _LONG * len(offsets):
        ends = (offsets + lengths).tolist()
        counted = [np.count_nonzero(loss[begin:end]) for begin, end in zip(offsets.tolist(), ends, strict=True)]
        return np.array(counted, np.int64)
    totals = np.zeros(len(loss) + 1, np.int32)
    np.cumsum(loss, dtype=np.int32, out=totals[1:])
    found: Ints = totals[offsets + lengths].astype(np.int64) - totals[offsets]
    return found
