"""Events of an audit log: at which step an epoch starts and is complete, and what an entry says of it.

All of it is a function of the pipeline and the step, so that `audit_check` can compute again what `audit` wrote.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grain_sft.layout import PaddedLayout
from grain_sft.receipt import layout_receipt
from grain_sft.sampling import Host
from grain_sft.trace.audit_line import Fields
from grain_sft.version import __version__

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

VERSION = 1
"""Of what entries say."""

LOAD, RESUME, START, COMPLETE = "dataset_load", "resume", "epoch_start", "epoch_complete"

_SHOWN = 10  # rows of an epoch's order
_SEED_AHEAD = {"episode": 0, "openchat": 0, "olmo": 1}
"""Orders whose generator is seeded with seed + epoch, and what comes on top; the others hash both."""


@dataclasses.dataclass(frozen=True)
class Event:
    """An epoch that starts or is complete with the batch of `step`."""

    step: int
    action: str
    epoch: int


class Events:
    """The events of a pipeline, and the entries that say them.

    An epoch starts with the step in which its first row is, and is complete with the step in which its last row is: of
    all rows, less those that don't fill a batch where the sampler drops these. Where batches straddle epochs, one is
    complete and the next starts in the same step. The last epoch of a run is complete with its last step, though with
    fewer rows where these don't fill a batch.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        sampler = pipeline.sampler
        hosts = sampler.host.count if sampler.order == "maxtext" else 1
        # The global batches: of one host that reads all rows; in order "maxtext" the hosts are all like the first.
        self._sampler = type(sampler)(**sampler.__getstate__() | {"host": Host(0, hosts)})
        self._hosts = hosts

    def following(self, step: int) -> Iterator[Event]:
        """The events from `step` on, in order; without end where the epochs are."""
        if self._sampler.num_steps is not None and step >= self._sampler.num_steps:
            return
        epoch, _ = self._sampler.place(step)
        while (span := self._sampler.span(epoch)) is not None:
            if span.first >= step:
                yield Event(span.first, START, epoch)
            if span.last >= step:
                yield Event(span.last, COMPLETE, epoch)
            epoch += 1

    def load(self, hosts: int) -> Fields:
        """What is said of the data of a run with so many hosts."""
        pipeline, sampler = self._pipeline, self._sampler
        return {
            "action": LOAD,
            "audit_version": VERSION,
            "grain_sft": __version__,
            "epoch_seed": sampler.seed,
            "epoch_shuffle": sampler.shuffle,
            "order": sampler.order,
            "num_episodes": sampler.num_instances,
            "num_rows": sampler.num_instances,
            "sequence_length": pipeline.source.layout.sequence_length,
            "global_batch_size": sampler.global_batch_size,
            "steps_per_epoch": sampler.steps_per_epoch,
            "epochs": sampler.epochs,
            "hosts": hosts,
            "corpus": pipeline.source.layout.corpus.fingerprint,
            "layout": self._layout_receipt,
            "receipt_parts": pipeline.receipt.parts,
            "receipt": pipeline.receipt.code,
        }

    def resume(self, step: int) -> Fields:
        """What is said where batches go on at `step`, other than after the batch before it."""
        epoch, before = self._sampler.place(step)
        return {
            "action": RESUME,
            "step": step,
            "epoch": epoch,
            "epoch_offset": before,
            "receipt": self._pipeline.receipt.code,
        }

    def entry(self, event: Event, since: int) -> Fields:
        """What is said of an event in a run whose batches began at step `since`."""
        return self._start(event) if event.action == START else self._complete(event, since)

    def _start(self, event: Event) -> Fields:
        rows = self._first_rows(event.epoch)
        return {
            "action": START,
            "epoch": event.epoch,
            "seed": self._seed(event.epoch),
            "first_episode_ids": self._episodes(rows),
            "first_rows": rows,
            "num_episodes": self._sampler.num_instances,
            "step": event.step,
            "receipt": self._pipeline.receipt.code,
        }

    def _complete(self, event: Event, since: int) -> Fields:
        span = self._sampler.span(event.epoch)
        assert span is not None
        return {
            "action": COMPLETE,
            "epoch": event.epoch,
            "seed_used": self._seed(event.epoch),
            "episodes_seen": span.rows,
            "rows_seen": span.rows,
            "first_step": span.first,
            "since_step": max(span.first, since),
            "step": event.step,
            "receipt": self._pipeline.receipt.code,
        }

    @functools.cached_property
    def _layout_receipt(self) -> str:
        return layout_receipt(self._pipeline.source.layout)

    def _seed(self, epoch: int) -> int:
        seed, order = self._sampler.seed, self._sampler.order
        return seed + epoch + _SEED_AHEAD[order] if order in _SEED_AHEAD else seed

    def _first_rows(self, epoch: int) -> list[int]:
        span = self._sampler.span(epoch)
        assert span is not None
        rows: list[int] = self._sampler.first_rows(epoch, min(_SHOWN, span.rows // self._hosts)).tolist()
        return rows

    def _episodes(self, rows: list[int]) -> list[int | None]:
        """Documents of rows that hold one each, as the corpus numbers them; else the rows themselves."""
        layout = self._pipeline.source.layout
        if not isinstance(layout, PaddedLayout):
            return [*rows]
        return [layout.spans(row)[0].document for row in rows]
