"""Launcher: MaxText's training command with iterators of grain_sft."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from grain_sft.config import stated
from grain_sft.errors import GrainSftError, MissingExtraError
from grain_sft.integrations.maxtext.iterators import (
    TRAINING_CONFIG,
    MaxTextBatches,
    make_eval_iterator,
    make_train_iterator,
    record_data,
)
from grain_sft.integrations.maxtext.options import Options, split


class _Run:
    """One run: makes iterators, and moves them to the step at which MaxText really begins."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.batches: list[MaxTextBatches] = []
        self._training: tuple[Any, MaxTextBatches, Sequence[int]] | None = None

    def make_train_iterator(self, config: Any, mesh: Any, process_indices: Sequence[int]) -> MaxTextBatches:
        batches = make_train_iterator(config, mesh, process_indices, options=self.options)
        self._training = config, batches, process_indices
        self.batches.append(batches)
        return batches

    def make_eval_iterator(self, config: Any, mesh: Any, process_indices: Sequence[int]) -> MaxTextBatches:
        self.batches.append(make_eval_iterator(config, mesh, process_indices, options=self.options))
        return self.batches[-1]

    def first_step(self, get_first_step: Callable[..., int], *arguments: Any) -> int:
        """Return MaxText's first step, which is that of the weights it restored (`load_full_state_path` may name others)."""
        step = get_first_step(*arguments)
        if self._training is not None:
            config, batches, process_indices = self._training
            if batches.next_step != step:
                logging.info("grain_sft: the weights are of step %d, so the data continue there.", step)
                batches.seek(step)
                record_data(config, batches, step, self.options, process_indices)
        return step


def train(argv: Sequence[str], options: Options) -> None:
    """Run MaxText's trainer.

    Args:
      argv: Command line of MaxText's trainer, the program first.
      options: Options of grain_sft.

    Raises:
      MissingExtraError: MaxText is not installed.
      GrainSftError: data that do not fit, or that failed during the run.
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
    trainer.get_first_step = functools.partial(run.first_step, trainer.get_first_step)
    try:
        trainer.main(list(argv))
    finally:
        for batches in run.batches:
            batches.close()
    for batches in run.batches:
        if batches.failure is not None:
            raise batches.failure


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    try:
        theirs, options = split(arguments)
        stated(options.required("config", TRAINING_CONFIG))
        if options.eval_config:
            stated(options.eval_config)
        train(["grain_sft.integrations.maxtext", *theirs], options)
    except GrainSftError as error:
        print(f"grain_sft.integrations.maxtext: {error}", file=sys.stderr)
        return 1
    return 0
