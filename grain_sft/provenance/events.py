"""Entries of an audit log: loads and resumes of a run, starts and ends of epochs."""

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from grain_sft.pipeline import Run, layout_receipt
from grain_sft.sampling import EpochStream, Sampler
from grain_sft.version import __version__

Fields = dict[str, Any]

VERSION = 1  # increases when the fields of entries change
LOAD, RESUME, START, COMPLETE = "dataset_load", "resume", "epoch_start", "epoch_complete"

_SHOWN = 10  # maximum number of rows that an entry `epoch_start` lists


class Event(NamedTuple):
    """Start or completion of an epoch of one stream."""

    step: int  # step whose batch has the first or the last row of the epoch
    action: str  # START or COMPLETE
    epoch: int  # number of the stream's epoch, from 0
    stream: int  # index in `Events.streams`


class StreamOfStage(NamedTuple):
    """Rows of one corpus, or of one source of a mixture, in one stage of a run."""

    number: int | None  # number of the stage, from 1; None if the run has only one stage
    stage: Run
    stream: EpochStream


class Events:
    """Events of a pipeline's epochs, and the entries of an audit log.

    An epoch starts at the step that reads its first row, and is complete at the step that reads its last row. Rows that the
    sampler drops do not count. The last step of a run or stage completes its last epoch, even if rows are left. A later stage
    that reads these rows starts the epoch again.

    Attributes:
      streams: Streams of all stages, in order. Each stream counts its own epochs.
    """

    def __init__(self, pipeline: Run) -> None:
        self._pipeline = pipeline
        self.streams = [
            StreamOfStage(number if len(pipeline.stages) > 1 else None, stage, stream)
            for number, stage in enumerate(pipeline.stages, 1)
            for stream in stage.sampler.streams
        ]
        self._receipt = {"receipt": pipeline.receipt.code}

    def following(self, step: int) -> Iterator[Event]:
        """Return an iterator of the events from `step` on, in order. It never ends if the epochs never end."""
        streams = (self._of_stream(number, step) for number in range(len(self.streams)))
        return heapq.merge(*streams, key=lambda event: event.step)

    def _of_stream(self, number: int, step: int) -> Iterator[Event]:
        """Yield the events of stream `number` from `step` on, in order."""
        _, stage, stream = self.streams[number]
        if step >= stage.end_step:
            return
        epoch, _ = stream.begin(max(step, stage.first_step))
        while (span := stream.span(epoch)) is not None:
            if span.rows and span.first >= step:  # an epoch whose steps are all skipped has no rows
                yield Event(span.first, START, epoch, number)
            if span.rows and span.last >= step:
                yield Event(span.last, COMPLETE, epoch, number)
            epoch += 1

    def load(self, hosts: int) -> Fields:
        """Return the entry that a process writes when it begins or continues the run on `hosts` hosts.

        Its fields describe the first stage, except the receipt, which covers all stages. `num_episodes` is the name of the
        episode-indexed loader for `num_rows`.
        """
        sampler = self._pipeline.stages[0].sampler
        layout = self._pipeline.stages[0].source.layout
        return {
            "action": LOAD,
            "audit_version": VERSION,
            "grain_sft": __version__,
            **_fields_of_order(sampler),
            "num_episodes": sampler.num_instances,
            "num_rows": sampler.num_instances,
            "sequence_length": layout.sequence_length,
            "global_batch_size": sampler.global_batch_size,
            "hosts": hosts,
            "corpus": layout.corpus.ends_fingerprint,
            "layout": layout_receipt(layout),
            "receipt_parts": self._pipeline.receipt.parts,
            **self._receipt,
        }

    def resume(self, step: int) -> Fields:
        """Return the entry of a run that continues at `step`."""
        begins = {stream.name: stream.begin(step) for stream in self._pipeline.at(step).sampler.streams}
        # by stream: the epoch, and the index in it, of the first row of `step`
        epoch, offset = ({name: begin[part] for name, begin in begins.items()} for part in (0, 1))
        # two dicts for a mixture; two numbers for a run of one corpus, whose stream has the name ""
        numbers = {"epoch": epoch.get("", epoch), "epoch_offset": offset.get("", offset)}
        return {"action": RESUME, "step": step, **numbers, **self._receipt}

    def entry(self, event: Event, since: int) -> Fields:
        """Return the entry of an event, in a process that began or resumed the run at step `since`."""
        number, stage, stream = self.streams[event.stream]
        fields: Fields = {"action": event.action}
        if number is not None:
            fields["stage"] = number
        if stream.name:
            fields["source"] = stream.name
        fields["epoch"] = event.epoch
        seed = stream.source.epoch_seed(event.epoch)
        if event.action == START:
            rows = stream.first_rows(event.epoch, _SHOWN).tolist()
            part = stage.source.layout.parts[stream.name]
            # where each row has one document, `first_episode_ids` are the numbers of documents, else of rows
            row_is_document = part.one_segment and part.follows_documents
            episodes = [part.spans(row)[0].document for row in rows] if row_is_document else rows
            fields |= {"seed": seed, "first_episode_ids": episodes, "first_rows": rows}
            fields["num_episodes"] = stream.source.num_instances
        else:
            span = stream.span(event.epoch)
            assert span is not None
            fields |= {"seed_used": seed, "episodes_seen": span.rows, "rows_seen": span.rows}
            fields |= {"first_step": span.first, "since_step": max(span.first, since)}
        return {**fields, "step": event.step, **self._receipt}


def _fields_of_order(sampler: Sampler) -> Fields:
    """Return the fields that decide the order of rows.

    In a mixture, and in a run that has stages or skips steps, values are lists with one item for each stream. These runs have
    no `steps_per_epoch`.
    """
    sources = [stream.source for stream in sampler.streams]
    fields: Fields = {
        "epoch_seed": [source.seed for source in sources],
        "epoch_shuffle": [source.shuffle for source in sources],
        "order": [source.order for source in sources],
    }
    if sampler.steps_per_epoch is not None:
        fields = {name: values[0] for name, values in fields.items()}
        return {**fields, "steps_per_epoch": sampler.steps_per_epoch, "epochs": sampler.epochs}
    return {
        "sources": [stream.name for stream in sampler.streams],
        **fields,
        "rows_of_sources": [source.num_instances for source in sources],
        "epochs": [source.epochs for source in sources],
    }
