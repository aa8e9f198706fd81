"""Iterators of batches for training and evaluation, which replace MaxText's own."""

import os
from collections.abc import Sequence
from typing import Any, Self

import jax
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from grain_sft.config import load, naming, read_config
from grain_sft.errors import ConfigError, PipelineError
from grain_sft.integrations.checkpoint import RECORD, record_run
from grain_sft.integrations.jax_arrays import GlobalBatch, GlobalBatches, process_rows
from grain_sft.integrations.maxtext import checks
from grain_sft.integrations.maxtext.options import PREFIX, Options
from grain_sft.integrations.maxtext.trainers import Trainer
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import ORDERS, Host

TRAINING_CONFIG = "the config of the data to train on"  # what a message calls a missing `grain_sft_config`


class MaxTextBatches(GlobalBatches):
    """Global batches for MaxText. They end after `num_batches`, because some of MaxText's loops never end by themselves.

    If `num_batches` is None, they end with the data of the pipeline.

    Attributes:
      failure: Error that ended the batches. MaxText treats any error as the end of the data, so the launcher raises `failure`
        after the run.
    """

    failure: Exception | None = None

    def __init__(self, pipeline: Pipeline, sharding: Any, num_batches: int | None, **options: Any) -> None:
        super().__init__(pipeline, sharding, **options)
        self._end = pipeline.end_step if num_batches is None else min(num_batches, pipeline.end_step)

    def _offer(self) -> int:
        """Make the next batch, as `StepIterator._offer` does. Store an error other than a StopIteration in `failure`."""
        try:
            return super()._offer()
        except Exception as error:
            self.failure = None if isinstance(error, StopIteration) else error
            raise


class EvaluationBatches(MaxTextBatches):
    """Batches of an evaluation. Each `iter`, and the `next` after a StopIteration, begins at the first batch again."""

    def __iter__(self) -> Self:
        self.reset()
        return self

    def __next__(self) -> GlobalBatch:
        try:
            batch: GlobalBatch = super().__next__()
        except StopIteration:
            self.reset()
            raise
        return batch


def make_train_iterator(
    config: Any, mesh: Any, process_indices: Sequence[int], *, options: Options | None = None
) -> MaxTextBatches:
    """Return the batches of training, from the step after MaxText's latest checkpoint on.

    Args:
      mesh: Mesh of all devices.
      process_indices: Processes that load data, this process included.
      options: Options of grain_sft. None reads the options from the environment.

    Raises:
      GrainSftError: The config is missing or contradicts MaxText's config, or the checkpoint was made with other data.
    """
    options = options or Options.from_environment()
    batches = _batches(config, mesh, process_indices, options, training=True)
    step = first_step(config, options.of_trainer)
    continue_at(step, config, batches, options, process_indices)
    logging.info("grain_sft: %s, receipt %s, from step %d on.", options.config, batches.pipeline.receipt, step)
    return batches


def make_eval_iterator(
    config: Any, mesh: Any, process_indices: Sequence[int], *, options: Options | None = None
) -> MaxTextBatches:
    """Return the batches of evaluation: at most MaxText's `eval_steps`, if above 0. Each `iter` begins at the first batch.

    The arguments are as in `make_train_iterator`.

    Raises:
      GrainSftError: The config is missing or contradicts MaxText's config, or its data never end.
    """
    return _batches(config, mesh, process_indices, options or Options.from_environment(), training=False)


def load_checked(config: Any, options: Options, *, training: bool) -> tuple[Pipeline, str]:
    """Return the pipeline of training or of evaluation, and the path of its config. Check both against MaxText's `config`."""
    checks.check_trainer(config)
    if training:
        where = options.required("config", TRAINING_CONFIG)
        pipeline = load(where, host=Host(0, 1))
    else:
        where = options.required("eval_config", "the config of the data to evaluate on, needed unless eval_interval=-1")
        pipeline = load_evaluation(where)
        if pipeline.num_steps is None and config.eval_steps <= 0:
            raise ConfigError(f"{where}: the data never end. Set MaxText's eval_steps, which is {config.eval_steps}.")
    checks.check_batches(config, pipeline, where, options.of_trainer, training=training)
    checks.check_weights(pipeline, where, options.ignore_weights)
    return pipeline, where


def load_evaluation(where: str) -> Pipeline:
    """Return the pipeline of the config at `where`. Add `epochs: 1` and `last_batch: fill` where the config lacks these keys.

    Neither key is added if the config

    - has a mixture;
    - has an order whose batches may have rows of two epochs (`Order.runs_on`);
    - states its corpus or its sampler only in its stages.
    """
    _, sections = read_config(where)
    sampler, corpus = sections.get("sampler", {}), sections.get("corpus", {})
    unchanged = not sampler or not corpus or "mixture" in corpus or ORDERS[sampler.get("order", "shuffle")].runs_on
    added = {key: value for key, value in {"epochs": 1, "last_batch": "fill"}.items() if key not in sampler}
    if unchanged or not added:
        return load(where, host=Host(0, 1))
    with naming(f"{where} (with {added} for evaluation)"):
        return load({**sections, "sampler": {**sampler, **added}}, host=Host(0, 1))


def _batches(config: Any, mesh: Any, loaders: Sequence[int], options: Options, *, training: bool) -> MaxTextBatches:
    """Return the batches of training or of evaluation from step 0 on."""
    from maxtext.utils.sharding import get_input_data_sharding

    pipeline, where = load_checked(config, options, training=training)
    trainer = options.of_trainer
    kind: type[MaxTextBatches]
    if training:
        kind, rows = MaxTextBatches, trainer.rows(config, config.global_batch_size_to_load)
        num_batches = config.steps * trainer.batches_per_step(config)
    else:
        kind, rows = EvaluationBatches, config.global_batch_size_to_load_eval
        num_batches = config.eval_steps if config.eval_steps > 0 else None
    all_load = len(loaders) == jax.process_count()
    if all_load and not config.enable_diloco:
        rules = config.logical_axis_rules if training else config.logical_axis_rules_for_eval
        sharding = get_input_data_sharding(config, mesh, rules=rules)
    else:
        # MaxText gives placeholder batches of this sharding to processes that load nothing, and DiLoCo reshapes such batches
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # type: ignore[no-untyped-call]
        for process in sorted(set(range(jax.process_count())) - set(loaders)):
            its_rows = process_rows(sharding, (rows, config.max_target_length), process).rows
            # The global arrays have `rows` rows. Those after the rows of the batch are zeros, which no process has to read.
            if len(its_rows) and its_rows[0] < pipeline.sampler.global_batch_size:
                problem = f"row {its_rows[0]} of the global batch is on process {process}"
                reason = f"MaxText's loaders are processes {list(loaders)}"
                raise ConfigError(f"{problem}, but {reason}. Set expansion_factor_real_data or per_device_batch_size.")
    prepare = checks.prepare(config.vocab_size, where, trainer.widths(config))
    return kind(pipeline, sharding, num_batches, num_rows=rows, prepare=prepare)


def first_step(config: Any, trainer: Trainer) -> int:
    """Return the step after MaxText's latest complete checkpoint; 0 without a checkpoint."""
    if not config.enable_checkpointing or not config.checkpoint_dir:
        return 0
    import orbax.checkpoint as ocp
    from etils import epath

    path = epath.Path(config.checkpoint_dir)
    steps = ocp.utils.checkpoint_steps(path) if path.exists() else []
    return trainer.step_after(max(steps)) if steps else 0


def continue_at(step: int, config: Any, batches: GlobalBatches, options: Options, loaders: Sequence[int]) -> None:
    """Continue with the batches of MaxText's `step`, and record the data of the run (`record_run`).

    The record is next to the folder of the checkpoints. The first of the processes `loaders` writes the record.

    Raises:
      PipelineError: The steps before `step` used other data.
    """
    batches.seek(step * options.of_trainer.batches_per_step(config))
    if not config.enable_checkpointing or not config.checkpoint_dir:
        return
    path = f"{os.path.dirname(config.checkpoint_dir.rstrip('/'))}/{RECORD}"
    allowed, writes = options.allow_other_data, jax.process_index() == min(loaders)
    try:
        record_run(path, batches.pipeline, batches.next_step, allow_other_data=allowed, write=writes)
    except PipelineError as error:
        raise PipelineError(str(error).replace("allow_other_data=True", f"{PREFIX}allow_other_data=true")) from error
