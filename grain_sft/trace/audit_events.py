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
from grain_sft.sampling import Host, IndexSampler
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
        self._sampler = IndexSampler(**sampler.__getstate__() | {"host": Host(0, hosts)})
        self._hosts = hosts
        self._epoch_rows = self._sampler.rows_per_host_and_epoch
        self._step_rows = self._sampler.rows_per_host
        steps = self._sampler.num_steps
        self._all_rows = None if steps is None else steps * self._step_rows

    def following(self, step: int) -> Iterator[Event]:
        """The events from `step` on, in order; without end where the epochs are."""
        first = step * self._step_rows
        if self._all_rows is not None and first >= self._all_rows:
            return
        epoch = -(-first // self._epoch_rows)
        while True:
            border = epoch * self._epoch_rows
            end = self._all_rows is not None and border >= self._all_rows
            if end:
                assert self._all_rows is not None
                border = self._all_rows
            if border > first:
                yield Event((border - 1) // self._step_rows, COMPLETE, epoch - 1)
            if end:
                return
            yield Event(border // self._step_rows, START, epoch)
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
        epoch, before = divmod(step * self._step_rows, self._epoch_rows)
        return {
            "action": RESUME,
            "step": step,
            "epoch": epoch,
            "epoch_offset": before * self._hosts,
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
        first = event.epoch * self._epoch_rows
        last = first + self._epoch_rows if self._all_rows is None else min(first + self._epoch_rows, self._all_rows)
        seen = min((last - first) * self._hosts, self._sampler.num_instances)  # of a filled batch, what is no filling
        first_step = first // self._step_rows
        return {
            "action": COMPLETE,
            "epoch": event.epoch,
            "seed_used": self._seed(event.epoch),
            "episodes_seen": seen,
            "rows_seen": seen,
            "first_step": first_step,
            "since_step": max(first_step, since),
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
        first = epoch * self._epoch_rows
        shown = min(_SHOWN, self._epoch_rows, self._sampler.num_instances, len(self._sampler) - first)
        return [int(self._sampler[first + record].record_key) for record in range(shown)]

    def _episodes(self, rows: list[int]) -> list[int | None]:
        """Documents of rows that hold one each, as the corpus numbers them; else the rows themselves."""
        layout = self._pipeline.source.layout
        if not isinstance(layout, PaddedLayout):
            return [*rows]
        return [layout.spans(row)[0].document for row in rows]
