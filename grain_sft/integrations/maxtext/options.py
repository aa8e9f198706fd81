"""Options of a MaxText run that are grain_sft's own."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.errors import ConfigError

PREFIX = "grain_sft_"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options besides MaxText's config: `grain_sft_NAME=value` on the command line, or $GRAIN_SFT_NAME.

    Attributes:
      config: Path of the config of the training data.
      eval_config: Path of the config of the evaluation data.
      allow_other_data: Whether a run may continue from a checkpoint of a run on other data.
      ignore_weights: Whether to train although the corpus has token weights, which MaxText's loss does not use.
    """

    config: str = ""
    eval_config: str = ""
    allow_other_data: bool = False
    ignore_weights: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """Return the options of texts by name.

        Raises:
          ConfigError: an unknown name, or a value that is neither true nor false.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
                raise ConfigError(f"unknown key {PREFIX}{name}. The nearest key is {PREFIX}{near}.")
            if kinds[name] == "bool" and text.lower() not in ("true", "false"):
                raise ConfigError(f"{PREFIX}{name}={text}: expected true or false.")
            values[name] = text.lower() == "true" if kinds[name] == "bool" else text
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Options:
        """Return the options of $GRAIN_SFT_CONFIG, $GRAIN_SFT_EVAL_CONFIG, and so on."""
        return cls.of(_environment())

    def required(self, name: str, noun: str) -> str:
        """Return the path of the option `name`.

        Raises:
          ConfigError: the option is not given.
        """
        path: str = getattr(self, name)
        if not path:
            raise ConfigError(
                f"{PREFIX}{name} is not given: {noun}. Give {PREFIX}{name}=PATH on the command line of "
                f"grain_sft.integrations.maxtext, or ${(PREFIX + name).upper()}."
            )
        return path


def _environment() -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(Options)]
    return {name: os.environ[key] for name in names if (key := f"{PREFIX}{name}".upper()) in os.environ}


def split(arguments: Sequence[str]) -> tuple[list[str], Options]:
    """Return MaxText's arguments, and the options among them.

    Raises:
      ConfigError: as `Options.of`, or another `dataset_type`.
    """
    theirs = [word for word in arguments if not word.startswith(PREFIX)]
    ours = dict(word.removeprefix(PREFIX).partition("=")[::2] for word in arguments if word.startswith(PREFIX))
    options = Options.of(_environment() | ours)
    for word in theirs:
        if word.startswith("dataset_type=") and word != "dataset_type=olmo_grain":
            raise ConfigError(f"{word}: the data are grain_sft's here. Remove this argument.")
    return [*(word for word in theirs if not word.startswith("dataset_type=")), "dataset_type=olmo_grain"], options
