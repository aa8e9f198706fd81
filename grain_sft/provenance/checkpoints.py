"""Checkpoints: step, epoch and rows into it, and the names that trainers give to checkpoints."""

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
    steps = range(step_of_checkpoint(first), step_of_checkpoint(last))
    if not steps:
        raise RowIndexError(f"between {first} and {last}: no step is between them; give the earlier one first.")
    if steps.stop > pipeline.end_step:
        raise RowIndexError(f"{last}: the run ends after {pipeline.end_step} steps.")
    return steps


def checkpoint_table(pipeline: Pipeline, every: int = 1000, *, epochs: int | None = None) -> dict[str, list[int]]:
    """Return where a run is after each `every` steps, and at its end.

    Args:
      epochs: Number of epochs after which the table ends. None ends it with the run or, if that never ends, after one epoch;
        a mixture that never ends, when every source has been read once.

    Returns:
      Columns: `step`, the number of steps done; `epoch`, in which the next step begins, from 0; `steps_into_epoch` and
      `rows_into_epoch`, whole steps and rows of it that are done; `rows` and `tokens` of all batches so far, padding and
      filling rows included. A mixture has the epoch of each source, and the rows into it.

    Raises:
      SamplerError: more epochs than the run has.
    """
    sampler = pipeline.sampler
    every = as_integer("every", every, 1, SamplerError)
    last = sampler.steps_of_epochs(epochs)
    steps = np.unique(np.append(np.arange(every, last + 1, every), last))
    names, columns = ["step"], [steps]
    if sampler.steps_per_epoch is None:
        for stream in sampler.streams:
            names += [f"epoch of {stream.name}", f"rows into epoch of {stream.name}"]
            columns += np.array([stream.begin(step) for step in steps.tolist()]).T.tolist()
    else:
        names += ["epoch", "steps_into_epoch", "rows_into_epoch"]
        columns += np.array([_into_epoch(pipeline, step) for step in steps.tolist()]).T.tolist()
    rows = sampler.batch_sizes.begins(steps)[0]
    tokens = np.zeros_like(rows)
    for stage in pipeline.stages:
        first, length = np.array([stage.first_step]), stage.sampler.row_length(stage.first_step)
        done, sizes = np.minimum(steps, stage.end_step), sampler.batch_sizes
        if length is not None:  # rows of several lengths, as many tokens in each step
            tokens += np.maximum(done - first, 0) * sizes.at(stage.first_step) * length
        else:
            rows_done = sizes.begins(done)[0] - sizes.begins(first)[0]
            tokens += np.maximum(rows_done, 0) * stage.source.layout.sequence_length
    table = zip([*names, "rows", "tokens"], [*columns, rows, tokens], strict=True)
    return {name: np.asarray(column).tolist() for name, column in table}


def _into_epoch(pipeline: Pipeline, step: int) -> tuple[int, int, int]:
    """Return the epoch that `step` begins in, and the whole steps and rows of that epoch (of all hosts) before it."""
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
