"""Translation of a GPTConfig to sections of our configs.

A GPTConfig is the config file of trainers that use the episode-indexed loader (docs/coming_from.md).
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from absl import logging

from grain_sft.config.reading import DATASET_DIR, overlay
from grain_sft.config.sections import SECTIONS, TOP
from grain_sft.errors import ConfigError
from grain_sft.options import REQUIRED, Section, check_value, options_of
from grain_sft.sampling import ORDERS

TRAINER_KEYS = ("eval_batch_size", "val_batch_size", "transformer")
"""Ignored keys of trainers that look like misspelt keys of ours: `val_batch_size` is similar to `batch_size`."""


class GPTConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a trainer's GPTConfig, and the config keys that they mean.

        {"inherits": "configs/sft1/150M.json", "dataset_dir": "data/chat_sft", "epoch_seed": 42}

    A GPTConfig may also have our sections, which override its keys: `"sampler": {"epochs": 3}`.

    A row has the last `block_size + 1` tokens of an episode. All tokens but the last are inputs, and all tokens but the first
    are targets. A step is one call of the trainer's `get_batch`: if `grad_accum_steps` is 4, step 2 of the optimizer reads
    steps 8 to 11.

    `epoch_drop_last: true` drops the incomplete last batch of an epoch. The published loader documents this, but ignores the
    key and fills the batch from the next epoch. To replay a run of that loader, give false.

    Args:
      dataset_dir: `corpus.path`; the trainer takes it as a command-line option.
      batch_size: `sampler.global_batch_size`.
      block_size: `layout.sequence_length` minus one.
      use_loss_mask: `corpus.use_loss_mask`.
      batch_sampling_mode: `sampler.order`: "epoch" means `episode`, and "random" means `random`.
      epoch_seed: `sampler.seed`.
      epoch_shuffle: `sampler.shuffle`. It has no effect if batch_sampling_mode is "random" and `sampler.order` does not replace
        this order.
      epoch_drop_last: `sampler.last_batch`: true means `drop`, and false means `run_on`. It has no effect if `corpus` is a
        mixture, or if batch_sampling_mode is "random" and `sampler.order` does not replace this order.
      pad_token_id: `corpus.pad_token_id`.
      episode_min_tokens: `layout.min_tokens`.
    """

    dataset_dir: str
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    use_loss_mask: bool = False
    batch_sampling_mode: Literal["epoch", "random"] = "epoch"
    epoch_seed: Annotated[int, msgspec.Meta(ge=0)] = 1337
    epoch_shuffle: bool = True
    epoch_drop_last: bool = True
    pad_token_id: int | None = None
    episode_min_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2


GPT_CONFIG = options_of(GPTConfig)

_REPLACED_BY = {
    DATASET_DIR: ("corpus", {"path", "mixture"}),
    "block_size": ("layout", {"sequence_length"}),
    "batch_size": ("sampler", {"global_batch_size", "global_batch_tokens"}),
}
"""Required keys of a GPTConfig. Each may be missing if our section, such as `corpus`, has at least one of the listed keys."""

_NEAR = 0.8  # similarity (of difflib) from which an unknown key counts as misspelt


def is_gpt_config(stated: Section) -> bool:
    """Return whether a config has keys of a GPTConfig, and no `layout.kind`, which only our own configs have."""
    layout = stated.get("layout")
    return any(key in stated for key in GPT_CONFIG) and not (isinstance(layout, Mapping) and "kind" in layout)


def sections_of(stated: Section, where: str) -> dict[str, Any]:
    """Return the sections that a GPTConfig means, overridden by our sections in the same config."""
    ours = (*SECTIONS, *TOP)
    sections = {key: value for key, value in stated.items() if key in ours}
    _check_others([key for key in stated if key not in ours and key not in GPT_CONFIG], where)
    # `validate` later refuses a section that is not a mapping
    own = {name: sections[name] if isinstance(sections.get(name), Mapping) else {} for name in SECTIONS}
    defaults = {key: option.default for key, option in GPT_CONFIG.items() if option.default is not REQUIRED}
    keys = {**defaults, **stated}
    for key, option in GPT_CONFIG.items():
        if key in keys:
            check_value(keys[key], option.type, f"{where}: {key}")
            continue
        # a required key is missing, which is an error unless a key of ours replaces it
        section, replacing_keys = _REPLACED_BY[key]
        if not replacing_keys & own[section].keys():
            hint = f" Add it, or {section}.{min(replacing_keys)}."  # `min`: the first by name
            if key == DATASET_DIR:
                hint = f' The trainer takes it as an option; here it is a key: "{key}": "data/chat_sft".'
            raise ConfigError(f"{where}: a GPTConfig lacks the key {key!r}.{hint}")
    order = {"epoch": "episode", "random": "random"}[keys["batch_sampling_mode"]]
    # In a mixture, and in an order whose `runs_on` is True (`random`), a batch may have rows of two epochs, whatever
    # `last_batch` is. So `last_batch` keeps its default "drop" there, even if `epoch_drop_last` is False. In order `random`,
    # `shuffle` stays True, because False would read the rows in ascending order.
    is_replaced = own["sampler"].get("order", order) != order
    runs_on = ORDERS[order].runs_on and not is_replaced
    is_mixture = "mixture" in own["corpus"]
    corpus = {"format": "episodes", "use_loss_mask": keys["use_loss_mask"], "pad_token_id": keys["pad_token_id"]}
    layout = {"kind": "padded", "keep": "last", "min_tokens": keys["episode_min_tokens"]}
    sampler = {"order": order, "seed": keys["epoch_seed"], "shuffle": runs_on or keys["epoch_shuffle"]}
    sampler["last_batch"] = "drop" if runs_on or is_mixture or keys["epoch_drop_last"] else "run_on"
    if DATASET_DIR in keys:
        corpus["path"] = keys[DATASET_DIR]
    if "block_size" in keys:
        layout["sequence_length"] = keys["block_size"] + 1
    if "batch_size" in keys:
        sampler["global_batch_size"] = keys["batch_size"]
    transforms = ["shift_targets", "drop_last_position"]
    return overlay({"corpus": corpus, "layout": layout, "sampler": sampler, "transforms": transforms}, sections)


def _check_others(others: list[Any], where: str) -> None:
    """Refuse keys that look like misspelt keys of ours, and log the other keys."""
    for key in others:
        near = difflib.get_close_matches(str(key), (*GPT_CONFIG, *SECTIONS, *TOP), n=1, cutoff=_NEAR)
        if near and key not in TRAINER_KEYS:
            why = "A trainer's other keys are ignored, but this key looks like a misspelt key of ours"
            raise ConfigError(f"{where}: unknown key {key!r}. The nearest known: {near[0]!r}. {why}. Fix or remove it.")
    if others:
        logging.info("%s: ignored keys of the trainer: %s.", where, ", ".join(map(str, others)))
