"""Names of checkpoints, and a table of the progress of a run in steps, epochs, rows and tokens."""

import re

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.pipeline import Pipeline

_STEP_IN_NAME, _OTHER_IN_NAME = (
    re.compile(rf"(?:^|[^0-9A-Za-z])(?:{words})[-_]?(\d+)(?![0-9])", re.IGNORECASE)
    for words in ("step", "checkpoint|iter")
)


def step_of_checkpoint(name: str) -> int:
    """Return the number of steps that a run had done when it saved the checkpoint `name`.

    "step7000", "7000" and "gs://bucket/run/step7000-unsharded/" give 7000, as do "checkpoint-7000" of Hugging Face's trainer
    and "iter_0007000" of Megatron. All of these are saved after steps 0 to 6999. A number of `step` goes before the others.

    Raises:
      RowIndexError: The name is not a number, and does not contain such a word with a number exactly once.
    """
    folder = name.rstrip("/").rpartition("/")[2]
    if folder.isascii() and folder.isdigit():
        return int(folder)
    found = _STEP_IN_NAME.findall(folder) or _OTHER_IN_NAME.findall(folder)
    if len(found) != 1:
        raise RowIndexError(
            f"checkpoint {name!r}: expected a name such as step7000, checkpoint-7000 or iter_0007000, or a number of "
            "steps. Write one of these."
        )
    return int(found[0])


def steps_between(pipeline: Pipeline, first: str, last: str) -> range:
    """Return the steps between the checkpoints `first` and `last`.

    Raises:
      RowIndexError: A name has no step, there is no step between the names, or `last` is after the end of the run.
    """
    steps = range(step_of_checkpoint(first), step_of_checkpoint(last))
    if not steps:
        raise RowIndexError(
            f"no step lies between the checkpoints {first} and {last}. Give two, the earlier checkpoint first."
        )
    if steps.stop > pipeline.end_step:
        raise RowIndexError(f"{last}: the run ends after {pipeline.end_step} steps. Give an earlier checkpoint.")
    return steps


def checkpoint_table(pipeline: Pipeline, every: int = 1000, *, epochs: int | None = None) -> dict[str, list[int]]:
    """Return a table of the progress of a run: a line after every `every` steps, and one at its end.

    Args:
      pipeline: Pipeline of any host.
      every: Number of steps between the lines of the table.
      epochs: Number of epochs after which the table ends. None ends it with the run. A run that never ends stops after one
        epoch, or in a mixture when every source has been read once.

    Returns:
      Columns by name: `step`, the number of steps done; `epoch`, in which the next step begins, from 0; `steps_into_epoch`, the
      number of steps done that read only rows of that epoch; `rows_into_epoch`, the number of rows of that epoch that earlier
      steps read; `rows` and `tokens`, totals of all batches so far, padding and filling rows included.

      A mixture has the columns `epoch of NAME` and `rows into epoch of NAME` of each source instead of the three columns of
      epochs. A run with stages has neither.

    Raises:
      SamplerError: `epochs` is more than the run has, or `every` is not an integer of at least 1.
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
        if length is not None:  # rows differ in length between steps, but each step has the same number of tokens
            tokens += np.maximum(done - first, 0) * sizes.at(stage.first_step) * length
        else:
            rows_done = sizes.begins(done)[0] - sizes.begins(first)[0]
            tokens += np.maximum(rows_done, 0) * stage.source.layout.sequence_length
    table = zip([*names, "rows", "tokens"], [*columns, rows, tokens], strict=True)
    return {name: np.asarray(column).tolist() for name, column in table}


def _into_epoch(pipeline: Pipeline, step: int) -> tuple[int, int, int]:
    """Return the epoch in which `step` begins, and the numbers of its whole steps and of its rows before `step`."""
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
