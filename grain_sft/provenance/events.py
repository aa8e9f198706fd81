"""Events of a pipeline's epochs, and their entries in an audit log."""

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from grain_sft.pipeline import Pipeline, layout_receipt
from grain_sft.sampling import EpochStream
from grain_sft.version import __version__

Fields = dict[str, Any]

VERSION = 1  # of the fields of entries
LOAD, RESUME, START, COMPLETE = "dataset_load", "resume", "epoch_start", "epoch_complete"

_SHOWN = 10  # rows of an epoch's order


class Event(NamedTuple):
    """Start or completion of an epoch of a stream, with the batch of `step`; `stream` is an index into `Events.streams`."""

    step: int
    action: str
    epoch: int
    stream: int = 0


class StreamOfStage(NamedTuple):
    """A stream of a stage of a run, and the stage's number from 1; None in a run without stages."""

    number: int | None
    stage: Pipeline
    stream: EpochStream


class Events:
    """The events of a pipeline, and their entries.

    An epoch starts with the step of its first row and is complete with the step of its last row. Rows that the sampler drops
    because they don't fill a batch do not count. Where a batch straddles two epochs, one is complete and the next starts in
    the same step. The last epoch of a run is complete with the run's last step.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.streams = [
            StreamOfStage(number if len(pipeline.stages) > 1 else None, stage, stream)
            for number, stage in enumerate(pipeline.stages, 1)
            for stream in stage.sampler.streams
        ]
        self._receipt = {"receipt": pipeline.receipt.code}

    def following(self, step: int) -> Iterator[Event]:
        """Return an iterator of the events from `step` on, in order. It never ends if the epochs never end."""
        if step >= self._pipeline.end_step:
            return iter(())
        streams = (self._of_stream(number, step) for number in range(len(self.streams)))
        return heapq.merge(*streams, key=lambda event: event.step)

    def _of_stream(self, number: int, step: int) -> Iterator[Event]:
        _, stage, stream = self.streams[number]
        if step >= stage.end_step:
            return
        epoch, _ = stream.begin(max(step, stage.first_step))
        while (span := stream.span(epoch)) is not None:
            for at, action in ((span.first, START), (span.last, COMPLETE)):
                if at >= step and span.rows:  # all steps of an epoch may be skipped
                    yield Event(at, action, epoch, number)
            epoch += 1

    def load(self, hosts: int) -> Fields:
        """Return the entry of a process that begins a run on `hosts` hosts."""
        first = self._pipeline.stages[0]
        sampler, layout = first.sampler, first.source.layout
        sources = [stream.source for stream in sampler.streams]
        names = {"epoch_seed": "seed", "epoch_shuffle": "shuffle", "order": "order"}
        fields: Fields = {field: [getattr(source, name) for source in sources] for field, name in names.items()}
        if sampler.steps_per_epoch is not None:
            fields = {field: values[0] for field, values in fields.items()}
            fields |= {"steps_per_epoch": sampler.steps_per_epoch, "epochs": sampler.epochs}
        else:
            fields = {"sources": [stream.name for stream in sampler.streams], **fields}
            fields["rows_of_sources"] = [source.num_instances for source in sources]
            fields["epochs"] = [source.epochs for source in sources]
        return {
            **{"action": LOAD, "audit_version": VERSION, "grain_sft": __version__},
            **fields,
            **{"num_episodes": sampler.num_instances, "num_rows": sampler.num_instances},
            **{"sequence_length": layout.sequence_length, "global_batch_size": sampler.global_batch_size},
            **{"hosts": hosts, "corpus": layout.corpus.ends_fingerprint, "layout": layout_receipt(layout)},
            **{"receipt_parts": self._pipeline.receipt.parts, **self._receipt},
        }

    def resume(self, step: int) -> Fields:
        """Return the entry of a run that continues at `step` instead of the step after the last delivered batch."""
        begins = {stream.name: stream.begin(step) for stream in self._pipeline.at(step).sampler.streams}
        epochs, before = ({name: begin[at] for name, begin in begins.items()} for at in range(2))
        begun = {"step": step, "epoch": epochs.get("", epochs), "epoch_offset": before.get("", before)}
        return {"action": RESUME, **begun, **self._receipt}

    def entry(self, event: Event, since: int) -> Fields:
        """Return the entry of an event in a run whose batches began at step `since`."""
        (number, stage, stream), epoch = self.streams[event.stream], event.epoch
        fields: Fields = {"action": event.action, **({} if number is None else {"stage": number})}
        fields |= {**({"source": stream.name} if stream.name else {}), "epoch": epoch}
        seed, step = stream.source.epoch_seed(epoch), {"step": event.step, **self._receipt}
        if event.action == START:
            rows = stream.first_rows(epoch, _SHOWN).tolist()
            documents, part = rows, stage.source.layout.parts[stream.name]
            if part.one_segment and part.follows_documents:
                documents = [part.spans(row)[0].document for row in rows]
            shown = {"first_episode_ids": documents, "first_rows": rows, "num_episodes": stream.source.num_instances}
            return {**fields, "seed": seed, **shown, **step}
        span = stream.span(epoch)
        assert span is not None
        seen = {"episodes_seen": span.rows, "rows_seen": span.rows}
        begun = {"first_step": span.first, "since_step": max(span.first, since)}
        return {**fields, "seed_used": seed, **seen, **begun, **step}
