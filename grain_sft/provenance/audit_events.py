"""Events of an audit log: at which step an epoch starts and is complete, and what an entry says of it.

All of it is a function of the pipeline and the step, so that `audit_check` can compute again what `audit` wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grain_sft.pipeline.receipt import layout_receipt
from grain_sft.provenance.audit_line import Fields
from grain_sft.provenance.epoch_streams import Lane, lanes_of
from grain_sft.sampling import MixtureSampler
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
    lane: int = 0


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
        self.lanes: list[Lane] = lanes_of(pipeline)

    def following(self, step: int) -> Iterator[Event]:
        """The events from `step` on, in order; without end where the epochs are."""
        if self._sampler.num_steps is not None and step >= self._sampler.num_steps:
            return iter(())
        found = [self._following(step, number) for number in range(len(self.lanes))]
        return heapq.merge(*found, key=lambda event: event.step)

    def _following(self, step: int, number: int) -> Iterator[Event]:
        lane = self.lanes[number]
        epoch, _ = lane.place(step)
        while (span := lane.span(epoch)) is not None:
            if span.first >= step:
                yield Event(span.first, START, epoch, number)
            if span.last >= step:
                yield Event(span.last, COMPLETE, epoch, number)
            epoch += 1

    def load(self, hosts: int) -> Fields:
        """What is said of the data of a run with so many hosts."""
        pipeline, sampler = self._pipeline, self._sampler
        if isinstance(sampler, MixtureSampler):
            rows = [leaf.rows for leaf in sampler.leaves]
            how: Fields = {
                "sources": [leaf.name for leaf in sampler.leaves],
                "epoch_seed": [each.seed for each in rows],
                "epoch_shuffle": [each.shuffle for each in rows],
                "order": [each.order for each in rows],
                "rows_of_sources": [each.num_instances for each in rows],
                "epochs": [each.epochs for each in rows],
            }
        else:
            how = {
                "epoch_seed": sampler.seed,
                "epoch_shuffle": sampler.shuffle,
                "order": sampler.order,
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
        places = {lane.name: lane.place(step) for lane in self.lanes}
        epochs, before = ({name: place[at] for name, place in places.items()} for at in range(2))
        return {
            "action": RESUME,
            "step": step,
            "epoch": epochs.get(None, epochs),
            "epoch_offset": before.get(None, before),
            "receipt": self._pipeline.receipt.code,
        }

    def entry(self, event: Event, since: int) -> Fields:
        """What is said of an event in a run whose batches began at step `since`."""
        return self._start(event) if event.action == START else self._complete(event, since)

    def _start(self, event: Event) -> Fields:
        lane = self.lanes[event.lane]
        rows = lane.first_rows(event.epoch, _SHOWN)
        return {
            "action": START,
            **self._named(lane),
            "epoch": event.epoch,
            "seed": lane.seed(event.epoch),
            "first_episode_ids": _episodes(lane, rows),
            "first_rows": rows,
            "num_episodes": lane.num_rows,
            "step": event.step,
            "receipt": self._pipeline.receipt.code,
        }

    def _complete(self, event: Event, since: int) -> Fields:
        lane = self.lanes[event.lane]
        span = lane.span(event.epoch)
        assert span is not None
        return {
            "action": COMPLETE,
            **self._named(lane),
            "epoch": event.epoch,
            "seed_used": lane.seed(event.epoch),
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
    def _named(lane: Lane) -> Fields:
        return {} if lane.name is None else {"source": lane.name}


def _episodes(lane: Lane, rows: list[int]) -> list[int | None]:
    """Documents of rows that hold one each, as the corpus numbers them; else the rows themselves."""
    if not (lane.layout.one_segment and lane.layout.follows_documents):
        return [*rows]
    return [lane.layout.spans(row)[0].document for row in rows]
