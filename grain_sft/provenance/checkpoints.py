"""Checkpoints: step <-> epoch <-> how far into it, exactly, and the names that trainers give to them."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.pipeline import Pipeline

Ints = npt.NDArray[np.int64]

_NAME = re.compile(r"(?:^|[^0-9A-Za-z])step[-_]?(\d+)(?![0-9])", re.IGNORECASE)


def step_of_checkpoint(name: str) -> int:
    """How many steps were done when the checkpoint `name` was written: 7000 of "step7000", "7000" or
    "gs://bucket/run/step7000-unsharded/". OLMo-core writes stepN after N steps: 0 to N - 1, as steps count here.

    Raises:
      RowIndexError: no number can be told.
    """
    last = name.rstrip("/").rpartition("/")[2]
    if last.isascii() and last.isdigit():
        return int(last)
    found = _NAME.findall(last)
    if len(found) != 1:
        raise RowIndexError(f"checkpoint {name!r}: expected a name such as step7000, or a number of steps.")
    return int(found[0])


def steps_between(pipeline: Pipeline, first: str, last: str) -> range:
    """The steps that were done between two checkpoints: those from `first` on that `last` has and `first` has not.

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
    """Where a run is after each `every` steps, and at its end.

    Args:
      pipeline: of any host.
      every: steps from one checkpoint to the next.
      epochs: the table ends after so many; None: with the run or, if that never ends, after one.

    Returns:
      Columns: `step`, so many steps are done; `epoch` (from 0) that the next step begins in; `steps_into_epoch` and
      `rows_into_epoch`, whole steps and rows of it that are done; `rows` and `tokens` of all batches so far, padding and
      filling rows included. Of a mixture, epoch and rows into it for each source, and a table without an end of its own
      ends when every source has been read once.

    Raises:
      SamplerError: more epochs than there are.
    """
    every = as_integer("every", every, 1, SamplerError)
    last = pipeline.sampler.steps_of_epochs(epochs)
    steps = np.unique(np.append(np.arange(every, last + 1, every), last))
    if pipeline.sampler.steps_per_epoch is None:
        return _mixture_table(pipeline, steps)
    epoch, steps_into, into = zip(*(_place(pipeline, step) for step in steps.tolist()), strict=True)
    rows = pipeline.sampler.batch_sizes.begins(steps)[0]
    return {
        "step": steps.tolist(),
        "epoch": list(epoch),
        "steps_into_epoch": list(steps_into),
        "rows_into_epoch": list(into),
        "rows": rows.tolist(),
        "tokens": (rows * pipeline.source.layout.sequence_length).tolist(),
    }


def _mixture_table(pipeline: Pipeline, steps: Ints) -> dict[str, list[int]]:
    sampler = pipeline.sampler
    rows = sampler.batch_sizes.begins(steps)[0]
    table: dict[str, list[int]] = {"step": steps.tolist()}
    for stream in sampler.streams:
        begins = [stream.begin(step) for step in steps.tolist()]
        table[f"epoch of {stream.name}"] = [epoch for epoch, _ in begins]
        table[f"rows into epoch of {stream.name}"] = [into for _, into in begins]
    return table | {"rows": rows.tolist(), "tokens": (rows * pipeline.source.layout.sequence_length).tolist()}


def _place(pipeline: Pipeline, step: int) -> tuple[int, int, int]:
    """The epoch in which `step` begins, and whole steps and rows of that epoch (of all hosts) that come before."""
    sampler, layout = pipeline.sampler, pipeline.source.layout
    if layout.epochs > 1:
        rows = sampler.batch_sizes.before(step)
        epoch, into = (int(number) for number in layout.epoch_of(np.array(rows)))
        begin = rows - into
        first = sampler.batch_sizes.step_of(begin)
        return epoch, step - first - (sampler.batch_sizes.before(first) < begin), into
    stream = sampler.streams[0]
    epoch, rows = stream.begin(step)
    first = sampler.steps_of_epochs(epoch) if epoch else 0
    return epoch, step - first - (stream.begin(first) < (epoch, 0)), rows
