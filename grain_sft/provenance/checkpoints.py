"""Checkpoints: step, epoch and rows into it, and the names that trainers give to checkpoints."""

from __future__ import annotations

import re

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.pipeline import Pipeline

_NAME = re.compile(r"(?:^|[^0-9A-Za-z])step[-_]?(\d+)(?![0-9])", re.IGNORECASE)


def step_of_checkpoint(name: str) -> int:
    """Return the number of steps before the checkpoint `name`: 7000 of "step7000", "7000" or
    "gs://bucket/run/step7000-unsharded/". OLMo-core writes stepN after steps 0 to N - 1.

    Raises:
      RowIndexError: the name has no number, or several.
    """
    last = name.rstrip("/").rpartition("/")[2]
    if last.isascii() and last.isdigit():
        return int(last)
    found = _NAME.findall(last)
    if len(found) != 1:
        raise RowIndexError(f"checkpoint {name!r}: expected a name such as step7000, or a number of steps.")
    return int(found[0])


def steps_between(pipeline: Pipeline, first: str, last: str) -> range:
    """Return the steps that the checkpoint `last` has and the checkpoint `first` has not.

    Raises:
      RowIndexError: names without numbers, in the wrong order, or after the last step.
    """
    begin, end = step_of_checkpoint(first), step_of_checkpoint(last)
    steps = pipeline.sampler.num_steps
    if begin >= end:
        raise RowIndexError(f"between {first} and {last}: no step is between them; give the earlier one first.")
    if steps is not None and end > steps:
        raise RowIndexError(f"{last}: the run ends after {steps} steps.")
    return range(begin, end)


def checkpoint_table(pipeline: Pipeline, every: int = 1000, *, epochs: int | None = None) -> dict[str, list[int]]:
    """Return where a run is after each `every` steps, and at its end.

    Args:
      pipeline: Pipeline of any host.
      every: Number of steps from one checkpoint to the next.
      epochs: Number of epochs after which the table ends. None ends it with the run or, if that never ends, after one epoch;
        a mixture that never ends, when every source has been read once.

    Returns:
      Columns: `step`, the number of steps done; `epoch`, in which the next step begins, from 0; `steps_into_epoch` and
      `rows_into_epoch`, whole steps and rows of it that are done; `rows` and `tokens` of all batches so far, padding and
      filling rows included. A mixture has the epoch of each source, and the rows into it.

    Raises:
      SamplerError: more epochs than the run has.
    """
    sampler, length = pipeline.sampler, pipeline.source.layout.sequence_length
    every = as_integer("every", every, 1, SamplerError)
    last = sampler.steps_of_epochs(epochs)
    steps = np.unique(np.append(np.arange(every, last + 1, every), last))
    table: dict[str, list[int]] = {"step": steps.tolist()}
    if sampler.steps_per_epoch is None:
        for stream in sampler.streams:
            begins = [stream.begin(step) for step in steps.tolist()]
            table[f"epoch of {stream.name}"] = [epoch for epoch, _ in begins]
            table[f"rows into epoch of {stream.name}"] = [into for _, into in begins]
    else:
        names = ("epoch", "steps_into_epoch", "rows_into_epoch")
        found = zip(*(_into_epoch(pipeline, step) for step in steps.tolist()), strict=True)
        table |= {name: list(column) for name, column in zip(names, found, strict=True)}
    rows = sampler.batch_sizes.begins(steps)[0]
    return table | {"rows": rows.tolist(), "tokens": (rows * length).tolist()}


def _into_epoch(pipeline: Pipeline, step: int) -> tuple[int, int, int]:
    """Return the epoch in which `step` begins, and whole steps and rows of that epoch (of all hosts) before it."""
    sampler, layout = pipeline.sampler, pipeline.source.layout
    if layout.epochs > 1:
        rows = sampler.batch_sizes.before(step)
        epoch, into = (int(number) for number in layout.epoch_of(np.array(rows)))
        begin = rows - into
        first = sampler.batch_sizes.step_of(begin)
        return epoch, step - first - (sampler.batch_sizes.before(first) < begin), into
    stream = sampler.streams[0]
    epoch, into = stream.begin(step)
    first = sampler.steps_of_epochs(epoch) if epoch else 0
    return epoch, step - first - (stream.begin(first) < (epoch, 0)), into
