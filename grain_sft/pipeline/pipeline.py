"""`Pipeline`, which returns this host's batch of any step."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import grain
import numpy as np

from grain_sft.arguments import as_integers, as_objects, as_pair, keyword_only
from grain_sft.errors import PipelineError, RowIndexError, WrongTypeError
from grain_sft.html_table import html_facts
from grain_sft.layout import RunDocuments
from grain_sft.pipeline.amendments import Amendment, amended, skips_of, withdrawals_of
from grain_sft.pipeline.check_rows import check_rows, mapped
from grain_sft.pipeline.columns import columns_to_read, cut_columns
from grain_sft.pipeline.data_loader import StepDataset, make_data_loader
from grain_sft.pipeline.first_steps import FirstSteps
from grain_sft.pipeline.iterator import PREFETCH, READ_THREADS, PipelineIterator
from grain_sft.pipeline.observer import OBSERVERS, standing_observers
from grain_sft.pipeline.receipt import Receipt, amendment_parts, data_key_of, described, parts_of
from grain_sft.pipeline.run import Observer
from grain_sft.sampling import Host, Sampler, StepMap
from grain_sft.source import Element, MixtureSource, NpyDataSource, RowSource
from grain_sft.storage import activity
from grain_sft.transforms import check_maps, column_reach, reader_of, trait
from grain_sft.types import Ints

if TYPE_CHECKING:
    from jaxtyping import Int64


class Pipeline:
    """Batches by step. The sampler chooses the rows of a step, the source reads the rows, and the transforms map the batch.

    A batch depends only on the step. `pipeline[step]`, `pipeline.iter`, `pipeline.dataset()` and `pipeline.data_loader()`
    return the same arrays with any number of threads and worker processes.

    Arrays that are the same in every batch are shared between batches and read-only.

    Args:
      source: Source of the rows: an `NpyDataSource`, or a `MixtureSource` of several.
      sampler: Sampler of `len(source)` rows. A `MixtureSource` takes a `MixtureSampler` with the same names of sources, in the
        same order.
      transforms: Grain `Map` transforms of batches [rows, L], such as `[NgramFilter(), ShiftTargets()]`.
      audit: Local path of an audit log of the batches that iterators deliver: "logs/audit" writes logs/audit.log and
        logs/audit.jsonl. The first host writes it. Batches of `pipeline[step]`, `dataset()` and `data_loader()` are not logged.
      observers: Observers of the batches, in addition to metrics and the watchdog.
      amendments: Changes of the run, each from a step on, in the order in which they were added.

    Attributes:
      planned_sampler: The argument `sampler`, without the amendments.
      sampler: The sampler with the amendments, which `pipeline[step]` uses.
      withdrawals: Documents that amendments withdraw; None if no amendment withdraws documents.
      described: Text of each transform, for the receipt.

    Raises:
      PipelineError: The sampler is for another number of rows, a transform is not a `Map`, or the audit log is in a bucket.
      RowIndexError: An amendment withdraws a document that does not exist.
      SamplerError: An amendment changes the weight of a source that the run does not have.
    """

    def __init__(
        self,
        source: NpyDataSource | MixtureSource,
        sampler: Sampler,
        transforms: Sequence[grain.transforms.Map] = (),
        *,
        audit: str | os.PathLike[str] | None = None,
        observers: Sequence[Observer] = (),
        amendments: Sequence[Amendment] = (),
    ) -> None:
        check_rows(source, sampler)
        check_maps(transforms)
        self.source, self.transforms, self.planned_sampler = source, tuple(transforms), sampler
        self.amendments = as_objects("amendments", amendments, Amendment)
        self.sampler = amended(sampler, self.amendments)
        if self.sampler.num_steps == self.sampler.first_step:
            raise PipelineError(f"skip: all {sampler.num_steps} steps are skipped. Skip fewer.")
        self.withdrawals = withdrawals_of(source, self.amendments)
        self._reader = reader_of(source, self.transforms)  # pair: function that reads rows, transforms of its result
        self.described = tuple(map(described, self.transforms))  # before a transform's `map` changes its attributes
        self._begin(audit, observers)

    def _begin(self, audit: str | os.PathLike[str] | None, observers: Sequence[Observer]) -> None:
        """Set the attributes that a pipeline with stages has once for all stages."""
        self.audit: Any = None
        objects = as_objects("observers", observers, Observer)
        # standing observers are called for every pipeline anyway
        self.observers: tuple[Observer, ...] = tuple(each for each in objects if each not in standing_observers())
        if audit is not None:
            self.audit = OBSERVERS["audit"](audit)
            self.observers += (self.audit,)
        self.first_steps = FirstSteps()
        self._parts: dict[tuple[int, int], Pipeline] = {}  # pipeline by the range of columns that it reads

    @property
    def stages(self) -> tuple[Pipeline, ...]:
        """Pipelines of the run's stages, in order; this pipeline alone if the run has no stages."""
        return (self,)

    def at(self, step: int) -> Pipeline:
        """Return the pipeline of the stage that has `step`; this pipeline if the run has no stages."""
        return self

    @property
    def documents(self) -> RunDocuments:
        """Numbers of the documents in all stages of the run."""
        return RunDocuments([self.source.layout])

    @property
    def first_step(self) -> int:
        """First step; 0 except in a stage of a run."""
        return self.sampler.first_step

    @property
    def later_stages(self) -> list[str]:
        """Text of each stage after the first: its first step, then all that decides its batches."""
        return []

    def __getitem__(self, step: int) -> Element:
        """Return this host's batch of `step`.

        Raises:
          RowIndexError: The step is negative, or after the last step.
          CorpusFileError: A token file is missing, unreadable, or not the one that was indexed.
        """
        rows = self.sampler.rows(step)  # raises an error if the run lacks the step
        return self.at(step)._batch(step, rows)

    def read(self, step: int, slots: Int64[np.ndarray, " slots"], *, columns: tuple[int, int] | None = None) -> Element:
        """Return the rows `slots` of this host's batch of `step`, or only some columns of these rows: arrays [n, L].

        Args:
          slots: int64 [n], indices of rows in this host's batch. With `Host(0, 1)`, they are slots of the global batch.
          columns: Pair (first column, column after the last); None for all columns.

        Raises:
          RowIndexError, CorpusFileError: As for `pipeline[step]`.
          PipelineError: The batch does not have the columns.
        """
        slots = as_integers("slots", slots, RowIndexError)
        if columns is not None:
            start, stop = as_pair("columns", columns, PipelineError)
            first, part = self._of_columns(start, stop)
            return cut_columns(part.read(step, slots), first, start, stop)
        if not len(slots) and self.source.layout.row_lengths:  # arrays [0, L]: read a row to find the L of this step
            return {key: array[:0] for key, array in self.read(step, np.zeros(1, np.int64)).items()}
        rows = self.sampler.rows_at(step, slots)
        if any(trait(each, "trims_columns") for each in self.transforms):  # the other rows of the batch decide its length
            return {key: array[slots] if np.ndim(array) else array for key, array in self[step].items()}
        return self._batch(step, rows)

    @property
    def reads_columns(self) -> bool:
        """Whether `read` with `columns` reads only these and the columns that they depend on, instead of whole rows."""
        return all(column_reach(stage.transforms) is not None and not stage.source.layout.row_lengths for stage in self.stages)

    def replace(self, *, host: Host | None = None, num_amendments: int | None = None) -> Self:
        """Return a copy without observers, for `host` and with the first `num_amendments` amendments.

        If `host` is None, the copy has the same host. If `num_amendments` is None, the copy has all amendments.
        """
        sampler = self.planned_sampler if host is None else self.planned_sampler.with_host(host)
        return type(self)(self.source, sampler, self.transforms, amendments=self.amendments[:num_amendments])

    def with_first_stages(self, count: int, last_step: int) -> list[Pipeline]:
        """Return [], because this run has no stages. See `StagedPipeline.with_first_stages`."""
        return []

    def _of_columns(self, start: int, stop: int) -> tuple[int, Pipeline]:
        """Return the first column to read for columns [start, stop), and a pipeline that reads from this column on."""
        columns = columns_to_read(self.source.layout, self.transforms, start, stop)
        if columns is None:
            return 0, self
        if columns not in self._parts:
            source = self.source.columns(*columns)
            self._parts[columns] = Pipeline(source, self.planned_sampler, self.transforms, amendments=self.amendments)
        return columns[0], self._parts[columns]

    def source_at(self, step: int) -> RowSource:
        """Return the source that `step` reads, without the documents that amendments up to `step` withdraw."""
        stage = self.at(step)
        return stage.source if stage.withdrawals is None else stage.withdrawals.source_at(step)

    def _batch(self, step: int, rows: Ints) -> Element:
        read, transforms = self._reader  # `read` may apply the first transforms itself
        if self.withdrawals is not None:
            read, transforms = reader_of(self.withdrawals.source_at(step), self.transforms)
        element = read(rows)
        for transform in transforms:
            activity.doing[get_ident()] = activity.TRANSFORMING, transform
            element = mapped(transform, element, len(rows), step)
        return element

    @property
    def num_steps(self) -> int | None:
        """Number of steps; None for a run that never ends."""
        return self.sampler.num_steps

    @property
    def end_step(self) -> int:
        """Step after the last; `sys.maxsize` for a run that never ends."""
        return self.sampler.end_step

    def __len__(self) -> int:
        """Return the number of steps. If the run never ends, raise a TypeError, so that progress bars show no total."""
        if self.num_steps is None:
            raise WrongTypeError("this pipeline never ends, so it has no length. Read num_steps, or set epochs.")
        return self.num_steps

    def __bool__(self) -> bool:
        return True  # without this method, `bool` would call `__len__`

    def __iter__(self) -> PipelineIterator:
        return self.iter()

    @keyword_only("start_step")
    def iter(
        self, *, start_step: int = 0, threads: int = READ_THREADS, prefetch: int = PREFETCH, worker_count: int = 0
    ) -> PipelineIterator:
        """Return an iterator that makes the batches from `start_step` on ahead of time.

        Args:
          start_step: Step of the first batch. A start at a late step takes no longer than at step 0.
          threads: Number of threads that make batches ahead, in this process or in each worker; 0 for none.
          prefetch: Number of batches that are made ahead, in this process or in each worker.
          worker_count: Number of Grain worker processes. 0 is the fastest for data in memory or on a local disk.

        Returns:
          A `grain.DatasetIterator`. The threads and workers end when the iterator is closed or garbage-collected.

        Raises:
          RowIndexError, PipelineError: The pipeline lacks the step, or another argument is not within 0 to 10,000.
        """
        return PipelineIterator(self, start_step, threads=threads, prefetch=prefetch, worker_count=worker_count)

    def dataset(self) -> grain.MapDataset[Element]:
        """Return the batches as a `grain.MapDataset`: element k is step k."""
        return StepDataset(self, 0)

    @keyword_only("worker_count", "start_step")
    def data_loader(self, *, worker_count: int = 0, start_step: int = 0) -> grain.DataLoader:
        """Return a `grain.DataLoader` whose elements are the batches from `start_step` on.

        For a loader of single rows, give the source and the sampler to `grain.DataLoader`, without worker processes.

        Raises:
          RowIndexError, PipelineError: The pipeline lacks the step, or `worker_count` is not within 0 to 10,000.
        """
        return make_data_loader(self, worker_count, start_step)

    def show(self, step: int = 0, *, rows: int | Sequence[int] = 1, tokenizer: str | os.PathLike[str] | None = None) -> None:
        """Print rows of this host's batch of `step`, token by token: documents, segments and loss.

        Args:
          rows: Number of rows, beginning with the first; or a list of indices of rows in this host's batch.
          tokenizer: Path of the tokenizer. None means the tokenizer next to the corpus. Without a tokenizer, ids are printed.

        Raises:
          RowIndexError: The step or a row does not exist.
        """
        # imported here, because `grain_sft.view` imports this package
        importlib.import_module("grain_sft.view").show(self, step, rows, tokenizer)

    @property
    def data_key(self) -> str:
        """Text of all that decides the global batches, without amendments."""
        return data_key_of(self.source, self.planned_sampler, self.described)

    @functools.cached_property
    def receipt(self) -> Receipt:
        """Receipt of the global batches. The first access hashes the rows of the layout. It reads tokens only if the layout
        finds documents by EOS tokens. It raises a CorpusFileError or a CorpusError if the documents can't be found."""
        parts = parts_of(self.source, self.planned_sampler, self.described)
        return Receipt(parts | amendment_parts(self.amendments), StepMap(skips_of(self.amendments)).data_step)

    def _repr_html_(self) -> str:
        source, sampler = self.source, self.sampler
        hosts = f", host {sampler.host.index} of {sampler.host.count}" if sampler.host.count > 1 else ""
        facts = {
            "batch": f"{sampler.global_batch_size:,} rows of {source.layout.sequence_length:,} tokens{hosts}",
            "steps": "no end" if self.num_steps is None else self.num_steps,
            "layout": f"{type(source.layout).__name__}, {len(source):,} rows",
            "order": getattr(sampler, "order", "mixture of " + ", ".join(source.layout.parts)),
            "transforms": ", ".join(self.described) or "none: the keys are the source's",
            "receipt": vars(self).get("receipt"),  # only a cached receipt, because hashing may take long
        }
        return html_facts("Pipeline", facts)

    def __repr__(self) -> str:
        """Return all that decides this host's batches, which Grain compares when it restores a DataLoader."""
        changes = f"[{'; '.join(map(str, self.amendments))}]" if self.amendments else ""
        return f"{self.data_key}{changes}[{self.sampler.host!r}]"
