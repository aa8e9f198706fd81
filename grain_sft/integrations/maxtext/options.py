"""Options of grain_sft in a run of MaxText, from MaxText's command line and from the environment."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Self

from grain_sft.errors import ConfigError
from grain_sft.integrations.maxtext.trainers import TRAINERS, Trainer
from grain_sft.options import check, options_of

PREFIX = "grain_sft_"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of grain_sft in a run of MaxText: `grain_sft_NAME=value` on the command line, or $GRAIN_SFT_NAME.

    Attributes:
      trainer: MaxText's trainer: pre_train, sft, dpo (also ORPO) or distill. The first word of the command may name it, too.
      config: Path of the config of the training data.
      eval_config: Path of the config of the evaluation data.
      allow_other_data: Whether a run may continue from a checkpoint of a run on other data.
      ignore_weights: Whether to train although the corpus has token weights, which MaxText's loss does not use.
    """

    trainer: str = "pre_train"
    config: str = ""
    eval_config: str = ""
    allow_other_data: bool = False
    ignore_weights: bool = False

    @classmethod
    def from_environment(cls, /, **arguments: str) -> Self:
        """Return the options. An option that is not in `arguments` comes from the environment, such as $GRAIN_SFT_CONFIG.

        Raises:
          ConfigError: An option or trainer is unknown, or a boolean option is neither "true" nor "false".
        """
        declaration: Any = cls  # `Any`: mypy would refuse this class as the argument of `options_of`
        known = {PREFIX + name: option for name, option in options_of(declaration).items()}
        texts = {name: os.environ[name.upper()] for name in known if name.upper() in os.environ}
        values: dict[str, Any] = texts | {PREFIX + name: text for name, text in arguments.items()}
        for name, text in values.items():
            if name in known and known[name].type is bool:
                values[name] = {"true": True, "false": False}.get(text.lower(), text)
        check(values, known, "options of grain_sft")
        trainer = values.get(PREFIX + "trainer", cls.trainer)
        if trainer not in TRAINERS:
            raise ConfigError(f"{PREFIX}trainer is {trainer!r}: expected one of {', '.join(TRAINERS)}.")
        return cls(**{name.removeprefix(PREFIX): value for name, value in values.items()})

    @property
    def of_trainer(self) -> Trainer:
        return TRAINERS[self.trainer]

    def required(self, name: str, noun: str) -> str:
        """Return the path in the option `name`. Without a path, raise a ConfigError that says what is missing: `noun`."""
        path: str = getattr(self, name)
        if not path:
            name = PREFIX + name
            raise ConfigError(f"{name} is not given: {noun}. Give {name}=PATH, or set ${name.upper()}.")
        return path


def split(arguments: Sequence[str]) -> tuple[list[str], Options]:
    """Divide a command line into MaxText's arguments and grain_sft's options.

    Raises:
      ConfigError: An error of `Options.from_environment`, an option with two different values, a `dataset_type` other than
        `olmo_grain`, or an argument of MaxText that is not `key=value`. (Its first argument may be a config file instead.)
    """
    if arguments and arguments[0] in TRAINERS:
        arguments = [f"{PREFIX}trainer={arguments[0]}", *arguments[1:]]
    ours: dict[str, str] = {}
    for word in arguments:
        if word.startswith("dataset_type=") and word != "dataset_type=olmo_grain":
            raise ConfigError(f"{word}: the data come from grain_sft. Remove this argument.")
        name, equals, text = word.removeprefix(PREFIX).partition("=")
        if word.startswith(PREFIX) and not equals:
            raise ConfigError(f"{word}: expected {word}=VALUE.")
        if word.startswith(PREFIX) and ours.setdefault(name, text) != text:
            raise ConfigError(f"{PREFIX}{name} is given as {ours[name]!r} and as {text!r}. Give one of them.")
    options = Options.from_environment(**ours)
    theirs = [word for word in arguments if not word.startswith((PREFIX, "dataset_type="))]
    for number, word in enumerate(theirs):
        if word.startswith("-"):
            raise ConfigError(f"{word}: options have no dashes here. Write {word.lstrip('-')}.")
        if "=" not in word and (number or not word.endswith(".yml")):
            first = f". The trainer ({', '.join(TRAINERS)}) and a config file of MaxText (NAME.yml) may come first"
            raise ConfigError(f"{word!r}: expected key=value{'' if number else first}.")
    return [*theirs, "dataset_type=olmo_grain"], options
