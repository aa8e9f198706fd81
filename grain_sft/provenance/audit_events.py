"""Events of an audit log: at which step an epoch starts and is complete, and what an entry says of it.

All of it is a function of the pipeline and the step, so that `audit_check` can compute again what `audit` wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grain_sft.layout import Layout
from grain_sft.pipeline import layout_receipt
from grain_sft.provenance.audit_line import Fields
from grain_sft.sampling import EpochStream
from grain_sft.version import __version__

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

VERSION = 1
"""Of what entries say."""

LOAD, RESUME, START, COMPLETE = "dataset_load", "resume", "epoch_start", "epoch_complete"

_SHOWN = 10  # rows of an epoch's order


@dataclasses.dataclass(frozen=True)
class Event:
    """An epoch that starts or is complete with the batch of `step`; of a mixture, an epoch of one of its sources."""

    step: int
    action: str
    epoch: int
    stream: int = 0


class Events:
    """The events of a pipeline, and the entries that say them.

    An epoch starts with the step in which its first row is, and is complete with the step in which its last row is: of
    all rows, less those that don't fill a batch where the sampler drops these. Where batches straddle epochs, one is
    complete and the next starts in the same step. The last epoch of a run is complete with its last step, though with
    fewer rows where these don't fill a batch.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._sampler = pipeline.sampler
        self.streams = pipeline.sampler.streams

    def following(self, step: int) -> Iterator[Event]:
        """The events from `step` on, in order; without end where the epochs are."""
        if self._sampler.num_steps is not None and step >= self._sampler.num_steps:
            return iter(())
        found = [self._following(step, number) for number in range(len(self.streams))]
        return heapq.merge(*found, key=lambda event: event.step)

    def _following(self, step: int, number: int) -> Iterator[Event]:
        stream = self.streams[number]
        epoch, _ = stream.begin(step)
        while (span := stream.span(epoch)) is not None:
            if span.first >= step:
                yield Event(span.first, START, epoch, number)
            if span.last >= step:
                yield Event(span.last, COMPLETE, epoch, number)
            epoch += 1

    def load(self, hosts: int) -> Fields:
        """What is said of the data of a run with so many hosts."""
        pipeline, sampler = self._pipeline, self._sampler
        rows = [stream.source for stream in self.streams]
        if sampler.steps_per_epoch is None:
            how: Fields = {
                "sources": [stream.name for stream in self.streams],
                "epoch_seed": [each.seed for each in rows],
                "epoch_shuffle": [each.shuffle for each in rows],
                "order": [each.order for each in rows],
                "rows_of_sources": [each.num_instances for each in rows],
                "epochs": [each.epochs for each in rows],
            }
        else:
            how = {
                "epoch_seed": rows[0].seed,
                "epoch_shuffle": rows[0].shuffle,
                "order": rows[0].order,
                "steps_per_epoch": sampler.steps_per_epoch,
                "epochs": sampler.epochs,
            }
        return {
            "action": LOAD,
            "audit_version": VERSION,
            "grain_sft": __version__,
            **how,
            "num_episodes": sampler.num_instances,
            "num_rows": sampler.num_instances,
            "sequence_length": pipeline.source.layout.sequence_length,
            "global_batch_size": sampler.global_batch_size,
            "hosts": hosts,
            "corpus": pipeline.source.layout.corpus.ends_fingerprint,
            "layout": self._layout_receipt,
            "receipt_parts": pipeline.receipt.parts,
            "receipt": pipeline.receipt.code,
        }

    def resume(self, step: int) -> Fields:
        """What is said where batches go on at `step`, other than after the batch before it."""
        begins = {stream.name: stream.begin(step) for stream in self.streams}
        epochs, before = ({name: begin[at] for name, begin in begins.items()} for at in range(2))
        return {
            "action": RESUME,
            "step": step,
            "epoch": epochs.get("", epochs),
            "epoch_offset": before.get("", before),
            "receipt": self._pipeline.receipt.code,
        }

    def entry(self, event: Event, since: int) -> Fields:
        """What is said of an event in a run whose batches began at step `since`."""
        return self._start(event) if event.action == START else self._complete(event, since)

    def _start(self, event: Event) -> Fields:
        stream = self.streams[event.stream]
        rows = stream.first_rows(event.epoch, _SHOWN).tolist()
        return {
            "action": START,
            **self._named(stream),
            "epoch": event.epoch,
            "seed": stream.source.epoch_seed(event.epoch),
            "first_episode_ids": _episodes(self._pipeline.source.layout.parts[stream.name], rows),
            "first_rows": rows,
            "num_episodes": stream.source.num_instances,
            "step": event.step,
            "receipt": self._pipeline.receipt.code,
        }

    def _complete(self, event: Event, since: int) -> Fields:
        stream = self.streams[event.stream]
        span = stream.span(event.epoch)
        assert span is not None
        return {
            "action": COMPLETE,
            **self._named(stream),
            "epoch": event.epoch,
            "seed_used": stream.source.epoch_seed(event.epoch),
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

    @staticmethod
    def _named(stream: EpochStream) -> Fields:
        return {"source": stream.name} if stream.name else {}


def _episodes(layout: Layout, rows: list[int]) -> list[int | None]:
    """Documents of rows that hold one each, as the corpus numbers them; else the rows themselves."""
    if not (layout.one_segment and layout.follows_documents):
        return [*rows]
    return [layout.spans(row)[0].document for row in rows]
