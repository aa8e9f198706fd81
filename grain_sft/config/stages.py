"""Section `stages` of a config: each stage is the config with some keys changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft.config.reading import overlay
from grain_sft.config.sections import STAGE
from grain_sft.errors import ConfigError
from grain_sft.layout import LAYOUTS
from grain_sft.options import check, options_of

_LONGEST = "max_target_sequence_length"
_SECTIONS = ("corpus", "layout", "sampler", "transforms")


def check_stages(config: Mapping[str, Any], where: str) -> None:
    """Raise a ConfigError for malformed entries of `stages`. Their sections are checked with `configs_of_stages`."""
    for number, entry in enumerate(config["stages"]):
        at = f"{where}: stages[{number}]"
        check(entry, STAGE, at)
        given = [name for name in ("steps", "tokens") if entry.get(name) is not None]
        last = number == len(config["stages"]) - 1
        if len(given) > 1 or not (given or last):
            raise ConfigError(
                f"{at}: expected one of steps and tokens. Give one; only the last stage may leave out both."
            )
    sampler = config.get("sampler")
    if isinstance(sampler, Mapping) and "schedule" in sampler:
        why = "its steps could count from the start of the run or of a stage"
        raise ConfigError(
            f"{where}: sampler.schedule beside stages: {why}. Move it into a stage, or make each change a stage."
        )


def configs_of_stages(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the config of each stage. Layouts that can share one order get the longest sequence length of all stages."""
    base = {name: section for name, section in config.items() if name != "stages"}
    stages: Sequence[Mapping[str, Any]] = config["stages"]
    made = []
    for stage in stages:
        own, below = {name: stage[name] for name in _SECTIONS if name in stage}, base
        if _replaces(own.get("corpus"), base.get("corpus")):
            below = {name: section for name, section in base.items() if name != "corpus"}
        changed = overlay(below, own)
        made.append(changed | {name: _copied(changed[name]) for name in ("corpus", "layout") if name in changed})
    sharing = [(each["layout"]["sequence_length"], layout) for each in made for layout in _sharing(each)]
    lengths = {length for length, _ in sharing}
    if len(lengths) > 1 and all(isinstance(length, int) for length in lengths):
        for _, layout in sharing:
            layout.setdefault(_LONGEST, max(lengths))
    return made


def _copied(section: Any) -> Any:
    is_mapping = isinstance(section, Mapping)
    return {name: _copied(value) for name, value in section.items()} if is_mapping else section


def _replaces(own: object, below: object) -> bool:
    """Return whether a stage's section `corpus` names other files than the section `below` it."""
    if not isinstance(own, Mapping) or not isinstance(below, Mapping):
        return False
    return "path" in own or ("mixture" in own and "mixture" not in below)


def _sharing(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each section `layout` of a config and of its mixture's sources whose kind has the option `_LONGEST`."""
    layout, corpus = config.get("layout"), config.get("corpus")
    if isinstance(layout, dict) and "sequence_length" in layout:
        yield from filter(_shares, (layout, *_layouts_of_sources(corpus)))


def _layouts_of_sources(corpus: object) -> Iterator[dict[str, Any]]:
    mixture = corpus.get("mixture") if isinstance(corpus, Mapping) else None
    for source in mixture.values() if isinstance(mixture, Mapping) else ():
        if isinstance(source, Mapping) and isinstance(source.get("layout"), dict):
            yield source["layout"]
        yield from _layouts_of_sources(source)


def _shares(layout: Mapping[str, Any]) -> bool:
    kind = layout.get("kind")
    return isinstance(kind, str) and kind in LAYOUTS and _LONGEST in options_of(LAYOUTS[kind])
