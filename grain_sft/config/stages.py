"""Section `stages` of a config. The config of a stage is the whole config with some keys changed."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from grain_sft.config.reading import overlay
from grain_sft.config.sections import SECTIONS, STAGE
from grain_sft.errors import ConfigError
from grain_sft.layout import LAYOUTS
from grain_sft.options import Section, check, options_of

_MAX_LENGTH = "max_target_sequence_length"
"""Option of layout `windows`: number of tokens of the windows that the order permutes. A row may be a part of a window."""


def check_stages(config: Section, where: str) -> None:
    """Raise a ConfigError for an entry of `stages` with wrong keys, and for a `sampler.schedule` outside of the stages."""
    for number, entry in enumerate(config["stages"]):
        at = f"{where}: stages[{number}]"
        check(entry, STAGE, at)
        given = [name for name in ("steps", "tokens") if entry.get(name) is not None]
        last = number == len(config["stages"]) - 1
        if len(given) > 1 or not (given or last):
            raise ConfigError(f"{at}: expected `steps` or `tokens`. Give one of them; only the last stage may omit both.")
    sampler = config.get("sampler")
    if isinstance(sampler, Mapping) and "schedule" in sampler:
        why = "its steps could count from the start of the run or of a stage"
        raise ConfigError(f"{where}: sampler.schedule with stages: {why}. Move it into a stage, or make each change a stage.")


def configs_of_stages(config: Section) -> list[dict[str, Any]]:
    """Return the config of each stage.

    Stages with rows of different lengths read the corpus in one order, so that a stage continues where the stage before it
    ended. For this, the option `max_target_sequence_length` of their layouts defaults to the longest `sequence_length` of all
    stages. For example, two stages have rows of 2048 and 8192 tokens. In both, the order permutes windows of 8192 tokens. The
    stage with rows of 2048 tokens cuts each window into four rows.
    """
    configs = []
    for stage in config["stages"]:
        own = {name: stage[name] for name in (*SECTIONS, "transforms") if name in stage}
        inherited = {name: section for name, section in config.items() if name != "stages"}
        if _replaces(own.get("corpus"), inherited.get("corpus")):
            del inherited["corpus"]
        configs.append(copy.deepcopy(overlay(inherited, own)))  # a deep copy: layouts change below
    lengths = [stage["layout"]["sequence_length"] for stage in configs if any(_layouts_with_max_length(stage))]
    # lengths of other types are errors, which `validate` raises later; with one length, the layout's own default is the same
    if all(isinstance(length, int) for length in lengths) and len(set(lengths)) > 1:
        for stage_config in configs:
            for layout in _layouts_with_max_length(stage_config):
                layout.setdefault(_MAX_LENGTH, max(lengths))
    return configs


def _replaces(own: object, inherited: object) -> bool:
    """Return whether a stage's `corpus` replaces the config's `corpus` as a whole, because it names other files."""
    if not isinstance(own, Mapping) or not isinstance(inherited, Mapping):
        return False
    return "path" in own or ("mixture" in own and "mixture" not in inherited)


def _layouts_with_max_length(config: Section) -> Iterator[dict[str, Any]]:
    """Yield those of the sections `layout` of a config and of its sources whose kind of layout has the option `_MAX_LENGTH`."""
    layout = config.get("layout")
    if isinstance(layout, dict) and "sequence_length" in layout:
        of_sources = (source.get("layout") for _, source in sources_of(config.get("corpus")))
        yield from filter(_has_max_length, (layout, *of_sources))


def _has_max_length(layout: object) -> bool:
    kind = layout.get("kind") if isinstance(layout, dict) else None
    # an unknown kind is an error, which `validate` raises later with its place in the config
    return isinstance(kind, str) and (kind in LAYOUTS or ":" in kind) and _MAX_LENGTH in options_of(LAYOUTS[kind])


def sources_of(corpus: object, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield the pair (name, section) of each source of a section `corpus`, which may be invalid.

    An inner mixture is replaced by its sources. The source `news` of the inner mixture `web` has the name "web/news".
    """
    mixture = corpus.get("mixture") if isinstance(corpus, Mapping) else None
    for name, source in mixture.items() if isinstance(mixture, Mapping) else ():
        if isinstance(source, Mapping) and source.get("mixture") is None:
            yield f"{prefix}{name}", source
        else:
            yield from sources_of(source, f"{prefix}{name}/")
