"""Section `stages` of a config: each stage is the config with some keys changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft.config.reading import overlay
from grain_sft.config.sections import STAGE
from grain_sft.errors import ConfigError
from grain_sft.layout import LAYOUTS
from grain_sft.options import check, options_of

_LONGEST = "max_target_sequence_length"


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
    sections = ("corpus", "layout", "sampler", "transforms")
    stages: Sequence[Mapping[str, Any]] = config["stages"]
    made = []
    for stage in stages:
        own, below = {name: stage[name] for name in sections if name in stage}, base
        if _replaces(own.get("corpus"), base.get("corpus")):
            below = {name: section for name, section in base.items() if name != "corpus"}
        made.append(overlay(below, own))
    sharing = [(each, layout) for each in made for layout in _sharing(each)]
    lengths = {each["layout"]["sequence_length"] for each, _ in sharing}
    if len(lengths) > 1 and all(isinstance(length, int) for length in lengths):
        for _, layout in sharing:
            layout.setdefault(_LONGEST, max(lengths))
    return made


def _replaces(own: object, below: object) -> bool:
    """Return whether a stage's section `corpus` names other files than the section `below` it."""
    if not isinstance(own, Mapping) or not isinstance(below, Mapping):
        return False
    return "path" in own or ("mixture" in own and "mixture" not in below)


def _sharing(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each section `layout` of a config and of its mixture's sources whose kind has the option `_LONGEST`.

    The sections are copies that replace the originals, so the caller may change them."""
    layout, corpus = config.get("layout"), config.get("corpus")
    if not isinstance(layout, Mapping) or "sequence_length" not in layout:
        return
    config["layout"] = own = dict(layout)
    if _shares(own):
        yield own
    if isinstance(corpus, Mapping) and isinstance(corpus.get("mixture"), Mapping):
        config["corpus"] = {**corpus, "mixture": dict(corpus["mixture"])}
        yield from _sharing_sources(config["corpus"]["mixture"])


def _sharing_sources(mixture: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, source in mixture.items():
        if not isinstance(source, Mapping):
            continue
        mixture[name] = source = dict(source)
        if isinstance(source.get("layout"), Mapping) and _shares(source["layout"]):
            source["layout"] = own = dict(source["layout"])
            yield own
        if isinstance(source.get("mixture"), Mapping):
            source["mixture"] = inner = dict(source["mixture"])
            yield from _sharing_sources(inner)


def _shares(layout: Mapping[str, Any]) -> bool:
    kind = layout.get("kind")
    return isinstance(kind, str) and kind in LAYOUTS and _LONGEST in options_of(LAYOUTS[kind])
