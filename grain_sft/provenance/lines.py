"""Trace: the documents that some steps read, or the steps that read some documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.errors import RowIndexError, import_extra
from grain_sft.html_table import html_columns
from grain_sft.layout import run_documents_named
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.stage_columns import RunNames, StageColumns
from grain_sft.sampling import Host, Sampler
from grain_sft.types import Ints

if TYPE_CHECKING:
    import pandas
    from jaxtyping import Bool, Int64

BLOCK_ROWS = 4096  # rows traced together; bounds the memory
_SHOWN = 10  # lines that a notebook shows


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Lines of a trace, as columns int64 [lines], ordered by step and slot.

    A line is a piece: consecutive tokens of one document in one shard, read in one row. A row that holds only padding has one
    line of 0 tokens. In this line, instance, segment, shard, document, source and record are -1. In a mixture, epoch is -1 too.

    Attributes:
      step: Step, from 0.
      row: Slot in the global batch.
      host: Host that reads the slot.
      epoch: Epoch of the row, from 0. In a mixture, it is the epoch of the row's source.
      instance: Number of the row in the layout.
      segment: Number of the segment in its row, from 1.
      shard: Index into `paths`.
      start, stop: First token of the piece in its shard, and the token after its last one.
      document: Number of the document; -1 in a layout that does not follow documents, such as windows. A run of one corpus
        numbers documents as the corpus does. In a mixture of sources with 100 and 50 documents, the second source has the
        numbers 100 to 149. If a later stage of this run reads other documents, these have numbers from 150 on.
      source: Index into `source_names`. A source is a file that the corpus was prepared from. If the corpus does not record
        these files, the sources are the labels of its shards, such as "code" and "web". If the corpus
        records these files, tokens outside all documents have the source -1.
      record: Line or row of the document in its source, from 1; -1 if the corpus does not record it.
      trainable: Number of tokens that take loss; None if the trace does not count these tokens.
      withdrawn: Number of tokens that an amendment has withdrawn at this step; None in a run without such amendments.
      source_names: Names of the sources; "" for a source without a name.
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
        """Return the columns by name. `trainable` and `withdrawn` are left out if they are None."""
        return {name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)}

    def select(self, lines: Bool[np.ndarray, " lines"]) -> Trace:
        """Return the lines at which the mask `lines` is True."""
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
    """Return the name of each number; None for -1."""
    return [None if number < 0 else names[number] for number in numbers.tolist()]


def trace(
    pipeline: Pipeline, steps: range, *, host: Host | None = None, trainable: bool = True, block_rows: int = BLOCK_ROWS
) -> Trace:
    """Return the pieces of documents in the batches of `steps`.

    Args:
      pipeline: Pipeline of any host.
      steps: Consecutive steps, such as `range(1000, 7000)`.
      host: Host whose rows are traced. None traces the rows of all hosts.
      trainable: Whether to count tokens that take loss. The count reads loss files. If a transform such as `NgramFilter` may
        change the loss mask, the count also reads the tokens of all rows; else, those of rows with withdrawn documents.
      block_rows: Number of rows traced together.

    Raises:
      RowIndexError: The pipeline does not have the steps.
      SamplerError: The number of hosts does not divide the batch.
      CorpusFileError, CorpusError: Files can't be read.
    """
    return _concatenated(list(iter_trace(pipeline, steps, host=host, trainable=trainable, block_rows=block_rows)))


def _concatenated(parts: Sequence[Trace]) -> Trace:
    columns = [part.columns() for part in parts]
    concatenated: dict[str, Any] = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    return dataclasses.replace(parts[0], **concatenated)


def iter_trace(
    pipeline: Pipeline, steps: range, *, host: Host | None = None, trainable: bool = True, block_rows: int = BLOCK_ROWS
) -> Iterator[Trace]:
    """Yield the result of `trace` in parts of one or more steps. The memory does not grow with the number of steps."""
    if not isinstance(steps, range) or steps.step != 1:
        raise RowIndexError(f"{steps}: expected consecutive steps. Give a range without a stride.")
    if steps.start < pipeline.first_step or steps.stop > pipeline.end_step:
        last = "on" if pipeline.num_steps is None else f"to {pipeline.num_steps - 1}"
        raise RowIndexError(f"{steps}: expected steps from {pipeline.first_step} {last}.")
    names = RunNames(pipeline)
    for stage, sources in zip(pipeline.stages, names.sources_of_stages, strict=True):
        steps_of_stage = range(max(steps.start, stage.first_step), min(steps.stop, stage.end_step))
        # skip a stage without steps; but if `steps` is empty, the first stage yields a trace without lines
        if not steps_of_stage and (steps or stage is not pipeline.stages[0]):
            continue
        sampler, hosts = _hosts(stage.sampler, host)
        sampler.batch_sizes.check_from(steps_of_stage.start, sampler.host.count, steps_of_stage.stop)
        columns = StageColumns(stage, sources, names, trainable=trainable)
        rows_per_step = len(hosts) * max(sampler.batch_sizes.sizes) // sampler.host.count
        steps_per_block = max(1, block_rows // rows_per_step)
        for first in steps_of_stage[::steps_per_block] or [steps_of_stage.start]:
            block = range(first, min(first + steps_per_block, steps_of_stage.stop))
            yield _trace(columns.of(sampler.slots(block, hosts=hosts)), names)


def _trace(columns: Mapping[str, Any], names: RunNames) -> Trace:
    return Trace(**columns, source_names=names.sources.texts, paths=names.shards.texts, receipt=names.receipt)


def find_document(
    pipeline: Pipeline,
    documents: int | Sequence[int] | Ints,
    *,
    host: Host | None = None,
    epochs: int | None = None,
    trainable: bool = True,
) -> Trace:
    """Return the lines of `documents` in the trace of all steps.

    For a layout of windows, return all lines of each row that has a token of `documents`.

    Args:
      pipeline: Pipeline of any host.
      documents: Numbers of the documents, as in a trace.
      host: Host whose rows are searched. None searches the rows of all hosts.
      epochs: Number of epochs to search; in a mixture, number of epochs of each source. None searches all epochs; of a
        source that is read without end, only those up to the epoch in which the last stage begins (epoch 0 without stages).
      trainable: Whether to count tokens that take loss, as in `trace`.

    Raises:
      RowIndexError: The run does not have one of the documents.
      SamplerError: The number of hosts does not divide the batch, or a run without stages has fewer than `epochs` epochs.
    """
    names = RunNames(pipeline)
    wanted = run_documents_named(names.documents, np.atleast_1d(documents).tolist())
    parts = []
    for stage, sources in zip(pipeline.stages, names.sources_of_stages, strict=True):
        sampler, hosts = _hosts(stage.sampler, host)
        layout = stage.source.layout
        documents_of_stage = names.documents.within(layout, wanted)
        # do not call `rows_of_documents` without documents: it would fail for a corpus whose documents have unknown ends
        rows = layout.rows_of_documents(documents_of_stage) if len(documents_of_stage) else documents_of_stage
        most = sampler.epochs if len(pipeline.stages) > 1 else None  # a stage may have fewer epochs than the run
        own_epochs = epochs if epochs is None or most is None else min(epochs, most)
        slots = sampler.find_slots(rows, epochs=own_epochs, hosts=hosts)
        lines = _trace(StageColumns(stage, sources, names, trainable=trainable).of(slots), names)
        kept = np.isin(lines.document, wanted)
        for name, indices, _ in layout.split(lines.instance):
            if not layout.parts[name].follows_documents:
                kept[indices] = True
        parts.append(lines.select(kept))
    return _concatenated(parts)


def _hosts(sampler: Sampler, host: Host | None) -> tuple[Sampler, range]:
    """Return a sampler for `host.count` hosts, and the indices of the hosts to trace: all if `host` is None."""
    if host is None:
        return sampler, range(sampler.host.count)
    return sampler.with_host(host), range(host.index, host.index + 1)
