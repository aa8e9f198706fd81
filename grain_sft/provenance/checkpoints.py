"""Checkpoints: the step that a checkpoint's name states, and a table of epochs, rows and tokens every N steps."""

import re

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.pipeline import Pipeline
from grain_sft.types import Ints

_WORD_AND_NUMBER = re.compile(r"(?:^|[^0-9A-Za-z])(step|checkpoint|iter)[-_]?([0-9]+)(?![0-9])", re.IGNORECASE)


def step_of_checkpoint(name: str) -> int:
    """Return the number of steps that a run had done when it saved the checkpoint `name`.

    "step7000", "7000" and "gs://bucket/run/step7000-unsharded/" give 7000. So do "checkpoint-7000" of Hugging Face's trainer
    and "iter_0007000" of Megatron. If a name has several of the words step, checkpoint and iter, the number after step counts.

    Raises:
      RowIndexError: The name has none of these forms, or several numbers, as in "step1-step2".
    """
    folder = name.rstrip("/").rpartition("/")[2]
    found = _WORD_AND_NUMBER.findall(folder)
    numbers = [number for word, number in found if word.lower() == "step"] or [number for _, number in found]
    if folder.isascii() and folder.isdigit():
        numbers = [folder]
    if len(numbers) != 1 or len(numbers[0]) > 18:  # `int` refuses thousands of digits
        expected = "a name such as step7000, checkpoint-7000 or iter_0007000, or a number of steps"
        raise RowIndexError(f"checkpoint {name!r}: expected {expected}. Write one of these.")
    return int(numbers[0])


def steps_between(pipeline: Pipeline, first: str, last: str) -> range:
    """Return the steps between the checkpoints `first` and `last`.

    Raises:
      RowIndexError: A name has no step, `first` is not before `last`, or `last` is after the end of the run.
    """
    steps = range(step_of_checkpoint(first), step_of_checkpoint(last))
    if not steps:
        raise RowIndexError(f"no step lies between {first} and {last}. Give an earlier, then a later checkpoint.")
    if steps.stop > pipeline.end_step:
        raise RowIndexError(f"{last}: the run ends after {pipeline.end_step} steps. Give an earlier checkpoint.")
    return steps


def checkpoint_table(pipeline: Pipeline, every: int = 1000, *, epochs: int | None = None) -> dict[str, list[int]]:
    """Return a table of the progress of a run, with a line for every `every` steps and a last line.

    Args:
      pipeline: Pipeline of the run, of any host.
      epochs: Number of epochs after which the table ends. None ends the table with the run. If the run never ends, None means
        one epoch of every source. If a run with stages never ends, None means the epoch in which the last stage begins.

    Returns:
      Columns by name. A mixture has columns `epoch of NAME` and `rows into epoch of NAME` for each source instead of `epoch`,
      `steps_into_epoch` and `rows_into_epoch`. A run with skipped steps lacks `steps_into_epoch`. A run with stages has none of
      these columns.

        step: Number of steps done.
        epoch: Epoch of the next step's first row, from 0.
        steps_into_epoch: Number of steps done that began in that epoch.
        rows_into_epoch: Number of rows of that epoch that were read.
        rows: Number of rows read so far, with the rows that only fill a batch.
        tokens: Number of the layout's tokens in these rows, with padding. `drop_last_position` removes some of them.

    Raises:
      SamplerError: `epochs` is more than the run has, or `every` is not an integer of at least 1.
    """
    sampler = pipeline.sampler
    every = as_integer("every", every, 1, SamplerError)
    last = sampler.steps_of_epochs(epochs)
    steps = np.unique(np.append(np.arange(every, last + 1, every), last))
    table: dict[str, Ints] = {"step": steps}
    if sampler.steps_per_epoch is None:
        for stream in sampler.streams:  # the sampler of a run with stages has no streams
            names: tuple[str, ...] = "epoch", "rows_into_epoch"
            if stream.name:
                names = f"epoch of {stream.name}", f"rows into epoch of {stream.name}"
            table |= zip(names, np.array([stream.begin(step) for step in steps.tolist()]).T, strict=True)
    else:
        names = "epoch", "steps_into_epoch", "rows_into_epoch"
        table |= zip(names, np.array([_progress_in_epoch(pipeline, step) for step in steps.tolist()]).T, strict=True)
    table["rows"] = sampler.batch_sizes.of_steps(steps).before
    table["tokens"] = sum((_tokens_of_stage(pipeline, stage, steps) for stage in pipeline.stages), np.zeros_like(steps))
    return {name: column.tolist() for name, column in table.items()}


def _tokens_of_stage(pipeline: Pipeline, stage: Pipeline, steps: Ints) -> Ints:
    """Return the number of tokens in the batches of `stage` before each of `steps`, int64 [n]."""
    sizes, first = pipeline.sampler.batch_sizes, stage.first_step
    end = np.clip(steps, first, stage.end_step)
    row_length = stage.sampler.row_length(first)
    if row_length is not None:  # the row length changes between steps, but not the number of tokens of a step
        return (end - first) * (sizes.at(first) * row_length)
    return (sizes.of_steps(end).before - sizes.before(first)) * stage.source.layout.sequence_length


def _progress_in_epoch(pipeline: Pipeline, step: int) -> tuple[int, int, int]:
    """Return (epoch, steps_into_epoch, rows_into_epoch) of the table after `step` steps."""
    sampler, layout = pipeline.sampler, pipeline.source.layout
    if layout.epochs > 1:  # the layout packs each epoch anew, and numbers the rows of all epochs
        rows = sampler.batch_sizes.before(step)
        epoch, rows_into = (int(number) for number in layout.epoch_of(np.array(rows)))
        first_row = rows - rows_into
        first_step = sampler.batch_sizes.step_of(first_row)
        begins_in_earlier_epoch = sampler.batch_sizes.before(first_step) < first_row
    else:
        stream = sampler.streams[0]
        epoch, rows_into = stream.begin(step)
        first_step = sampler.steps_of_epochs(epoch) if epoch else 0
        begins_in_earlier_epoch = stream.begin(first_step)[0] < epoch
    # `first_step` reads the epoch's first row. If it also reads rows of an earlier epoch, it began in the earlier epoch,
    # so it is not counted.
    return epoch, step - first_step - begins_in_earlier_epoch, rows_into
