"""Configs: `load` makes a pipeline from a .yaml or .json file."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from grain_sft.arguments import check_type
from grain_sft.config import gpt_config
from grain_sft.config.amendments import make_amendments
from grain_sft.config.parts import PartsMaker, make_entry, naming
from grain_sft.config.reading import INHERITS, inherit, overlay, read
from grain_sft.config.replacements import with_stages_of_replacements
from grain_sft.config.sections import SECTIONS, config_schema
from grain_sft.config.stages import configs_of_stages
from grain_sft.config.validation import validate
from grain_sft.errors import ConfigError
from grain_sft.pipeline import OBSERVERS, Pipeline, Stage, StagedPipeline
from grain_sft.sampling import Host
from grain_sft.storage import files

__all__ = ["config_files", "config_schema", "is_config", "load", "naming", "overlay", "read_config"]

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
      config: Path of a .yaml or .json file, or the content of such a file as a dict. A relative path in the file starts at
        the file's folder. If the path does not exist there, it starts at the working directory. The keys may also be
        those of a `GPTConfig` (see `grain_sft.config.gpt_config`).
      host: Host whose batches the pipeline reads. None means this process of JAX, and starts JAX's backend.

    Raises:
      ConfigError: An unknown, repeated or missing key, or a wrong value.
      CorpusError, CorpusFileError, LayoutError, SamplerError: The corpus, the layout or the sampler of the config is wrong.
    """
    where, sections, maker = _read(config, host)
    with naming(where):
        entries = sections.get("amendments", ())
        observers = [make_entry(item, OBSERVERS, f"{where}: observers") for item in sections.get("observers", ())]
        observed: dict[str, Any] = {"audit": sections.get("audit"), "observers": observers}
        if not sections.get("stages"):
            source, sampler, transforms = maker.make(sections)
            amendments, _ = make_amendments(entries, [source.layout])
            return Pipeline(source, sampler, transforms, **observed, amendments=amendments)
        parts_of_stages = []
        for number, stage in enumerate(configs_of_stages(sections)):
            with naming(where, f"{where}: stages[{number}]"):
                parts_of_stages.append(maker.make(stage))
        amendments, by_stage = make_amendments(entries, [source.layout for source, _, _ in parts_of_stages])
        stages = [
            Stage(*parts, steps=stage.get("steps"), tokens=stage.get("tokens"), amendments=own)
            for parts, stage, own in zip(parts_of_stages, sections["stages"], by_stage, strict=True)
        ]
        return StagedPipeline(stages, **observed, amendments=amendments)


def read_config(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the config's name for messages, and its validated sections with all inherited values.

    Raises:
      ConfigError, CorpusFileError: A config is wrong, as in `load`, or can't be read.
    """
    return _read(config, Host(0, 1))[:2]


def _read(config: Config, host: Host | None) -> tuple[str, dict[str, Any], PartsMaker]:
    """Return (name, sections, maker): the result of `read_config`, and the maker of the config's sources and samplers."""
    if isinstance(config, Mapping):
        where, sections = "config", inherit("config", os.getcwd(), dict(config), [])
    else:
        check_type("load: config", config, str | os.PathLike, "the path of a config, or a mapping")
        where = files.absolute(files.normalize(config))
        sections = read(where, [])
    if gpt_config.is_gpt_config(sections):
        sections = gpt_config.sections_of(sections, where)
    sections = _renamed(sections, where)
    maker = PartsMaker(where, host)
    with naming(where):
        validate(sections, where)
        with_stages = with_stages_of_replacements(sections, where, maker)
        if with_stages is not sections:
            # An amendment may add a key that another key forbids: `sampler.epochs` forbids `max_epochs`.
            validate(with_stages, where)
    return where, with_stages, maker


def config_files(path: str) -> list[str]:
    """Return the paths of a config and of all configs that it inherits."""
    paths: list[str] = []
    read(files.absolute(files.normalize(path)), paths)
    return paths


def is_config(value: Mapping[str, Any]) -> bool:
    """Return whether a mapping read from a file has keys of a config."""
    return INHERITS in value or gpt_config.is_gpt_config(value) or not value.keys().isdisjoint(SECTIONS)


def _renamed(section: Any, where: str, *, is_mixture: bool = False) -> Any:
    """Return a section with its former keys renamed, also in inner sections. Keys of a mixture are names, which stay."""
    if not isinstance(section, Mapping):
        return section
    renamed = {}
    for key, value in section.items():
        new = key if is_mixture else FORMER_KEYS.get(key, key)
        if new != key:
            warnings.warn(f"{where}: {key} is now {new}.", FutureWarning, stacklevel=4)
            if new in section:
                raise ConfigError(f"{where}: {key} and {new}, its new name, are both given. Remove {key}.")
        # in a mixture, "mixture" is the name of a source, and its value has keys
        renamed[new] = _renamed(value, where, is_mixture=key == "mixture" and not is_mixture)
    return renamed
