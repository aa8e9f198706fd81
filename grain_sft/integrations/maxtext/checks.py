"""Checks of a pipeline against MaxText's config. MaxText itself does not check any of this."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from absl import logging

from grain_sft.errors import ConfigError, PipelineError, TransformError
from grain_sft.integrations.jax_arrays import Block, row_widths
from grain_sft.integrations.maxtext.trainers import KEYS, TRAINERS, Trainer
from grain_sft.layout import Layout
from grain_sft.pipeline import Pipeline
from grain_sft.source import Element
from grain_sft.transforms import trait

_BLOCK_ROWS = 1 << 16  # number of rows that are checked at a time

_RAMPUP = "it cuts one batch into several steps, so a checkpoint's step does not name the next batch. Set it to false."
_EXPANSION = "it is for runs that resume on fewer hosts, but grain_sft resumes on any number of hosts. Set it to -1."
_MASKS = "grain_sft does not make the masks of this objective. Choose another objective."
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dataset_type": (lambda value: value != "olmo_grain", "expected 'olmo_grain', which grain_sft replaces. Remove the key."),
    "enable_rampup_batch_size": (bool, _RAMPUP),
    "reuse_example_batch": (bool, "it trains on the first batch in every step. Set it to 0."),
    "training_objective": (lambda value: value == "block_diffusion", _MASKS),
    "offline_data_dir": (bool, "its files hold a teacher's logits, which grain_sft does not read. Remove the key."),
    "expansion_factor_real_data": (lambda value: 0 < value < 1, _EXPANSION),
}
"""By key of MaxText's config: a function that returns whether a value is refused, and the reason. With a refused value, a step
would not train on the pipeline's batch, or a resumed run would not continue with the next batch."""


def check_trainer(config: Any) -> None:
    """Raise a ConfigError if `_REFUSED` refuses a value of MaxText's config."""
    for key, (refused, reason) in _REFUSED.items():
        value = getattr(config, key, 0)  # a version of MaxText may lack the key
        if refused(value):
            raise ConfigError(f"MaxText's {key} is {value!r}: {reason}")


def check_batches(config: Any, pipeline: Pipeline, where: str, trainer: Trainer, *, training: bool) -> None:
    """Raise an error if batches of `pipeline` do not fit MaxText's `config`. `where` is the path of the pipeline's config."""
    for stage in pipeline.stages:
        _check_stage(config, stage, where, trainer, training)
    steps = pipeline.end_step // trainer.batches_per_step(config)
    if training and steps < config.steps:
        problem = f"the data end after {steps} steps, but MaxText's steps is {config.steps}"
        reason = "if the data end first, MaxText writes no final checkpoint"
        raise ConfigError(f"{where}: {problem}; {reason}. Set steps={steps}, or a larger sampler.epochs.")


def _check_stage(config: Any, pipeline: Pipeline, where: str, trainer: Trainer, training: bool) -> None:
    """Raise an error if batches of one stage, the `pipeline`, do not fit MaxText's `config`."""
    layout = pipeline.source.layout
    _check_rows(config, pipeline, where, trainer, training)
    if layout.of_pairs != trainer.of_pairs:
        ours, theirs = ("preference pairs", "texts") if layout.of_pairs else ("texts", "preference pairs")
        others = ", ".join(name for name, other in TRAINERS.items() if other.of_pairs == layout.of_pairs)
        fix = f"Give a config of {theirs}, or a trainer of {ours} as the first word of the command: {others}"
        raise ConfigError(f"{where}: its rows are {ours}, but this trainer takes {theirs}. {fix}.")
    _check_widths(config, pipeline, where, trainer)
    if trainer.of_pairs and config.dpo.algo == "orpo":
        _check_responses(layout, where)
        if pipeline.withdrawals is not None:
            problem = "withdrawn pairs have no tokens, and ORPO's loss of such a pair is infinite"
            raise ConfigError(f"{where}: {problem}. Write the corpus without such pairs, or give dpo.algo=dpo.")
    for name in ("eos_token_id", "pad_token_id"):
        token = getattr(layout.corpus, name, None)  # a mixture's corpora may have several ids
        if token is not None and token >= config.vocab_size:
            problem = f"{name} is {token}, but MaxText's vocab_size is {config.vocab_size}"
            raise ConfigError(f"{where}: {problem}. Set vocab_size to at least the tokenizer's vocabulary size.")
    # a transform may divide the one segment of a row into several
    divided = any(trait(transform, "divides_segments") for transform in pipeline.transforms)
    one_segment = not divided and all(part.one_segment for part in layout.parts.values())
    if not (config.packing or trainer.of_pairs or one_segment):
        reason = "some of MaxText's attention kernels would attend across documents, because its packing is false"
        raise ConfigError(f"{where}: rows hold several documents, and {reason}. Set packing=True.")


def _check_widths(config: Any, pipeline: Pipeline, where: str, trainer: Trainer) -> None:
    """Refuse batches without one of the arrays that MaxText needs, and arrays with rows of another length."""
    widths, expected = row_widths(pipeline), trainer.widths(config)
    missing = ", ".join(key for key in expected if key not in widths)
    if missing:
        transform = "split_pairs" if trainer.of_pairs else "shift_targets"
        raise PipelineError(f"{where}: batches lack {missing}, which MaxText needs. Add {transform} as the last transform.")
    for key, width in expected.items():
        if widths[key] != width:
            theirs, ours = "max_target_length", f"sequence_length: {config.max_target_length}"
            if trainer.of_pairs:
                theirs += " and dpo.max_prompt_length"
                ours += f" and layout.prompt_length: {config.dpo.max_prompt_length}"
            problem = f"{key} has {widths[key]} tokens a row, but {width} by MaxText's {theirs}"
            raise ConfigError(f"{where}: {problem}. Set layout.{ours}, or change MaxText's {theirs}.")


def _check_responses(layout: Layout, where: str) -> None:
    """Refuse a pair with an empty response: its ORPO loss is infinite, so all weights become NaN."""
    for first in range(0, len(layout), _BLOCK_ROWS):
        rows = np.arange(first, min(first + _BLOCK_ROWS, len(layout)))
        pieces = layout.pieces(rows)
        # segment 1 is the prompt, and segments 2 and 3 are the two responses; an empty response has no piece
        responses = np.bincount(pieces.row[pieces.segments_and_positions[0] > 1], minlength=len(rows))
        if (responses < 2).any():
            document = layout.spans(first + int(responses.argmin()))[0].document
            problem = f"a response of pair {document} has no tokens, and ORPO's loss of it is infinite"
            raise ConfigError(f"{where}: {problem}. Leave such pairs out of the corpus, or give dpo.algo=dpo.")


def _check_rows(config: Any, pipeline: Pipeline, where: str, trainer: Trainer, training: bool) -> None:
    """Refuse rows of several lengths, and batches with a number of rows that MaxText does not expect."""
    name = "global_batch_size_to_train_on" if training else "global_batch_size_to_eval_on"
    rows_of_step = getattr(config, name)
    expected = trainer.rows(config, rows_of_step) if training else rows_of_step
    if lengths := pipeline.source.layout.row_lengths:
        problem = f"rows have {', '.join(map(str, lengths))} tokens, but all of MaxText's steps have one shape"
        raise ConfigError(f"{where}: {problem}. Choose a layout whose rows have one length.")
    wrong = [rows for rows in pipeline.sampler.batch_sizes.sizes if rows != expected]
    if wrong:
        per_device = "per_device_batch_size" if training else "eval_per_device_batch_size"
        steps = f" x gradient_accumulation_steps={config.gradient_accumulation_steps}" if training else ""
        batches = "" if expected == rows_of_step else f", {expected} in each of a step's batches"
        product = f"{per_device}={getattr(config, per_device)} x {config.num_target_devices} devices{steps}"
        problem = f"the global batch has {wrong[0]} rows, but MaxText's {name} is {rows_of_step} ({product}){batches}"
        fix = f"Make them equal: sampler.global_batch_size: {expected}, or another {per_device}"
        raise ConfigError(f"{where}: {problem}, and all of its steps have one shape. {fix}.")


def check_weights(pipeline: Pipeline, where: str, ignore: bool) -> None:
    """Refuse token weights, which MaxText does not use. With `ignore`, log a warning instead."""
    if not any("targets_weights" in row_widths(stage) for stage in pipeline.stages):
        return
    if not ignore:
        problem = "the corpus has weights of tokens, but MaxText's loss counts every weight above 0 as 1"
        raise ConfigError(f"{where}: {problem}. Give grain_sft_ignore_weights=true, or a corpus with masks.")
    logging.warning("%s: weights of tokens are ignored: each target of a weight above 0 counts once.", where)


def prepare(vocabulary: int, where: str, keys: Collection[str] = KEYS) -> Callable[[int, Block, Element], Element]:
    """Return a function for the argument `prepare` of `GlobalBatches`.

    The function returns only the arrays of `keys`. It raises a TransformError for a token id of `vocabulary` or more.
    """
    checked = [key for key in keys if key in ("inputs", "targets") or key.endswith("_ids")]

    def prepared(step: int, block: Block, batch: Element) -> Element:
        """Return the arrays of `keys`. Refuse the first token beyond the vocabulary, with its row and column."""
        for key in checked:
            tokens = batch[key]
            if tokens.size and int(tokens.max()) >= vocabulary:
                row, column = np.argwhere(tokens >= vocabulary)[0].tolist()
                first = block.columns[0] if block.columns else 0
                place = f"row {block.rows[row]} of the global batch, column {first + column} of {key}"
                found = f"token {tokens[row, column]}, but MaxText's vocab_size is {vocabulary}"
                fix = "Set vocab_size to that of the corpus's tokenizer, or corpus.pad_token_id if the token is padding"
                raise TransformError(f"{where}: step {step}, {place}: {found}. {fix}.")
        return {key: batch[key] for key in keys}

    return prepared
