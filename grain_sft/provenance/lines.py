"""Trace: which documents did these steps see? And the other way round: at which steps was this document seen?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import MissingExtraError, RowIndexError
from grain_sft.html_table import html_columns
from grain_sft.layout import FILL_ROW, Layout
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.documents import epochs_of, follows_documents
from grain_sft.provenance.sources import Sources
from grain_sft.provenance.trainable import TrainableTokens
from grain_sft.sampling import BatchSlots, Host, Sampler

if TYPE_CHECKING:
    import pandas

Ints = npt.NDArray[np.int64]

BLOCK_ROWS = 4096
"""Rows traced together: memory is bounded by their pieces."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Pieces of documents in rows of steps, as columns, int64 [lines]: a line for each piece, by step, by row, and in the
    order in which they stand in the row. A document that goes on in the next shard is two pieces of one segment.

    Attributes:
      step: from 0.
      epoch: from 0; of the row, where a step straddles two; in a mixture, of its source. Where the layout packs every epoch
        anew, that epoch.
      row: place in the global batch; see `BatchSlots`.
      host: that reads the row.
      instance: number of the row in the layout; -1 for a row of nothing but padding, which fills the last batch of an
        evaluation. Such a row is one line, -1 in all that follows and 0 tokens.
      segment: number of the document in its row, from 1.
      shard: number of the token file in the corpus.
      start, stop: tokens of the shard.
      document: number in the corpus; -1 in a layout that does not follow documents. In a mixture, numbered through all its
        sources that follow documents, and then through the others.
      source: number in `source_names`: the input that the document came from or, where the corpus has no file of sources,
        the label of its shard. In a mixture with the name of the source before it.
      record: line or row of the document in its input, from 1; -1 where the corpus does not say.
      trainable: tokens of the piece that take loss as targets; see `TrainableTokens`. None where they were not counted.
      source_names: of the sources.
      paths: of the shards.
      receipt: code of the pipeline's receipt.
    """

    step: Ints
    epoch: Ints
    row: Ints
    host: Ints
    instance: Ints
    segment: Ints
    shard: Ints
    start: Ints
    stop: Ints
    document: Ints
    source: Ints
    record: Ints
    trainable: Ints | None
    source_names: tuple[str, ...]
    paths: tuple[str, ...]
    receipt: str

    def __len__(self) -> int:
        return len(self.step)

    def columns(self) -> dict[str, Ints]:
        """The arrays by name; without `trainable` where it was not counted."""
        return {name: getattr(self, name) for name in COLUMNS if getattr(self, name) is not None}

    def select(self, lines: npt.NDArray[np.bool_]) -> Trace:
        """Some of the lines, bool [lines]."""
        return self._with({name: column[lines] for name, column in self.columns().items()})

    def to_pandas(self) -> pandas.DataFrame:
        """Return the lines as a `pandas.DataFrame`: the columns, with the names of sources and the paths of files.

        Raises:
          MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError.of("Trace.to_pandas", "pandas", "pandas") from error
        frame = pandas.DataFrame(self.columns())
        frame.insert(frame.columns.get_loc("shard") + 1, "path", _named(self.paths, self.shard))
        frame["source"] = _named(self.source_names, self.source)
        return frame

    def _repr_html_(self) -> str:
        shown = {name: column[:_SHOWN].tolist() for name, column in self.columns().items()}
        shown["source"] = _named(self.source_names, self.source[:_SHOWN])
        more = f", the first {_SHOWN}" if len(self) > _SHOWN else ""
        return html_columns(f"Trace of {self.receipt}: {len(self):,} lines{more}", shown)

    def _with(self, columns: dict[str, Any]) -> Trace:
        return dataclasses.replace(self, **columns)


COLUMNS = tuple(field.name for field in dataclasses.fields(Trace))[:13]

_SHOWN = 10  # lines in a notebook


def _named(names: Sequence[str], numbers: Ints) -> list[str | None]:
    """Return the name of each number; None for -1."""
    return [None if number < 0 else names[number] for number in numbers.tolist()]


_NOTHING = (-1, -1, 0, 0, -1, -1, -1, 0)
"""Of a row of nothing but padding: the columns from `segment` on."""


def trace(
    pipeline: Pipeline, steps: range, *, host: Host | None = None, trainable: bool = True, block_rows: int = BLOCK_ROWS
) -> Trace:
    """What `steps` of a pipeline see, document by document, without reading tokens.

    Args:
      pipeline: of any host.
      steps: one after the other, such as `range(1000, 7000)`.
      host: only its rows; None: those of all hosts, as many as the pipeline's host has beside it.
      trainable: count tokens that take loss. Reads loss files where the corpus has them, and the tokens too where a
        transform such as NgramFilter looks at them.
      block_rows: rows worked on together.

    Raises:
      RowIndexError: steps that are not there.
      SamplerError: a number of hosts that does not divide the batch.
      CorpusFileError, CorpusError: files that are needed can't be read.
    """
    return _joined(list(iter_trace(pipeline, steps, host=host, trainable=trainable, block_rows=block_rows)))


def iter_trace(
    pipeline: Pipeline, steps: range, *, host: Host | None = None, trainable: bool = True, block_rows: int = BLOCK_ROWS
) -> Iterator[Trace]:
    """The same some steps at a time, in memory that does not grow with the number of steps. At least one is given."""
    sampler, hosts = _hosts(pipeline.sampler, host)
    _check_steps(sampler, steps)
    lines = _Lines(pipeline, trainable)
    per_block = max(1, block_rows * sampler.host.count // (len(hosts) * max(sampler.batch_sizes.sizes)))
    for first in range(steps.start, max(steps.stop, steps.start + 1), per_block):
        some = range(first, min(first + per_block, steps.stop))
        yield lines.of(sampler.slots(some, hosts=hosts))


def find_document(
    pipeline: Pipeline,
    documents: int | Sequence[int] | Ints,
    *,
    host: Host | None = None,
    epochs: int | None = None,
    trainable: bool = True,
) -> Trace:
    """Where documents stand in every epoch: the lines of a trace of all steps that are of these documents.

    In a layout that does not follow documents (windows), the rows that hold some token of them.

    Args:
      pipeline: of any host.
      documents: their numbers in the corpus.
      host: only what it reads; None: all hosts.
      epochs: the first so many are searched; None: all of the sampler, or one where they never end. In a mixture, of every
        source.
      trainable: as in `trace`.

    Raises:
      RowIndexError: no such document.
      SamplerError: as `trace`, and more epochs than there are.
    """
    sampler, hosts = _hosts(pipeline.sampler, host)
    wanted = np.unique(np.atleast_1d(np.asarray(documents, np.int64)))
    layout = pipeline.source.layout
    instances = layout.rows_of_documents(wanted)
    slots = sampler.find_slots(instances, epochs=epochs, hosts=hosts)
    found = _Lines(pipeline, trainable).of(slots)
    return found.select(np.isin(found.document, wanted) | ~follows_documents(layout, found.instance))


class _Lines:
    """From slots to the lines of a trace."""

    def __init__(self, pipeline: Pipeline, trainable: bool) -> None:
        self._layout: Layout = pipeline.source.layout
        self._sources = Sources(self._layout)
        self._trainable = TrainableTokens(pipeline) if trainable else None
        self._paths = tuple(shard.path for shard in self._layout.corpus.shards)
        self._receipt = pipeline.receipt.code

    def of(self, slots: BatchSlots) -> Trace:
        """The lines of all pieces of these rows."""
        real = np.flatnonzero(slots.row != FILL_ROW)
        rows = slots.row[real]
        pieces = self._layout.pieces(rows)
        document = np.full(len(pieces.row), -1, np.int64) if pieces.document is None else pieces.document
        source, record = self._sources.of(pieces.shard, document)
        segment = np.ones(len(pieces.row), np.int64) if pieces.segment is None else pieces.segment
        held: list[Any] = [segment, pieces.shard, pieces.start, pieces.start + pieces.length, document, source, record]
        held.append(None if self._trainable is None else self._trainable.count(rows, pieces))
        at = real[pieces.row]
        empty = np.flatnonzero(slots.row == FILL_ROW)
        if len(empty):
            order = np.argsort(np.append(at, empty), kind="stable")
            at = np.append(at, empty)[order]
            for number, (column, nothing) in enumerate(zip(held, _NOTHING, strict=True)):
                if column is not None:
                    held[number] = np.append(column, np.full(len(empty), nothing))[order]
        mine = slots.select(at)
        epoch = epochs_of(self._layout, mine.epoch, mine.row)
        columns: dict[str, Any] = dict(
            zip(COLUMNS, (mine.step, epoch, mine.slot, mine.host, mine.row, *held), strict=True)
        )
        return Trace(**columns, source_names=self._sources.names, paths=self._paths, receipt=self._receipt)


def _joined(parts: list[Trace]) -> Trace:
    if len(parts) == 1:
        return parts[0]
    names = parts[0].columns()
    return parts[0]._with({name: np.concatenate([part.columns()[name] for part in parts]) for name in names})


def _hosts(sampler: Sampler, host: Host | None) -> tuple[Sampler, range]:
    """The sampler with as many hosts as `host` says, and those of its hosts that are asked for."""
    if host is None:
        return sampler, range(sampler.host.count)
    if host.count != sampler.host.count:
        sampler = sampler.with_host(host)
    return sampler, range(host.index, host.index + 1)


def _check_steps(sampler: Sampler, steps: range) -> None:
    if steps.step != 1:
        raise RowIndexError(f"{steps}: expected steps one after the other.")
    last = sampler.num_steps
    if steps.start < 0 or (last is not None and steps.stop > last):
        wanted = "0 on" if last is None else f"0 to {last - 1}"
        raise RowIndexError(f"steps {steps.start} to {steps.stop - 1}: expected steps from {wanted}.")
