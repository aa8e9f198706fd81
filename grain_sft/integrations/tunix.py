"""Data and loss for Tunix's `PeftTrainer`, written for google-tunix 0.1.7. docs/tunix.md explains their use:

trainer = PeftTrainer(model, optimizer, config).with_loss_fn(packed_loss)
trainer.train(training(batches, trainer), Evaluation(evaluation_batches))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import RECORD, record_run
from grain_sft.integrations.jax_arrays import GlobalBatch, GlobalBatches
from grain_sft.storage import files

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32

    _Rows = Int32[jax.Array, "rows length"]
    _Weights = Float32[jax.Array, "rows length"]


def training(batches: GlobalBatches, trainer: Any, *, allow_other_data: bool = False) -> Iterator[GlobalBatch]:
    """Yield the batches for `trainer.train`.

    After a restart, Tunix requests all batches again, and drops the batches before its checkpoint. In place of the dropped
    batches, this function yields empty dicts.

    Args:
      batches: Batches of the pipeline. This function moves them to the checkpoint's step.
      trainer: `tunix.sft.peft_trainer.PeftTrainer`, which restores its checkpoint in its constructor.
      allow_other_data: Whether to continue from a checkpoint of a run on other data.

    Raises:
      PipelineError: The checkpoint belongs to a run on other data.
      RowIndexError: The data end before the checkpoint's step.
    """
    trained: int = trainer.iter_steps  # number of batches that the checkpoint has trained on
    batches.seek(trained)
    folder = trainer.config.checkpoint_root_directory
    if folder:
        path, writes = files.join(files.normalize(folder), RECORD), jax.process_index() == 0
        record_run(path, batches.pipeline, trained, allow_other_data=allow_other_data, write=writes)
    if not trainer.is_managed_externally:  # an externally managed trainer drops no batch
        yield from ({} for _ in range(trained))
    yield from batches


class Evaluation:
    """Batches of an evaluation. Each `iter` begins with the first batch, as Tunix expects.

    Args:
      batches: Batches of a pipeline that ends, such as one with `epochs: 1` and `last_batch: fill`.

    Raises:
      PipelineError: The pipeline never ends, so Tunix's evaluation would not end.
    """

    def __init__(self, batches: GlobalBatches) -> None:
        if batches.pipeline.num_steps is None:
            fix = "Set sampler.epochs: 1 and sampler.last_batch: fill in its config"
            raise PipelineError(f"Evaluation: the pipeline never ends, so Tunix's evaluation would not end. {fix}.")
        self.batches = batches

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.batches.reset()
        return self.batches


def token_losses(model: Any, batch: GlobalBatch) -> Float[jax.Array, "rows length"]:
    """Return the cross entropy of each target of packed rows; 0 if the target takes no loss. Attention stays within a segment.

    Args:
      model: Model of Tunix, called as `model(tokens, positions, cache, attention_mask)`.
      batch: Batch of a pipeline whose last transform is `shift_targets`.
    """
    segments = batch["inputs_segmentation"]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, jnp.bool_))
    # padding attends to padding, so that no row of the mask is empty
    mask = causal & (segments[:, :, None] == segments[:, None, :])
    logits, _ = model(batch["inputs"], batch["inputs_position"], None, mask)
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -jnp.take_along_axis(log_probabilities, batch["targets"][..., None], -1)[..., 0]
    return jnp.where(batch["targets_segmentation"] != 0, losses, 0)


def packed_loss(
    model: Any,
    inputs: _Rows,
    targets: _Rows,
    inputs_position: _Rows,
    targets_position: _Rows,
    inputs_segmentation: _Rows,
    targets_segmentation: _Rows,
    targets_weights: _Weights | None = None,
) -> Float[jax.Array, ""]:
    """Return the mean cross entropy of the targets that take loss, weighted by `targets_weights` if given.

    Tunix's own loss also counts the tokens of prompts, and lets the documents of a row attend to each other. With
    `gradient_accumulation_steps` above 1, Tunix averages the means of the micro-batches.

    Args:
      model: As for `token_losses`.
      inputs, targets, inputs_position, targets_position, inputs_segmentation, targets_segmentation, targets_weights:
        Arrays of a batch, which Tunix passes by name. Each needs a parameter, because Flax's gradients do not accept `**batch`.
    """
    batch = {"inputs": inputs, "targets": targets, "inputs_position": inputs_position}
    batch |= {"inputs_segmentation": inputs_segmentation, "targets_segmentation": targets_segmentation}
    losses = token_losses(model, batch)
    weights = targets_segmentation != 0 if targets_weights is None else targets_weights
    total = weights.sum()
    return (losses * weights).sum() / jnp.where(total == 0, 1, total)
