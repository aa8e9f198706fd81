"""Facts about MaxText's trainers, such as the number of batches that a step reads."""

import dataclasses
from collections.abc import Callable
from typing import Any

from grain_sft.errors import ConfigError

KEYS = ("inputs", "targets", "inputs_position", "targets_position", "inputs_segmentation", "targets_segmentation")
"""Keys of MaxText's batches of texts, int32 [rows, L]."""
PAIR_KEYS = ("prompt_ids", "prompt_mask", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")
"""Keys of MaxText's batches of preference pairs: int32 [rows, P] for prompts, and [rows, max_target_length - P] for responses.
P is MaxText's `dpo.max_prompt_length`."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer of MaxText. The methods of this class fit pre-training. Their argument `config` is MaxText's config.

    Pre-training reads one batch per step, which has all micro-batches. It writes checkpoint N after step N, counted from 0.

    Attributes:
      module: Name of the module whose function `main` runs the trainer.
      of_pairs: Whether the trainer trains on preference pairs.
    """

    module: str
    of_pairs: bool = False

    def widths(self, config: Any) -> dict[str, int]:
        """Return the row length of each array of a batch, by key."""
        length: int = config.max_target_length
        if not self.of_pairs:
            return dict.fromkeys(KEYS, length)
        prompt: int = config.dpo.max_prompt_length
        return {key: prompt if key.startswith("prompt") else length - prompt for key in PAIR_KEYS}

    def batches_per_step(self, config: Any) -> int:
        return 1

    def rows(self, config: Any, rows_of_step: int) -> int:
        """Return the number of rows in a global batch if a step reads `rows_of_step` rows."""
        return rows_of_step // self.batches_per_step(config)

    def step_after(self, checkpoint: int) -> int:
        """Return the step at which a run continues from this checkpoint."""
        return checkpoint + 1

    def check_first(self, module: Any, check: Callable[[Any], None]) -> None:
        """Patch the trainer's `module` to call `check` with MaxText's config before it loads weights, which can take minutes.

        Pre-training needs no patch: it makes the data iterators, which check the config, before it loads weights.
        """

    def follow(self, module: Any, continue_at: Callable[[int], None]) -> None:
        """Patch the trainer's `module` to call `continue_at` with the step of the restored weights.

        These are usually the weights of the latest checkpoint, but options of MaxText can name others.
        """
        get_first_step = module.get_first_step

        def first_step(*arguments: Any) -> int:
            step: int = get_first_step(*arguments)
            continue_at(step)
            return step

        module.get_first_step = first_step


@dataclasses.dataclass(frozen=True)
class Tunix(Trainer):
    """A trainer built on Tunix. It reads a batch for each micro-batch of a step, and writes checkpoint N after N steps.

    Attributes:
      begin: Name of the module's function that loads weights. Its first argument is MaxText's config.
      accumulates: Whether steps of several batches need the `grad_accumulator` of later versions of Tunix.
    """

    begin: str = "train"
    accumulates: bool = False

    def check_first(self, module: Any, check: Callable[[Any], None]) -> None:
        begin = getattr(module, self.begin)

        def begin_checked(config: Any, *others: Any) -> Any:
            check(config)
            return begin(config, *others)

        setattr(module, self.begin, begin_checked)

    def batches_per_step(self, config: Any) -> int:
        batches = int(config.gradient_accumulation_steps)
        if batches > 1 and not config.use_tunix_gradient_accumulation:
            found = f"gradient_accumulation_steps is {batches} and use_tunix_gradient_accumulation is false"
            reason = "Tunix would take whole batches for its micro-batches"
            raise ConfigError(f"MaxText's {found}: {reason}. Set use_tunix_gradient_accumulation=true.")
        return batches

    def step_after(self, checkpoint: int) -> int:
        return checkpoint

    def follow(self, module: Any, continue_at: Callable[[int], None]) -> None:
        """Continue at the trainer's step, which is restored by the time `train_model` is called."""
        train_model = module.train_model

        def train(config: Any, trainer: Any, mesh: Any) -> Any:
            steps = self.batches_per_step(config)
            if self.accumulates and steps > 1 and getattr(trainer, "grad_accumulator", None) is None:
                reason = "train_sft fails above 1 with this google-tunix: its trainer has no grad_accumulator"
                problem = f"MaxText's gradient_accumulation_steps is {steps}, but {reason}"
                raise ConfigError(f"{problem}. Set it to 1, or install a later version (docs/maxtext.md).")
            continue_at(trainer.train_steps)
            return train_model(config, trainer, mesh)

        module.train_model = train


class Distillation(Tunix):
    """MaxText's distillation trainer, built on Tunix. It restores its own checkpoints, after the data iterators exist."""

    def follow(self, module: Any, continue_at: Callable[[int], None]) -> None:
        class ContinuingTrainer(module.MaxTextDistillationTrainer):
            def setup_checkpoint_manager_and_restore(self, batches: Any, config: Any) -> Any:
                batches = super().setup_checkpoint_manager_and_restore(batches, config)
                continue_at(self.train_steps)
                return batches

        module.MaxTextDistillationTrainer = ContinuingTrainer


TRAINERS: dict[str, Trainer] = {
    "pre_train": Trainer("maxtext.trainers.pre_train.train"),
    "sft": Tunix("maxtext.trainers.post_train.sft.train_sft", accumulates=True),
    "dpo": Tunix("maxtext.trainers.post_train.dpo.train_dpo", of_pairs=True),
    "distill": Distillation("maxtext.trainers.post_train.distillation.train_distill", begin="train_distill"),
}
