"""State of a run's data in a checkpoint: the next step, and the receipt (the hash of all that decides the run's batches)."""

import json
from collections.abc import Mapping
from typing import Any

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, RowIndexError, import_extra
from grain_sft.pipeline import PREFETCH, READ_THREADS, PipelineIterator, Run, StepIterator, checked_step
from grain_sft.storage import files

_STEP, _PARTS = "next_step", "parts"  # keys of a state


def data_state(pipeline: Run, next_step: int) -> dict[str, Any]:
    """Return the state of a run's data for a checkpoint: `{"next_step": k, "receipt": …, "parts": {…}}`.

    The state has only values of JSON, and is the same on all hosts. It depends on the number of hosts only in orders such as
    `maxtext`.

    Raises:
      RowIndexError: `next_step` is negative, or not an integer.
    """
    return {_STEP: as_integer("next_step", next_step, 0, RowIndexError), **pipeline.receipt.as_dict()}


def resume_step(
    state: Mapping[str, Any], pipeline: Run, *, allow_other_data: bool = False, holder: str = "the checkpoint"
) -> int:
    """Return the next step stored in `state`, a result of `data_state`.

    Args:
      state: Saved state.
      pipeline: Pipeline of the run that resumes.
      allow_other_data: Whether to accept a state of other data.
      holder: Origin of the state, for messages, such as the path of a file.

    Raises:
      PipelineError: `state` is not a data state, or belongs to other data.
      RowIndexError: `pipeline` does not have the step.
      SamplerError: The number of hosts does not divide the batch size of this step or of a later one.
    """
    if not _is_state(state):
        raise PipelineError(f"{holder}: not a data state: {state!r}; expected {_STEP} and {_PARTS}. Restore another.")
    step: int = state[_STEP]
    differences = [] if allow_other_data else pipeline.receipt.differences(state[_PARTS], before=step)
    if differences:
        receipts = f"receipt {state.get('receipt')}; this run's receipt is {pipeline.receipt}"
        problem = f"{holder} is of a run on other data ({receipts}). The next step is {step}; 'there' means {holder}:"
        fix = "Give the run its old data, or allow_other_data=True to go on at that step with this data."
        raise PipelineError("\n".join([problem, *(f"  {line}" for line in differences), fix]))
    if not 0 <= step <= pipeline.end_step:
        problem = f"{holder}: next step {step}; expected 0 to {pipeline.end_step}, where the run ends"
        raise RowIndexError(f"{problem}. Make the run longer, or restore an earlier checkpoint.")
    return checked_step(pipeline, step)


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and type(value.get(_STEP)) is int and isinstance(value.get(_PARTS), Mapping)


class Stateful(StepIterator[Any]):
    """Base of iterators whose state is a `data_state`."""

    _allow_other_data = False

    def get_state(self) -> dict[str, Any]:
        """Return the `data_state` of the next step."""
        return data_state(self.pipeline, self.next_step)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at the step of `state`. If `resume_step` raises an error, stay at the current step."""
        self._go_to(resume_step(state, self.pipeline, allow_other_data=self._allow_other_data))


class CheckedIterator(Stateful, PipelineIterator):
    """Iterator over a pipeline's batches, with the receipt in its state: `set_state` refuses a state of other data.

    Grain's own handlers (`grain.checkpoint.CheckpointSave` and `CheckpointRestore`) accept this iterator, too. But they write
    one file for each process, so the number of processes must not change.

    Args:
      pipeline: Run of this host.
      start_step: Step of the first batch. The number of hosts has to divide the batch size of this step. If it divides only
        later batch sizes of a schedule, give the checkpoint's step, because the default 0 would be an error.
      allow_other_data: Whether to accept a state of other data.
      **options: Options of `Pipeline.iter`.
    """

    def __init__(self, pipeline: Run, start_step: int = 0, *, allow_other_data: bool = False, **options: int) -> None:
        self._allow_other_data = allow_other_data
        defaults = {"threads": READ_THREADS, "prefetch": PREFETCH, "worker_count": 0}
        super().__init__(pipeline, start_step, **defaults | options)


def _orbax_args() -> Any:
    return import_extra("orbax.checkpoint.args", "a checkpoint of Orbax", "orbax-checkpoint", "orbax")


def save_args(batches: Stateful) -> Any:
    """Return the `orbax.checkpoint.args` by which one process saves the state of `batches`, as an item of a `Composite`::

        manager.save(step, args=ocp.args.Composite(weights=ocp.args.StandardSave(weights), data=save_args(batches)))

    Raises:
      MissingExtraError: Orbax is not installed.
    """
    return _orbax_args().JsonSave(batches.get_state())


def restore(manager: Any, batches: Stateful, step: int | None = None, *, item: str = "data") -> int | None:
    """Continue `batches` at the step that a checkpoint has for them.

    Args:
      manager: `orbax.checkpoint.CheckpointManager`.
      batches: `CheckedIterator` or `jax_arrays.GlobalBatches`.
      step: Step of the checkpoint. None means the latest.
      item: Name of the checkpoint's item that was saved with `save_args`.

    Returns:
      Step of the next batch. None if the manager has no checkpoint; `batches` then stay at their step.

    Raises:
      PipelineError: The checkpoint does not exist, lacks a readable item, or belongs to other data.
      RowIndexError: The run of `batches` ends before the saved step.
      MissingExtraError: Orbax is not installed.
    """
    args = _orbax_args()
    step = manager.latest_step() if step is None else step
    if step is None:
        return None
    try:
        state = manager.restore(step, args=args.Composite(**{item: args.JsonRestore()}))[item]
    except (KeyError, FileNotFoundError, ValueError) as error:  # Orbax raises ValueError if another handler made the item
        saved = sorted(manager.all_steps())
        if step in saved:
            content = f"a checkpoint {step} whose item {item!r} is missing, damaged or not made by save_args. Give start_step."
        else:
            content = f"no checkpoint {step}; its checkpoints are {saved}. Give one of them, or None for the latest."
        raise PipelineError(f"{manager.directory} has {content}") from error
    batches.set_state(state)
    return int(state[_STEP])


RECORD = "grain_sft_data.json"
"""Name of the JSON file that records which data each step used, for trainers whose checkpoints hold no data state."""


def record_run(path: str, pipeline: Run, step: int, *, allow_other_data: bool = False, write: bool = True) -> None:
    """Check that the step before `step` used the data of `pipeline`, and record that the run uses these data from `step` on.

    Records that begin at `step` or later are dropped, because a run that went back does these steps again.

    Args:
      path: Path of the record, local or in a bucket.
      pipeline: Pipeline of the run.
      step: Next step of the run.
      allow_other_data: Whether to skip the check and record the data of `pipeline` from `step` on.
      write: Whether this process writes the record. Only one process of a run may write it.

    Raises:
      PipelineError: The step before `step` used other data, or the file is not such a record.
      RowIndexError: `pipeline` does not have the step.
      StorageError, CorpusFileError: The file can't be written or read.
    """
    now, recorded = data_state(pipeline, step), read_record(path)
    runs = [run for run in recorded if run[_STEP] < step]  # each has the first step that used its data
    data_before = runs[-1] if runs else now
    resume_step({**data_before, _STEP: step}, pipeline, allow_other_data=allow_other_data, holder=path)
    # the check above compared only steps before `step`; later steps may differ, such as in withdrawn documents
    if not runs or pipeline.receipt.differences(runs[-1][_PARTS]):
        runs.append(now)
    if write and runs != recorded:
        files.write_bytes(path, (json.dumps({"runs": runs}, indent=2) + "\n").encode())


def read_record(path: str) -> list[dict[str, Any]]:
    """Return the states in the record `path`, in the order of their steps; [] if the file does not exist.

    Raises:
      PipelineError: The file is not such a record.
      CorpusFileError: The file can't be read.
    """
    if not files.exists(path):
        return []
    try:
        runs = json.loads(files.read_text(path))["runs"]
        if not all(map(_is_state, runs)):
            raise TypeError("a step is not an integer, or parts are not an object")
    except (ValueError, KeyError, TypeError) as error:
        expected = f"expected JSON with 'runs', each with '{_STEP}' and '{_PARTS}'. Move the file away"
        raise PipelineError(f"{path}: not a record of a run's data ({error}); {expected}.") from error
    return list(runs)
