"""Trace: which documents did these steps see? And at which steps was this document seen?"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.errors import RowIndexError, import_extra
from grain_sft.html_table import html_columns
from grain_sft.layout import FILL_ROW, Layout, run_documents_named
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.columns import Ints, Sources, TrainableTokens
from grain_sft.sampling import BatchSlots, Host, Sampler

if TYPE_CHECKING:
    import pandas
    from jaxtyping import Bool, Int64

BLOCK_ROWS = 4096  # rows traced together; bounds the memory
_SHOWN = 10  # lines in a notebook


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Pieces of documents in the rows of some steps, as columns int64 [lines], ordered by step and slot.

    A document that continues in the next shard is two pieces of one segment. A row that holds only padding is one line of 0
    tokens, whose instance, segment, shard, document, source and record are -1.

    Attributes:
      step: Step, from 0.
      row: Slot in the global batch.
      host: Host that reads the slot.
      epoch: Epoch of the row, from 0; in a mixture, that of its source; in a layout that packs each epoch anew, the layout's.
      instance: Row number in the layout; -1 for a row that holds only padding.
      segment: Number of the segment in its row, from 1.
      shard: Index into `paths`.
      start, stop: First token of the piece in its shard, and the token after its last.
      document: Number of the document in the corpus; -1 in a layout that does not follow documents. A mixture first numbers
        the documents of its sources that follow documents, then those of the others. A run with stages numbers them as
        `RunDocuments` does.
      source: Index into `source_names`. A source is an input of the corpus, or the label of the shard in a corpus without a
        file of sources; see `Sources`.
      record: Line or row of the document in its input, from 1; -1 in a corpus without a file of sources.
      trainable: Number of tokens that take loss, as in `TrainableTokens`; None where they were not counted.
      withdrawn: Number of tokens that an amendment has withdrawn at this step; None in a run without such amendments.
      source_names: Names of the sources.
      paths: Paths of the shards.
      receipt: Code of the pipeline's receipt.
    """

    step: Int64[np.ndarray, " lines"]
    epoch: Int64[np.ndarray, " lines"]
    row: Int64[np.ndarray, " lines"]
    host: Int64[np.ndarray, " lines"]
    instance: Int64[np.ndarray, " lines"]
    segment: Int64[np.ndarray, " lines"]
    shard: Int64[np.ndarray, " lines"]
    start: Int64[np.ndarray, " lines"]
    stop: Int64[np.ndarray, " lines"]
    document: Int64[np.ndarray, " lines"]
    source: Int64[np.ndarray, " lines"]
    record: Int64[np.ndarray, " lines"]
    trainable: Int64[np.ndarray, " lines"] | None
    withdrawn: Int64[np.ndarray, " lines"] | None
    source_names: tuple[str, ...]
    paths: tuple[str, ...]
    receipt: str

    def __len__(self) -> int:
        return len(self.step)

    def columns(self) -> dict[str, Ints]:
        """Return the arrays by name, without those that are None."""
        return {name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)}

    def select(self, lines: Bool[np.ndarray, " lines"]) -> Trace:
        """Return the lines of a mask, bool [lines]."""
        changed: dict[str, Any] = {name: column[lines] for name, column in self.columns().items()}
        return dataclasses.replace(self, **changed)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the lines as a `pandas.DataFrame`, with the names of sources and the paths of shards.

        Raises:
          MissingExtraError: pandas is not installed.
        """
        pandas = import_extra("pandas", "Trace.to_pandas", "pandas", "pandas")
        frame = pandas.DataFrame(self.columns()).assign(source=_named(self.source_names, self.source))
        frame.insert(frame.columns.get_loc("shard") + 1, "path", _named(self.paths, self.shard))
        return frame

    def _repr_html_(self) -> str:
        shown = {name: column[:_SHOWN].tolist() for name, column in self.columns().items()}
        more = f", the first {_SHOWN}" if len(self) > _SHOWN else ""
        named = {"source": _named(self.source_names, self.source[:_SHOWN])}
        return html_columns(f"Trace of {self.receipt}: {len(self):,} lines{more}", shown | named)


def _named(names: Sequence[str], numbers: Ints) -> list[str | None]:
    return [None if number < 0 else names[number] for number in numbers.tolist()]


def trace(
    pipeline: Pipeline, steps: range, *, host: Host | None = None, trainable: bool = True, block_rows: int = BLOCK_ROWS
) -> Trace:
    """Return the documents in the batches of `steps`, piece by piece.

    Args:
      pipeline: Pipeline of any host.
      steps: Consecutive steps, such as `range(1000, 7000)`.
      host: Host whose rows are traced. None traces the rows of all hosts.
      trainable: Whether to count tokens that take loss. This reads loss files, and tokens if a transform such as `NgramFilter`
        needs them.
      block_rows: Number of rows traced together.

    Raises:
      RowIndexError: The pipeline does not have the steps.
      SamplerError: The number of hosts does not divide the batch.
      CorpusFileError, CorpusError: Files can't be read.
    """
    return _joined(list(iter_trace(pipeline, steps, host=host, trainable=trainable, block_rows=block_rows)))


def _joined(parts: Sequence[Trace]) -> Trace:
    """Return the lines of all parts as one trace."""
    columns = [part.columns() for part in parts]
    joined: dict[str, Any] = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    return dataclasses.replace(parts[0], **joined)


def iter_trace(
    pipeline: Pipeline, steps: range, *, host: Host | None = None, trainable: bool = True, block_rows: int = BLOCK_ROWS
) -> Iterator[Trace]:
    """Yield `trace` in parts, one or more steps each, in memory that does not grow with the number of steps."""
    if steps.step != 1:
        raise RowIndexError(f"{steps}: expected consecutive steps. Give a range without a stride.")
    if steps.start < pipeline.first_step or steps.stop > pipeline.end_step:
        last = "on" if pipeline.num_steps is None else f"to {pipeline.num_steps - 1}"
        raise RowIndexError(
            f"steps {steps.start} to {steps.stop - 1}: expected steps from {pipeline.first_step} {last}."
        )
    names = _Names(pipeline)
    for stage, sources in zip(pipeline.stages, names.of_stages, strict=True):
        own = range(max(steps.start, stage.first_step), min(steps.stop, stage.end_step))
        if not own and (steps or stage is not pipeline.stages[0]):
            continue
        sampler, hosts = _hosts(stage.sampler, host)
        lines = _Lines(stage, sources, trainable, names)
        per_block = max(1, block_rows * sampler.host.count // (len(hosts) * max(sampler.batch_sizes.sizes)))
        for first in range(own.start, max(own.stop, own.start + 1), per_block):
            some = range(first, min(first + per_block, own.stop))
            yield lines.of(sampler.slots(some, hosts=hosts))


def find_document(
    pipeline: Pipeline,
    documents: int | Sequence[int] | Ints,
    *,
    host: Host | None = None,
    epochs: int | None = None,
    trainable: bool = True,
) -> Trace:
    """Return the lines of some documents in a trace of all steps.

    In a layout that does not follow documents (windows), these are the lines of the rows that contain a token of the
    documents.

    Args:
      pipeline: Pipeline of any host.
      documents: Numbers of the documents, as in a trace.
      host: Host whose rows are searched. None searches the rows of all hosts.
      epochs: Number of epochs to search, of every source in a mixture. None searches all, or one where they never end.
      trainable: Whether to count tokens that take loss, as in `trace`.

    Raises:
      RowIndexError: The run does not have the document.
      SamplerError: As in `trace`, or the run has fewer epochs.
    """
    names, parts = _Names(pipeline), []
    wanted = run_documents_named(names.documents, np.atleast_1d(np.asarray(documents, np.int64)).tolist())
    for stage, sources in zip(pipeline.stages, names.of_stages, strict=True):
        sampler, hosts = _hosts(stage.sampler, host)
        layout = stage.source.layout
        own = names.documents.within(layout, wanted)
        rows = layout.rows_of_documents(own) if len(own) else own  # the ends of documents may be unknown
        slots = sampler.find_slots(rows, epochs=epochs, hosts=hosts)
        found = _Lines(stage, sources, trainable, names).of(slots)
        kept = np.isin(found.document, wanted)
        for name, at, _ in layout.split(found.instance):
            kept[at] |= not layout.parts[name].follows_documents
        parts.append(found.select(kept))
    return _joined(parts)


def _hosts(sampler: Sampler, host: Host | None) -> tuple[Sampler, range]:
    """Return the sampler for the number of hosts of `host`, and the hosts to trace."""
    if host is None:
        return sampler, range(sampler.host.count)
    if host.count != sampler.host.count:
        sampler = sampler.with_host(host)
    return sampler, range(host.index, host.index + 1)


class _Names:
    """Names of the sources and shards of all stages of a run, numbers of its documents, and whether it withdraws some."""

    def __init__(self, pipeline: Pipeline) -> None:
        layouts = [stage.source.layout for stage in pipeline.stages]
        self.of_stages = [Sources(each) for each in layouts]
        self.sources = _joined_names(each.names for each in self.of_stages)
        self.paths = _joined_names([shard.path for shard in each.corpus.shards] for each in layouts)
        self.documents, self.receipt = pipeline.documents, pipeline.receipt.code
        self.withdraw = any(stage.withdrawals is not None for stage in pipeline.stages)


def _joined_names(of_stages: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the names of all stages. A name that stages repeat occurs as often as in the stage that repeats it most."""
    return tuple(name for name, _ in dict.fromkeys(each for names in of_stages for each in _counted(names)))


def _counted(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return (name, number of equal names before it) of each name."""
    counters: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    return [(name, next(counters[name])) for name in names]


def _numbers_of(own: Sequence[str], names: Sequence[str]) -> Ints:
    """Return the index of each of `own` in `names`, made by `_joined_names`. A last element maps the index -1 to itself."""
    table = {each: number for number, each in enumerate(_counted(names))}
    return np.array([*(table[each] for each in _counted(own)), -1], np.int64)


class _Lines:
    """Maps slots of a stage to the lines of its trace, with the numbers of the whole run."""

    def __init__(self, pipeline: Pipeline, sources: Sources, trainable: bool, names: _Names) -> None:
        self._layout: Layout = pipeline.source.layout
        self._sources, self._all = sources, names
        self._trainable = TrainableTokens(pipeline) if trainable else None
        self._withdrawals = pipeline.withdrawals
        self._source_numbers = _numbers_of(sources.names, names.sources)
        self._shard_numbers = _numbers_of([shard.path for shard in self._layout.corpus.shards], names.paths)

    def of(self, slots: BatchSlots) -> Trace:
        """Return the lines of `slots`, in their order."""
        real, filling = np.flatnonzero(slots.row != FILL_ROW), np.flatnonzero(slots.row == FILL_ROW)
        rows = slots.row[real]
        pieces = self._layout.pieces(rows)
        document = np.full_like(pieces.row, -1) if pieces.document is None else pieces.document
        source, record = self._sources.of(pieces.shard, document)
        segment = np.ones_like(pieces.row) if pieces.segment is None else pieces.segment
        document = self._all.documents.of(self._layout, document)
        columns: dict[str, Any] = {"segment": segment, "document": document, "record": record}
        columns |= {
            "source": self._source_numbers[source],
            "shard": self._shard_numbers[pieces.shard],
            "start": pieces.start,
            "stop": pieces.start + pieces.length,
        }
        if self._withdrawals is not None:
            columns["withdrawn"] = self._withdrawals.tokens_of_pieces(rows, slots.step[real], pieces)
        elif self._all.withdraw:
            columns["withdrawn"] = np.zeros_like(pieces.row)
        if self._trainable is not None:
            columns["trainable"] = self._trainable.count(rows, pieces)
            if "withdrawn" in columns:
                changed = np.unique(pieces.row[columns["withdrawn"] > 0])
                self._trainable.recount(columns["trainable"], changed, slots.step[real], rows, pieces)
        at = np.append(real[pieces.row], filling)
        if len(filling):
            order = np.argsort(at, kind="stable")
            at = at[order]
            for name, column in columns.items():
                nothing = 0 if name in ("start", "stop", "trainable", "withdrawn") else -1
                columns[name] = np.append(column, np.full(len(filling), nothing))[order]
        slots = slots.select(at)
        epoch, not_filled = slots.epoch.copy(), np.flatnonzero(slots.row != FILL_ROW)
        for name, here, own in self._layout.split(slots.row[not_filled]):
            part, here = self._layout.parts[name], not_filled[here]
            epoch[here] = epoch[here] * part.epochs + part.epoch_of(own)[0]
        columns = {"trainable": None, "withdrawn": None} | columns
        columns |= {"source_names": self._all.sources, "paths": self._all.paths, "receipt": self._all.receipt}
        return Trace(step=slots.step, epoch=epoch, row=slots.slot, host=slots.host, instance=slots.row, **columns)
