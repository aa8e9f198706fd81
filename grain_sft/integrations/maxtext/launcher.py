"""Launcher: MaxText's training command with iterators of grain_sft."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


def train(argv: Sequence[str], options: Options) -> None:
    """Run MaxText's trainer with a command line, the program first.

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
    made: list[MaxTextBatches] = []
    training: list[tuple[Any, MaxTextBatches, Sequence[int]]] = []
    get_first_step = trainer.get_first_step

    def training_batches(config: Any, mesh: Any, process_indices: Sequence[int]) -> MaxTextBatches:
        made.append(make_train_iterator(config, mesh, process_indices, options=options))
        training[:] = [(config, made[-1], process_indices)]
        return made[-1]

    def evaluation_batches(config: Any, mesh: Any, process_indices: Sequence[int]) -> MaxTextBatches:
        made.append(make_eval_iterator(config, mesh, process_indices, options=options))
        return made[-1]

    def first_step(*arguments: Any) -> int:
        """Move the data to MaxText's first step, that of the restored weights (`load_full_state_path` may name others)."""
        step: int = get_first_step(*arguments)
        for config, batches, process_indices in training:
            if batches.next_step != step:
                logging.info("grain_sft: the weights are of step %d, so the data continue there.", step)
                batches.seek(step)
                record_data(config, batches, step, options, process_indices)
        return step

    interface.make_olmo_grain_train_iterator = training_batches
    interface.make_olmo_grain_eval_iterator = evaluation_batches
    trainer.get_first_step = first_step
    try:
        trainer.main(list(argv))
    finally:
        for batches in made:
            batches.close()
    for failure in filter(None, (batches.failure for batches in made)):
        raise failure


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
