"""Launcher of MaxText's trainers on batches of grain_sft."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import logging

from grain_sft.config import read_config
from grain_sft.errors import GrainSftError, MissingExtraError
from grain_sft.integrations.maxtext import iterators
from grain_sft.integrations.maxtext.options import Options, split


class _TrainerRun:
    """Functions that replace functions of MaxText during a run, and the batches that they have made."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._batches: list[iterators.MaxTextBatches] = []
        # config, process indices and result of the last call of `make_training`
        self._training: tuple[Any, Sequence[int], iterators.MaxTextBatches] | None = None

    def make_training(self, config: Any, mesh: Any, process_indices: Sequence[int]) -> iterators.MaxTextBatches:
        batches = iterators.make_train_iterator(config, mesh, process_indices, options=self._options)
        self._batches.append(batches)
        self._training = config, process_indices, batches
        return batches

    def make_evaluation(self, config: Any, mesh: Any, process_indices: Sequence[int]) -> iterators.MaxTextBatches:
        batches = iterators.make_eval_iterator(config, mesh, process_indices, options=self._options)
        self._batches.append(batches)
        return batches

    def check(self, config: Any) -> None:
        """Raise an error if the data contradict MaxText's `config`."""
        iterators.load_checked(config, self._options, training=True)
        if config.eval_interval > 0:
            iterators.load_checked(config, self._options, training=False)

    def follow(self, step: int) -> None:
        """Continue the batches of training at `step`, the step of the restored weights."""
        if self._training is not None:
            config, process_indices, batches = self._training
            if batches.next_step != step * self._options.of_trainer.batches_per_step(config):
                logging.info("grain_sft: the weights are of step %d, so the data continue there.", step)
                iterators.continue_at(step, config, batches, self._options, process_indices)

    def close(self) -> None:
        """Close all batches. If a read failed, raise the error of the read: MaxText's own error does not name the cause."""
        for batches in self._batches:
            batches.close()
        for batches in self._batches:
            if batches.failure is not None:
                raise batches.failure

    def log_end(self) -> None:
        """Log how many steps the run has read, if it has trained."""
        if self._training is not None:
            config, _, batches = self._training
            steps = batches.next_step // self._options.of_trainer.batches_per_step(config)
            logging.info("grain_sft: the run is complete: the data were read up to step %d of %d.", steps, config.steps)


def train(arguments: Sequence[str], options: Options) -> None:
    """Run MaxText's trainer with the arguments of its command.

    Raises:
      MissingExtraError: MaxText is not installed.
      GrainSftError: The config of grain_sft contradicts MaxText's, or the data could not be read during the run.
    """
    trainer, run = options.of_trainer, _TrainerRun(options)
    try:
        from maxtext.input_pipeline import input_pipeline_interface as interface

        module = importlib.import_module(trainer.module)
    except ImportError as error:
        fix = "Use Python 3.12, and install what docs/maxtext.md lists"
        raise MissingExtraError(f"MaxText can't be imported ({error}). {fix}.") from error
    # the two modules to patch, each with a copy of its attributes
    originals = [(patched, dict(vars(patched))) for patched in (interface, module)]
    try:
        interface.make_olmo_grain_train_iterator = run.make_training
        interface.make_olmo_grain_eval_iterator = run.make_evaluation
        trainer.check_first(module, run.check)
        trainer.follow(module, run.follow)
        module.main([str(module.__file__), *arguments])  # MaxText finds the trainer's default config by this path
    finally:
        for patched, attributes in originals:  # undo the patches, for another run in this process
            vars(patched).update(attributes)
        run.close()
    run.log_end()


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status."""
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
