"""Launcher: runs MaxText's training command with iterators of grain_sft."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import logging

from grain_sft.config import read_config
from grain_sft.errors import GrainSftError, MissingExtraError
from grain_sft.integrations.maxtext import iterators
from grain_sft.integrations.maxtext.options import Options, split


def train(arguments: Sequence[str], options: Options) -> None:
    """Run MaxText's trainer with the arguments of its command.

    Raises:
      MissingExtraError: MaxText is not installed.
      GrainSftError: The config contradicts MaxText's, or reading the data failed during the run.
    """
    trainer = options.of_trainer
    try:
        from maxtext.input_pipeline import input_pipeline_interface as interface

        module = importlib.import_module(trainer.module)
    except ImportError as error:
        needed = "it needs Python 3.12 and what docs/maxtext.md installs"
        raise MissingExtraError(f"MaxText can't be imported ({error}): {needed}.") from error
    all_batches: list[iterators.MaxTextBatches] = []  # of training and of evaluation
    # config, batches and loading processes of the last call of `training_batches`
    training: tuple[Any, iterators.MaxTextBatches, Sequence[int]] | None = None

    def training_batches(config: Any, mesh: Any, process_indices: Sequence[int]) -> iterators.MaxTextBatches:
        nonlocal training
        batches = iterators.make_train_iterator(config, mesh, process_indices, options=options)
        all_batches.append(batches)
        training = config, batches, process_indices
        return batches

    def evaluation_batches(config: Any, mesh: Any, process_indices: Sequence[int]) -> iterators.MaxTextBatches:
        batches = iterators.make_eval_iterator(config, mesh, process_indices, options=options)
        all_batches.append(batches)
        return batches

    def continue_from_weights(step: int) -> None:
        if training is not None:
            config, batches, process_indices = training
            if batches.next_step != step * trainer.batches_per_step(config):
                logging.info("grain_sft: the weights are of step %d, so the data continue there.", step)
                iterators.continue_at(step, config, batches, options, process_indices)

    def check(config: Any) -> None:
        iterators.load_checked(config, options, training=True)
        if config.eval_interval > 0:
            iterators.load_checked(config, options, training=False)

    originals = [(patched, dict(vars(patched))) for patched in (interface, module)]
    interface.make_olmo_grain_train_iterator = training_batches
    interface.make_olmo_grain_eval_iterator = evaluation_batches
    trainer.check_first(module, check)
    trainer.follow(module, continue_from_weights)
    try:
        module.main([str(module.__file__), *arguments])  # MaxText finds the trainer's default config by this path
    finally:
        for patched, attributes in originals:  # undo the patches, for another run in this process
            vars(patched).update(attributes)
        for batches in all_batches:
            batches.close()
        for batches in all_batches:
            if batches.failure is not None:
                raise batches.failure  # instead of the error that MaxText raised because of it
    if training is not None:
        config, batches, _ = training
        steps = batches.next_step // trainer.batches_per_step(config)
        logging.info("grain_sft: the run is complete: the data were read up to step %d of %d.", steps, config.steps)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    try:
        theirs, options = split(arguments)
        read_config(options.required("config", iterators.TRAINING_CONFIG))
        if options.eval_config:
            read_config(options.eval_config)
        train(theirs, options)
    except GrainSftError as error:
        print(f"grain_sft.integrations.maxtext: {error}", file=sys.stderr)
        return 1
    return 0
