"""Pipelines from configs."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from grain_sft.config import gpt_config
from grain_sft.config.amendments import make_amendments
from grain_sft.config.nouns import NounMaker, make_entry
from grain_sft.config.reading import INHERITS, inherit, read
from grain_sft.config.replacements import with_stages_of_replacements
from grain_sft.config.sections import SECTIONS, config_schema
from grain_sft.config.stages import configs_of_stages
from grain_sft.config.validation import validate
from grain_sft.errors import ConfigError, GrainSftError, WrongTypeError, shortened
from grain_sft.pipeline import OBSERVERS, Pipeline, Stage, StagedPipeline
from grain_sft.sampling import Host
from grain_sft.storage import files

__all__ = ["config_schema", "is_config", "load", "naming", "read_config"]

FORMER_KEYS = {"when_dry": "on_exhausted"}
"""New name of each renamed key, by its former name."""

Config = str | os.PathLike[str] | Mapping[str, Any]


def __getattr__(name: str) -> Any:
    if name != "stated":
        raise AttributeError(f"module 'grain_sft.config' has no attribute {name!r}")
    warnings.warn("grain_sft.config.stated is now read_config. Call that.", DeprecationWarning, stacklevel=2)
    return read_config


def load(config: Config, *, host: Host | None = None) -> Pipeline:
    """Return the pipeline that a config describes.

    Args:
      config: Path of a .yaml or .json file, or the same as a dict. A relative path of token files, or of the config under
        `inherits`, is looked up in the folder of the config that contains it, then in the working directory. The values of
        a config replace those that it inherits. A `GPTConfig` of the episode-indexed loader is also accepted
        (`grain_sft.config.gpt_config`).
      host: This data-loading process; None asks JAX (and so starts its backend).

    Raises:
      ConfigError: An unknown key (the message has the nearest known one), a repeated or missing key, or a wrong value.
      CorpusError, CorpusFileError, LayoutError, SamplerError: An error in what the config describes. The message names
        the config too.
    """
    where, sections = read_config(config)
    with naming(where):
        entries = sections.get("amendments", ())
        observers = [make_entry(item, OBSERVERS, f"{where}: observers") for item in sections.get("observers", ())]
        observed: dict[str, Any] = {"audit": sections.get("audit"), "observers": observers}
        maker = NounMaker(where, host)
        if not sections.get("stages"):
            nouns = maker.make(sections)
            return Pipeline(*nouns, **observed, amendments=make_amendments(entries, [nouns[0].layout])[0])
        nouns_of_stages = []
        for number, each in enumerate(configs_of_stages(sections)):
            with naming(where, f"{where}: stages[{number}]"):
                nouns_of_stages.append(maker.make(each))
        amendments, of_stages = make_amendments(entries, [source.layout for source, _, _ in nouns_of_stages])
        stages = [
            Stage(*nouns, steps=each.get("steps"), tokens=each.get("tokens"), amendments=own)
            for nouns, each, own in zip(nouns_of_stages, sections["stages"], of_stages, strict=True)
        ]
        return StagedPipeline(stages, **observed, amendments=amendments)


def read_config(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the name of a config for messages, and its validated sections with all inherited values.

    Raises:
      ConfigError: As in `load`.
    """
    if isinstance(config, Mapping):
        where, sections = "config", inherit("config", os.getcwd(), dict(config), ())
    elif isinstance(config, str | os.PathLike):
        where = files.normalize(config)
        where = where if files.is_remote(where) else os.path.abspath(where)
        sections = read(where, ())
    else:
        found = f"load: config is {shortened(repr(config))} ({type(config).__name__})"
        raise WrongTypeError(f"{found}; expected the path of a config, or a mapping.")
    if gpt_config.is_gpt_config(sections):
        sections = gpt_config.sections_of(sections, where)
    sections = _renamed(sections, where)
    validate(sections, where)
    replaced = with_stages_of_replacements(sections, where)
    if replaced is not sections:
        validate(replaced, where)
    return where, replaced


def is_config(value: Mapping[str, Any]) -> bool:
    """Return whether a mapping read from a file has keys of a config."""
    return INHERITS in value or gpt_config.is_gpt_config(value) or not value.keys().isdisjoint(SECTIONS)


def _renamed(section: Any, where: str) -> Any:
    """Return a section with former keys under their new names, except the names of the sources of a mixture."""
    if not isinstance(section, Mapping):
        return section
    renamed = {}
    for key, value in section.items():
        new = FORMER_KEYS.get(key, key)
        if new != key:
            warnings.warn(f"{where}: {key} is now {new}.", DeprecationWarning, stacklevel=4)
            if new in section:
                raise ConfigError(f"{where}: {key} and {new}, its new name, are both given. Remove {key}.")
        if key == "mixture" and isinstance(value, Mapping):
            renamed[new] = {name: _renamed(source, where) for name, source in value.items()}
        else:
            renamed[new] = _renamed(value, where)
    return renamed


@contextlib.contextmanager
def naming(where: str, place: str | None = None) -> Iterator[None]:
    """Put the name of the config, or the `place` in it, before the messages of errors."""
    place = place or where
    try:
        yield
    except GrainSftError as error:
        named = error
        if not str(error).startswith(place):
            with contextlib.suppress(TypeError):  # an error class from outside may take other arguments
                named = type(error)(f"{place}: {str(error).removeprefix(f'{where}: ')}")
        if named is error:
            raise
        raise named from error
