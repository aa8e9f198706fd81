"""Columns of a trace that are not in the layout: the source of each document, and the number of trainable tokens."""

import itertools
from typing import NamedTuple

import numpy as np

from grain_sft.corpus import LossReader
from grain_sft.errors import CorpusError, PipelineError, RowIndexError
from grain_sft.layout import Layout, Pieces, RunDocuments, run_documents_named
from grain_sft.pipeline import Pipeline
from grain_sft.registry import entry_errors, name_of
from grain_sft.source import RowSource
from grain_sft.transforms import trait
from grain_sft.types import Array, Bools, Ints

_BLOCK_TOKENS = 1 << 23  # number of tokens whose loss is read at once


class _Part(NamedTuple):
    """One part of a layout: the whole corpus, or one source of a mixture. Each part numbers its inputs (`Sources`) from 0."""

    first_shard: int  # number of the part's first shard in the layout
    first_document: int  # number of the part's first document in the layout
    first_name: int  # index in `Sources.names` of input 0
    table: Ints | None  # int64 [documents, 2], input and record of each document; None without a file of sources
    source_of_shard: Ints  # int64 [shards], input of each shard; used only if `table` is None


class Sources:
    """Sources of a layout's documents: the inputs, such as `chats.jsonl`, that the documents were made from.

    If a corpus has no file of sources, each label of its shards counts as an input. `names` has "" for an input without a name.

    In a mixture, the name of an input begins with the name of its source of the mixture: `code/a.jsonl`, or `code/0` if input 0
    has no name. If a source of the mixture has only one input, the input has the name of that source: `code`.
    """

    def __init__(self, layout: Layout) -> None:
        self.names: tuple[str, ...] = ()
        self._parts: list[_Part] = []
        first_shard = 0
        for name, part in layout.parts.items():
            labels = [shard.label for shard in part.corpus.shards]
            number_of_label = {label: number for number, label in enumerate(dict.fromkeys(labels))}
            source_of_shard = np.array([number_of_label[label] for label in labels], np.int64)
            first_document = layout.first_document(name) if part.follows_documents else 0
            table = part.sources
            self._parts.append(_Part(first_shard, first_document, len(self.names), table, source_of_shard))
            first_shard += len(labels)
            inputs = tuple(number_of_label)
            if table is not None:
                # the table may have more inputs than the corpus has names
                num_unnamed = int(table[:, 0].max(initial=-1)) + 1 - len(part.corpus.source_names)
                inputs = (*part.corpus.source_names, *[""] * num_unnamed)
            if name and len(inputs) == 1:
                inputs = (name,)
            elif name:
                inputs = tuple(f"{name}/{input_name or number}" for number, input_name in enumerate(inputs))
            self.names += inputs

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        """Return the source and the record of each piece: int64 [pieces] each.

        A source is an index into `names`. A record is the number of a line or row in the source, from 1; -1 if it is unknown.
        In a part with a file of sources, a piece outside all documents has the source -1.

        Args:
          shards, documents: int64 [pieces], shard and document of each piece, by their numbers in the layout.
        """
        source, record = np.zeros_like(shards), np.full_like(shards, -1)
        for part in self._parts:
            in_part = (shards >= part.first_shard) & (shards < part.first_shard + len(part.source_of_shard))
            if part.table is None:  # the labels of shards count as inputs, and records are unknown
                source[in_part] = part.source_of_shard[shards[in_part] - part.first_shard] + part.first_name
                continue
            source[in_part] = -1
            in_part &= documents >= 0
            number_in_part = documents[in_part] - part.first_document
            last = int(number_in_part.max(initial=-1))
            if last >= len(part.table):
                problem = f"the file of sources lists {len(part.table)} documents, but the corpus has a document {last}"
                raise CorpusError(f"{problem}. Give the corpus's own file, or the boundaries that it was made with.")
            source[in_part] = part.table[number_in_part, 0] + part.first_name
            record[in_part] = part.table[number_in_part, 1]
        return source, record


def numbers_of_document(run: RunDocuments, source: str, number: int) -> Ints:
    """Return the numbers that a trace prints for document `number` of `source`.

    The result has several numbers if stages of the run read different corpora under the name `source`.

    Args:
      run: Numbers of the documents of the run.
      source: Name of a source of a mixture; "" for a run that is not a mixture.
      number: Number of the document in the source.

    Raises:
      RowIndexError: No stage has the source or the document.
      CorpusError, CorpusFileError: The layout is windows, and the ends of the documents can't be found.
    """
    name = f"{source}:{number}" if source else str(number)
    sources = list(dict.fromkeys(each for layout in run.layouts for each in layout.parts if each))  # "" is not a source
    if source and source not in sources:
        expected = f"expected one of {', '.join(sources)}" if sources else "the run is not a mixture"
        raise RowIndexError(f"document {name}: no such source; {expected}.")
    return run_documents_named(run, [name])


class TrainableTokens:
    """Counter of trainable tokens: those whose `targets_segmentation` is not 0.

    The first token of a segment has no input before it, so it is not trainable. The loss mask decides for all other tokens. In
    a preference pair, the mask also decides for the first token of a response, because the prompt is the input before it.

    A transform before `ShiftTargets`, such as `NgramFilter`, may change the mask. Then the counter reads all rows' tokens. A
    transform that removes the mask, such as one that makes targets in its own way, counts as `ShiftTargets` here.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        before_shift = itertools.takewhile(lambda each: not trait(each, "shifts_targets"), pipeline.transforms)
        # a transform that cuts off columns of padding changes no mask
        self._transforms = [each for each in before_shift if not trait(each, "trims_columns")]
        corpus = pipeline.source.layout.corpus
        self._loss = LossReader(corpus.loss_files, scattered=True, remote=corpus.remote) if corpus.has_loss else None

    def count(self, rows: Ints, pieces: Pieces) -> Ints:
        """Return the number of trainable tokens of each piece, int64 [pieces].

        Args:
          rows: int64 [rows], numbers of rows in the layout. Rows that only fill a batch (`FILL_ROW`) are not accepted.
          pieces: Pieces of `rows`.
        """
        layout = self._pipeline.source.layout
        _, position = pieces.segments_and_positions
        lacks_input = position == 0  # whether no input precedes the piece's first token
        if layout.of_pairs:
            lacks_input[:] = False
        counts: Ints = pieces.length - lacks_input
        if not self._transforms and self._loss is None:
            return counts
        per_block = max(1, _BLOCK_TOKENS // layout.sequence_length)
        for begin in range(0, len(rows), per_block):
            in_block = slice(*pieces.row.searchsorted((begin, begin + per_block)).tolist())
            lengths = pieces.length[in_block]
            if self._transforms:  # `loss` will be the mask of whole rows, with their padding
                block_rows = rows[begin : begin + per_block]
                loss = self._masks(self._pipeline.source, block_rows)[0].reshape(-1)
                offsets = (pieces.row[in_block] - begin) * layout.width(block_rows) + pieces.column[in_block]
            else:  # `loss` will be the masks of the pieces, one after the other
                assert self._loss is not None
                offsets = lengths.cumsum() - lengths
                shards, starts = pieces.shard[in_block], pieces.start[in_block]
                loss = self._loss.gather(shards, starts, offsets, lengths, int(lengths.sum())).astype(bool, copy=False)
            # `offsets` are the indices of the pieces' first tokens in `loss`
            first_takes_loss = loss[offsets] & lacks_input[in_block]
            counts[in_block] = _count(loss, offsets, lengths) - first_takes_loss
        return counts

    def recount(self, counts: Ints, changed: Ints, steps: Ints, rows: Ints, pieces: Pieces) -> None:
        """Correct `counts` in place for the rows with documents that an amendment has withdrawn.

        Args:
          counts: Result of `count` for `rows` and `pieces`.
          changed: int64 [n], indices in `rows` of the rows with withdrawn documents.
          steps: int64 [rows], step at which each of `rows` is read.
          rows, pieces: As in `count`.
        """
        for index in changed.tolist():
            source = self._pipeline.source_at(int(steps[index]))
            (trainable,), (segments,) = self._masks(source, rows[index : index + 1])
            # a token is trainable only if the token before it is of the same segment; segment 0 is padding or withdrawn
            trainable[0] = False
            trainable[1:] &= (segments[1:] != 0) & (segments[1:] == segments[:-1])
            of_row = slice(*pieces.row.searchsorted((index, index + 1)).tolist())
            counts[of_row] = _count(trainable, pieces.column[of_row], pieces.length[of_row])

    def _masks(self, source: RowSource, rows: Ints) -> tuple[Bools, Array]:
        """Return the loss masks and the segment ids of `rows` as they are before `ShiftTargets`, [rows, L], as new arrays.

        A transform may have cut off the last columns. These columns are 0.
        """
        element = source.read(rows)
        for transform in self._transforms:
            with entry_errors(PipelineError, f"transform {name_of(type(transform))}", "Fix its code, or its options."):
                changed = transform.map(element)
            if not isinstance(changed, dict) or not changed.keys() >= {"loss_mask", "segment_ids"}:
                break  # the transform makes targets of the mask, as `ShiftTargets` does
            element = changed
        width = source.layout.width(rows)
        arrays = (element[name][:, :width] for name in ("loss_mask", "segment_ids"))
        loss, segments = (np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays)
        return loss.astype(np.bool_), segments


def _count(loss: Bools, offsets: Ints, lengths: Ints) -> Ints:
    """Return the number of True elements in `loss[offset : offset + length]` for each offset and length."""
    borders = np.stack([offsets, offsets + lengths], axis=1)
    # Sum i is that of the elements from border i to border i + 1, so every other sum is that of a piece. The last border may be
    # the end of `loss`, hence `append`. Where two borders are equal, `reduceat` returns an element, not 0, hence `where`.
    sums = np.add.reduceat(np.append(loss, False), borders.reshape(-1), dtype=np.int32)
    return np.where(lengths > 0, sums[::2], 0).astype(np.int64)
