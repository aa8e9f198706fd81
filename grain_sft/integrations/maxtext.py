"""MaxText's trainer on grain_sft's batches, without a patched file.

    python -m grain_sft.integrations.maxtext BASE.yml key=value … grain_sft_config=PATH [grain_sft_eval_config=PATH]

is MaxText's own command with other data. `make_train_iterator` and `make_eval_iterator` are what it puts where MaxText looks
for the iterators of `dataset_type=olmo_grain`. See docs/maxtext.md. Written for maxtext 0.2.5.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from grain_sft.config import load, stated
from grain_sft.errors import ConfigError, GrainSftError, MissingExtraError
from grain_sft.integrations import maxtext_checks as checks
from grain_sft.integrations.checkpoint import RunRecord
from grain_sft.integrations.jax_arrays import GlobalBatch, GlobalBatches, process_rows
from grain_sft.pipeline import Delivery, Pipeline
from grain_sft.sampling import Host
from grain_sft.sampling.orders_table import WITHOUT_EPOCHS

RECORD = "grain_sft_data.json"
"""Of which data a run had; in base_output_directory/run_name, beside the folder of checkpoints."""

_PREFIX = "grain_sft_"


@dataclasses.dataclass(frozen=True)
class Options:
    """What is said beside MaxText's config: on the command line as `grain_sft_NAME=value`, or as $GRAIN_SFT_NAME.

    Attributes:
      config: path of the config of the data of training.
      eval_config: path of that of evaluation.
      allow_other_data: go on from a checkpoint of a run on other data.
      ignore_weights: train although the corpus has weights, which MaxText's loss does not know.
    """

    config: str = ""
    eval_config: str = ""
    allow_other_data: bool = False
    ignore_weights: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """From texts by name.

        Raises:
          ConfigError: an unknown name, or a value that is neither true nor false.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
                raise ConfigError(f"unknown key {_PREFIX}{name}. The nearest that there is: {_PREFIX}{near}.")
            if kinds[name] == "bool" and text.lower() not in ("true", "false"):
                raise ConfigError(f"{_PREFIX}{name}={text}: expected true or false.")
            values[name] = text.lower() == "true" if kinds[name] == "bool" else text
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Options:
        """From $GRAIN_SFT_CONFIG, $GRAIN_SFT_EVAL_CONFIG, $GRAIN_SFT_ALLOW_OTHER_DATA and $GRAIN_SFT_IGNORE_WEIGHTS."""
        return cls.of(_environment())


def _environment() -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(Options)]
    return {name: os.environ[key] for name in names if (key := f"{_PREFIX}{name}".upper()) in os.environ}


class MaxTextBatches(GlobalBatches):
    """Batches for MaxText, which remember what made them fail: MaxText takes any error for the end of the data."""

    failure: Exception | None = None

    def _make(self, step: int) -> GlobalBatch:
        try:
            return super()._make(step)
        except Exception as error:
            self.failure = error
            raise

    def _record(self, step: int, delivery: Delivery) -> None:
        try:
            super()._record(step, delivery)
        except Exception as error:
            self.failure = error
            raise


def make_train_iterator(
    config: Any, mesh: Any, process_indices: Sequence[int], *, options: Options | None = None
) -> MaxTextBatches:
    """The batches of training, from the step after MaxText's latest checkpoint on.

    Args:
      config: MaxText's.
      mesh: of all devices.
      process_indices: of the processes that load data; this is one of them.
      options: None takes them from the environment.

    Raises:
      GrainSftError: no config, one that does not fit MaxText's, or a checkpoint of a run on other data.
    """
    options = options or Options.from_environment()
    checks.check_trainer(config)
    where = _required(options.config, "config", "the config of the data to train on")
    pipeline = load(where, host=Host(0, 1))
    checks.check_batches(config, pipeline, where, training=True)
    step = first_step(config)
    batches = _batches(config, mesh, process_indices, pipeline, where, options, training=True)
    batches.seek(step)
    record_data(config, batches, step, options, process_indices)
    logging.info("grain_sft: %s, receipt %s, from step %d on.", where, pipeline.receipt, step)
    return batches


def make_eval_iterator(
    config: Any, mesh: Any, process_indices: Sequence[int], *, options: Options | None = None
) -> MaxTextBatches:
    """The batches of evaluation, from the first on; MaxText calls `reset` before each. What its config does not state is
    `epochs: 1` and `last_batch: fill`: every row once, and rows without loss fill the last batch.

    Args:
      config, mesh, process_indices, options: as for training.

    Raises:
      GrainSftError: no config, one that does not fit MaxText's, or one that never ends.
    """
    options = options or Options.from_environment()
    checks.check_trainer(config)
    where = _required(options.eval_config, "eval_config", "the config of the data to evaluate on (or eval_interval=-1)")
    pipeline = load_evaluation(where)
    checks.check_batches(config, pipeline, where, training=False)
    if pipeline.num_steps is None and config.eval_steps <= 0:
        raise ConfigError(f"{where}: these data never end, and MaxText's eval_steps is {config.eval_steps}. Set it.")
    return _batches(config, mesh, process_indices, pipeline, where, options, training=False)


def _required(path: str, name: str, what: str) -> str:
    if not path:
        raise ConfigError(
            f"{_PREFIX}{name} is not given: {what}. Give {_PREFIX}{name}=PATH on the command line of "
            f"grain_sft.integrations.maxtext, or ${(_PREFIX + name).upper()}."
        )
    return path


def load_evaluation(where: str) -> Pipeline:
    """The pipeline of a config, ending after one epoch with a filled batch unless the config states otherwise.

    Raises: as `load`.
    """
    _, sections = stated(where)
    sampler = sections["sampler"]
    endless = sampler.get("order") in WITHOUT_EPOCHS or "mixture" in sections["corpus"]
    once = {} if endless else {"epochs": 1, "last_batch": "fill"}
    added = {key: value for key, value in once.items() if key not in sampler}
    if not added:
        return load(where, host=Host(0, 1))
    try:
        return load({**sections, "sampler": {**sampler, **added}}, host=Host(0, 1))
    except GrainSftError as error:
        raise type(error)(f"{where} (with {added} for evaluation): {error}") from error


def _batches(
    config: Any,
    mesh: Any,
    process_indices: Sequence[int],
    pipeline: Pipeline,
    where: str,
    options: Options,
    *,
    training: bool,
) -> MaxTextBatches:
    """Global arrays as MaxText's train step wants them; where only some processes load, as its placeholders on the others
    are: rows over all devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from maxtext.utils.sharding import get_input_data_sharding

    checks.check_weights(pipeline, where, options.ignore_weights)
    rows = config.global_batch_size_to_load if training else config.global_batch_size_to_load_eval
    everyone = len(process_indices) == jax.process_count()
    if everyone and not config.enable_diloco:
        rules = config.logical_axis_rules if training else config.logical_axis_rules_for_eval
        sharding = get_input_data_sharding(config, mesh, rules=rules)
    else:
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # type: ignore[no-untyped-call]
        _check_loaders(sharding, (rows, config.max_target_length), process_indices, pipeline)
    batches: MaxTextBatches
    prepare = checks.prepare(config.vocab_size, where, lambda step: batches.rows(step))
    batches = MaxTextBatches(pipeline, sharding, num_rows=rows, prepare=prepare)
    return batches


def _check_loaders(sharding: Any, shape: tuple[int, int], process_indices: Sequence[int], pipeline: Pipeline) -> None:
    """Refuse rows of the batch on devices of a process that loads nothing."""
    import jax

    for process in sorted(set(range(jax.process_count())) - set(process_indices)):
        held = process_rows(sharding, shape, process).held
        if len(held) and held[0] < pipeline.sampler.global_batch_size:
            raise ConfigError(
                f"row {held[0]} of the global batch lies on process {process}, but of MaxText only processes "
                f"{list(process_indices)} load data. Take another expansion_factor_real_data or per_device_batch_size."
            )


def first_step(config: Any) -> int:
    """The step that MaxText goes on at: the one after its latest whole checkpoint, 0 where there is none."""
    folder = config.checkpoint_dir if config.enable_checkpointing else None
    if not folder:
        return 0
    import orbax.checkpoint as ocp
    from etils import epath

    path = epath.Path(folder)
    steps = ocp.utils.checkpoint_steps(path) if path.exists() else []
    return max(steps) + 1 if steps else 0


def record_data(
    config: Any, batches: GlobalBatches, step: int, options: Options, process_indices: Sequence[int]
) -> None:
    """Check that the steps before `step` were run on these data, and say so beside the checkpoints.

    Raises:
      PipelineError: they were run on others; the message says what differs.
    """
    import jax

    if not config.enable_checkpointing or not config.checkpoint_dir:
        return
    folder = os.path.dirname(config.checkpoint_dir.rstrip("/"))
    record = RunRecord(f"{folder}/{RECORD}")
    try:
        record.begin(
            batches.pipeline,
            step,
            allow_other_data=options.allow_other_data,
            write=jax.process_index() == min(process_indices),
        )
    except GrainSftError as error:
        advice = f"{record.path}: {error}\nOn this command line that is {_PREFIX}allow_other_data=true."
        raise type(error)(advice) from error


class _Run:
    """One run of the launcher: makes iterators, and moves them to the step at which MaxText really begins."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.made: list[MaxTextBatches] = []
        self._training: tuple[Any, MaxTextBatches, Sequence[int]] | None = None

    def make_train_iterator(self, config: Any, mesh: Any, process_indices: Sequence[int]) -> MaxTextBatches:
        batches = make_train_iterator(config, mesh, process_indices, options=self.options)
        self._training = config, batches, process_indices
        self.made.append(batches)
        return batches

    def make_eval_iterator(self, config: Any, mesh: Any, process_indices: Sequence[int]) -> MaxTextBatches:
        batches = make_eval_iterator(config, mesh, process_indices, options=self.options)
        self.made.append(batches)
        return batches

    def seek(self, get_first_step: Callable[..., int], *arguments: Any) -> int:
        """MaxText's first step, which is that of the weights it has restored, from wherever (`load_full_state_path`)."""
        step = get_first_step(*arguments)
        if self._training is not None:
            config, batches, process_indices = self._training
            if batches.next_step != step:
                logging.info("grain_sft: the weights are of step %d, so the data go on there.", step)
                batches.seek(step)
                record_data(config, batches, step, self.options, process_indices)
        return step

    @property
    def failure(self) -> Exception | None:
        return next((batches.failure for batches in self.made if batches.failure is not None), None)


def train(argv: Sequence[str], options: Options) -> None:
    """Run MaxText's trainer with `argv` as its command line has it.

    Raises:
      MissingExtraError: MaxText is not installed.
      GrainSftError: data that don't fit, or that failed while it ran.
    """
    try:
        from maxtext.input_pipeline import input_pipeline_interface as interface
        from maxtext.trainers.pre_train import train as trainer
    except ImportError as error:
        raise MissingExtraError(
            f"MaxText can't be imported ({error}): it needs Python 3.12 and what docs/maxtext.md installs."
        ) from error
    run = _Run(options)
    interface.make_olmo_grain_train_iterator = run.make_train_iterator
    interface.make_olmo_grain_eval_iterator = run.make_eval_iterator
    trainer.get_first_step = functools.partial(run.seek, trainer.get_first_step)
    try:
        trainer.main([argv[0], *argv[1:]])
    finally:
        for batches in run.made:
            batches.close()
    if run.failure is not None:
        raise run.failure


def split(arguments: Sequence[str]) -> tuple[list[str], Options]:
    """MaxText's arguments, and the options that stand among them.

    Raises:
      ConfigError: as `Options.of`; or MaxText is told to take other data.
    """
    theirs = [word for word in arguments if not word.startswith(_PREFIX)]
    given = dict(word.removeprefix(_PREFIX).partition("=")[::2] for word in arguments if word.startswith(_PREFIX))
    options = Options.of(_environment() | given)
    for word in theirs:
        if word.startswith("dataset_type=") and word != "dataset_type=olmo_grain":
            raise ConfigError(f"{word}: the data are grain_sft's here. Take it out.")
    return [*(word for word in theirs if not word.startswith("dataset_type=")), "dataset_type=olmo_grain"], options


def main(arguments: Sequence[str]) -> int:
    """The launcher. Returns the exit status."""
    try:
        theirs, options = split(arguments)
        stated(_required(options.config, "config", "the config of the data to train on"))
        if options.eval_config:
            stated(options.eval_config)
        train(["grain_sft.integrations.maxtext", *theirs], options)
    except GrainSftError as error:
        print(f"grain_sft.integrations.maxtext: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from absl import app

    from grain_sft.integrations import maxtext  # whose classes are those that others import

    app.run(lambda argv: maxtext.main(argv[1:]), argv=sys.argv)
