"""Pipeline: what batch does the trainer get at step k?"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.errors import PipelineError, WrongTypeError
from grain_sft.html_table import html_facts
from grain_sft.pipeline.first_steps import FirstSteps
from grain_sft.pipeline.iterator import PREFETCH, READ_THREADS, PipelineIterator, Steps, make_data_loader
from grain_sft.pipeline.observer import Observer
from grain_sft.pipeline.receipt import Receipt, receipt_of
from grain_sft.sampling import Sampler
from grain_sft.source import Element, MixtureSource, NpyDataSource
from grain_sft.storage import activity
from grain_sft.transforms import ShiftTargets

if TYPE_CHECKING:
    from grain_sft.provenance.audit import AuditLog

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Pipeline:
    """Batches by step: the sampler's rows, read at once by the source, through the transforms in order.

    A step's batch depends on nothing but the step: `pipeline[step]`, `pipeline.iter`, `pipeline.dataset()` and
    `pipeline.data_loader()` give the same arrays, whatever the number of threads and worker processes.

    Arrays that are the same in every batch are shared between batches and read-only; copy one before writing to it.

    Args:
      source: an `NpyDataSource`, or a `MixtureSource` of several.
      sampler: of as many rows as the source has; of a `MixtureSource` a `MixtureSampler` whose sources have the same names.
      transforms: grain `Map` transforms that take batches [rows, L], e.g. `[NgramFilter(), ShiftTargets()]`.
      audit: local path of an audit log of the batches that `iter` hands out, "logs/audit" for logs/audit.log and
        logs/audit.jsonl; see `grain_sft.provenance.audit`. Of all hosts the first writes it. Batches that are taken as
        `pipeline[step]`, or by way of `dataset()` or `data_loader()`, are not in it.
      observers: `Observer`s that are told of the batches, besides those of the process (metrics and the watchdog).

    Raises:
      PipelineError: a sampler for another number of rows, a transform that is no `Map`, or an audit log in a bucket.
    """

    def __init__(
        self,
        source: NpyDataSource | MixtureSource,
        sampler: Sampler,
        transforms: Sequence[grain.transforms.Map] = (),
        *,
        audit: str | os.PathLike[str] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if sampler.num_instances != len(source):
            raise PipelineError(
                f"the sampler is for {sampler.num_instances} rows, but the source has {len(source)}: "
                "make it with IndexSampler(len(source), ...)."
            )
        _check_sources(source, sampler)
        for transform in transforms:
            if isinstance(transform, type) and issubclass(transform, grain.transforms.Map):
                raise PipelineError(
                    f"transform {transform.__name__} is a class. Expected an object of it. Write {transform.__name__}()."
                )
            if not isinstance(transform, grain.transforms.Map):
                raise PipelineError(
                    f"transform {transform!r} is no grain.transforms.Map. A pipeline reads whole batches, so it takes "
                    "no Batch, and every row of every step is kept, so it takes no Filter."
                )
        self.source, self.sampler, self.transforms = source, sampler, tuple(transforms)
        self._read, self._rest = source.read, self.transforms
        if transforms and type(transforms[0]) is ShiftTargets and isinstance(source, NpyDataSource):
            self._read, self._rest = functools.partial(transforms[0].read, source), self.transforms[1:]
        self.observers = tuple(observers)
        self.audit = None if audit is None else _audit_log(audit)
        self.first_steps = FirstSteps()

    def __getitem__(self, step: int) -> Element:
        """This host's batch of `step`.

        Raises:
          RowIndexError: a negative step, or one after the last epoch.
          CorpusFileError: a token file is missing, unreadable, or not the one that was indexed.
        """
        return self._batch(self.sampler.rows(step))

    def read(self, step: int, places: npt.NDArray[np.int64]) -> Element:
        """The rows at `places` of this host's batch of `step`, in that order: arrays [len(places), L].

        With `Host(0, 1)` these are places of the global batch, so that a process can read the rows that its devices hold,
        whichever those are (`grain_sft.integrations.jax_arrays`).

        Args:
          places: int64 [n], each from 0 to the batch's rows - 1.

        Raises: as `pipeline[step]`.
        """
        return self._batch(self.sampler.rows_at(step, places))

    def _batch(self, rows: npt.NDArray[np.int64]) -> Element:
        """Rows of the source, through the transforms."""
        element = self._read(rows)
        for transform in self._rest:
            activity.doing[get_ident()] = activity.TRANSFORMING, transform
            element = transform.map(element)
        return element

    @property
    def num_steps(self) -> int | None:
        """Number of steps; None for a run that never ends."""
        return self.sampler.num_steps

    @property
    def end_step(self) -> int:
        """The step after the last; `sys.maxsize` for a run that never ends."""
        return sys.maxsize if self.sampler.num_steps is None else self.sampler.num_steps

    def __len__(self) -> int:
        """Return the number of steps.

        Raises:
          WrongTypeError: the run never ends. It is a TypeError, so that progress bars count without a total.
        """
        if self.sampler.num_steps is None:
            raise WrongTypeError(
                "this pipeline never ends, so it has no length. Read pipeline.num_steps, which is None then, or give the "
                "sampler epochs=1."
            )
        return self.sampler.num_steps

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> PipelineIterator:
        return self.iter()

    def iter(
        self,
        start_step: int = 0,
        *,
        threads: int = READ_THREADS,
        prefetch: int = PREFETCH,
        worker_count: int = 0,
    ) -> PipelineIterator:
        """Iterator of the batches from `start_step` on, made ahead of time.

        Args:
          start_step: of the first batch. Starting at a late step costs what starting at 0 costs.
          threads: that read ahead, in this process or in each worker. 0 reads when asked.
          prefetch: batches kept ready, in this process or in each worker.
          worker_count: Grain worker processes. 0 is the fastest where the data come from memory or a local disk.

        Returns:
          A `grain.DatasetIterator`; close it, or let it be collected, to stop its threads and workers.

        Raises:
          RowIndexError: a step that is not there.
        """
        return PipelineIterator(self, start_step, threads, prefetch, worker_count)

    def dataset(self) -> grain.MapDataset[Element]:
        """The batches as a `grain.MapDataset`: element k is step k. As long as the pipeline."""
        return Steps(self, 0)

    def data_loader(self, worker_count: int = 0, start_step: int = 0) -> grain.DataLoader:
        """A `grain.DataLoader` whose elements are the batches from `start_step` on.

        Elements are whole batches, so that the number of worker processes changes nothing. For a loader of single
        records give `grain.DataLoader` the source and the sampler themselves, and no worker processes.

        Raises:
          RowIndexError: a step that is not there.
          PipelineError: a negative number of workers.
        """
        return make_data_loader(self, worker_count, start_step)

    def show(
        self,
        step: int = 0,
        *,
        rows: int | Sequence[int] = 1,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        """Print rows of this host's batch of `step`, token by token: documents, segments and loss.

        Args:
          step: from 0.
          rows: number of rows from the first on, or the numbers of rows in the host's batch.
          tokenizer: path of the tokenizer that gives the tokens' text; None means the one beside the corpus. Without one,
            ids are printed.

        Raises:
          RowIndexError: a step or a row that does not exist.
        """
        from grain_sft.view.show import show  # whose package reads pipelines

        show(self, step, rows, tokenizer)

    @property
    def data_key(self) -> str:
        """What decides the global batches, whichever host this is. A transform without a `__repr__` of its own stands
        there with its class and its attributes."""
        transforms = ", ".join(map(described, self.transforms))
        return f"Pipeline({self.source!r}, {self.sampler.data_key}, [{transforms}])"

    @functools.cached_property
    def receipt(self) -> Receipt:
        """A short hash of all that decides the global batches, with its parts. The first time, a plan is hashed."""
        return receipt_of(self)

    def _repr_html_(self) -> str:
        return html_facts("Pipeline", _facts(self))

    def __repr__(self) -> str:
        """What decides this host's batches and nothing else: Grain compares this when it restores a DataLoader."""
        return f"{self.data_key}[{self.sampler.host!r}]"


def _facts(pipeline: Pipeline) -> dict[str, object]:
    """What a notebook shows of a pipeline."""
    source, sampler = pipeline.source, pipeline.sampler
    hosts = f", host {sampler.host.index} of {sampler.host.count}" if sampler.host.count > 1 else ""
    return {
        "batch": f"{sampler.global_batch_size:,} rows of {source.layout.sequence_length:,} tokens{hosts}",
        "steps": "no end" if sampler.num_steps is None else sampler.num_steps,
        "layout": f"{type(source.layout).__name__}, {len(source):,} rows",
        "order": getattr(sampler, "order", "mixture of " + ", ".join(getattr(source, "sources", ()))),
        "transforms": ", ".join(map(described, pipeline.transforms)) or "none: the keys are the source's",
        "receipt": vars(pipeline).get("receipt"),  # once it was asked for: a plan is hashed for it
    }


def _check_sources(source: NpyDataSource | MixtureSource, sampler: Sampler) -> None:
    """Check that a sampler draws from the sources of a mixture as they are numbered."""
    held = {name: len(part) for name, part in source.layout.parts.items()}
    drawn = {stream.name: stream.source.num_instances for stream in sampler.streams}
    if "" not in held and list(drawn.items()) != list(held.items()):
        raise PipelineError(
            f"the sampler draws from sources and rows {drawn}, but the source has {held}, in this order. A MixtureSource "
            "takes a MixtureSampler of its sources."
        )


def _audit_log(path: str | os.PathLike[str]) -> AuditLog:
    from grain_sft.provenance.audit import AuditLog  # whose package reads pipelines

    return AuditLog(path)


def described(transform: grain.transforms.Map) -> str:
    """The transform's own repr, or its class and attributes: the default repr would be another in each process."""
    kind = type(transform)
    if "__repr__" in {name for base in kind.__mro__[:-1] for name in vars(base)}:
        return repr(transform)
    attributes = ", ".join(f"{name}={value!r}" for name, value in sorted(getattr(transform, "__dict__", {}).items()))
    return _ADDRESS.sub("", f"{kind.__module__}.{kind.__qualname__}({attributes})")
