"""Columns of a `Trace` for one stage of a run."""

import collections
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from grain_sft.layout import FILL_ROW, Layout, Pieces
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.columns import Sources, TrainableTokens
from grain_sft.sampling import BatchSlots
from grain_sft.types import Ints

_ZERO_WITHOUT_ROW = ("start", "stop", "trainable", "withdrawn")  # columns that are 0, not -1, where a slot has no row


class Names:
    """Names of one kind, such as the paths of shards, numbered through all stages of a run. Name number i is `texts[i]`.

    A name has the same number in all stages. A name that occurs twice in one stage has two numbers. If the stages have the
    names ("a", "") and ("", ""), `texts` is ("a", "", "").
    """

    def __init__(self, stages: Iterable[Sequence[str]]) -> None:
        occurrences = dict.fromkeys(each for names in stages for each in _occurrences(names))
        self.texts = tuple(name for name, _ in occurrences)
        self._numbers = {each: number for number, each in enumerate(occurrences)}

    def numbers(self, names: Sequence[str]) -> Ints:
        """Return int64 [names + 1]: the number of each name of a stage, then -1. Index -1 means no name, and gives -1."""
        return np.array([*(self._numbers[each] for each in _occurrences(names)), -1], np.int64)


def _occurrences(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each name with the number of equal names before it: ("b", 0) and ("b", 1) for ["b", "b"]."""
    counts: collections.Counter[str] = collections.Counter()
    for name in names:
        yield name, counts[name]
        counts[name] += 1


class RunNames:
    """Names and numbers of sources, shards and documents that the traces of all stages of a run share."""

    def __init__(self, pipeline: Pipeline) -> None:
        layouts = [stage.source.layout for stage in pipeline.stages]
        self.sources_of_stages = [Sources(layout) for layout in layouts]
        self.sources = Names(sources.names for sources in self.sources_of_stages)
        self.shards = Names([shard.path for shard in layout.corpus.shards] for layout in layouts)
        self.documents = pipeline.documents
        self.receipt = pipeline.receipt.code
        # whether any stage withdraws documents: then all traces have the column `withdrawn`
        self.withdraws = any(stage.withdrawals is not None for stage in pipeline.stages)


class StageColumns:
    """Columns of the trace of one stage."""

    def __init__(self, stage: Pipeline, sources: Sources, run: RunNames, *, trainable: bool) -> None:
        self._layout: Layout = stage.source.layout
        self._withdrawals = stage.withdrawals
        self._trainable = TrainableTokens(stage) if trainable else None
        self._sources = sources
        self._run = run
        self._source_numbers = run.sources.numbers(sources.names)
        self._shard_numbers = run.shards.numbers([shard.path for shard in self._layout.corpus.shards])

    def of(self, slots: BatchSlots) -> dict[str, Ints | None]:
        """Return the columns of a `Trace`, by name: int64 [lines] each, in the order of `slots`.

        Each piece of a slot's row has a line. A slot without a row has one line.
        """
        with_row, without_row = np.flatnonzero(slots.row != FILL_ROW), np.flatnonzero(slots.row == FILL_ROW)
        pieces = self._layout.pieces(slots.row[with_row])
        columns = self._columns_of_pieces(pieces, slots.select(with_row))
        slot_of_line = with_row[pieces.row]
        places = slot_of_line.searchsorted(without_row)  # where lines for slots without a row are inserted
        for name, column in columns.items():
            columns[name] = np.insert(column, places, 0 if name in _ZERO_WITHOUT_ROW else -1)
        lines = slots.select(np.insert(slot_of_line, places, without_row))
        # in a trace, "row" is the slot in the batch, and "instance" is the row of the layout
        of_slots = {"step": lines.step, "epoch": self._epochs(lines), "row": lines.slot}
        of_slots |= {"host": lines.host, "instance": lines.row}
        return {**of_slots, "trainable": None, "withdrawn": None, **columns}

    def _columns_of_pieces(self, pieces: Pieces, slots: BatchSlots) -> dict[str, Ints]:
        """Return the columns that depend on pieces. Row i of `pieces` is the row of slot i of `slots`."""
        document = np.full_like(pieces.row, -1) if pieces.document is None else pieces.document
        source, record = self._sources.of(pieces.shard, document)
        columns = {
            "segment": pieces.segments_and_positions[0],
            "shard": self._shard_numbers[pieces.shard],
            "start": pieces.start,
            "stop": pieces.start + pieces.length,
            "document": self._run.documents.of(self._layout, document),
            "source": self._source_numbers[source],
            "record": record,
        }
        if self._withdrawals is not None:
            columns["withdrawn"] = self._withdrawals.tokens_of_pieces(slots.row, slots.step, pieces)
        elif self._run.withdraws:
            columns["withdrawn"] = np.zeros_like(pieces.row)
        if self._trainable is not None:
            columns["trainable"] = self._trainable.count(slots.row, pieces)
            if "withdrawn" in columns:
                changed = np.unique(pieces.row[columns["withdrawn"] > 0])
                self._trainable.recount(columns["trainable"], changed, slots.step, slots.row, pieces)
        return columns

    def _epochs(self, lines: BatchSlots) -> Ints:
        """Return the epoch of each line, int64 [lines].

        A layout may pack several epochs, each in its own way. If it packs 3, epoch 1 of the sampler is epochs 3, 4 and 5 here.
        """
        epochs = lines.epoch.copy()
        with_row = np.flatnonzero(lines.row != FILL_ROW)
        for name, indices, rows in self._layout.split(lines.row[with_row]):
            part = self._layout.parts[name]
            of_part = with_row[indices]
            epochs[of_part] = epochs[of_part] * part.epochs + part.epoch_of(rows)[0]
        return epochs
