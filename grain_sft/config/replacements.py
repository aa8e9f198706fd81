"""Amendments `replace` of a config, as stages and amendments `reweight`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft.config.reading import overlay
from grain_sft.errors import ConfigError
from grain_sft.sampling import StepMap

Section = Mapping[str, Any]

_OF_STAGE = ("path", "max_epochs", "on_exhausted")
_SIZES = ("global_batch_size", "global_batch_tokens")


def without_replacements(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a validated config whose amendments `replace` are stages, each of which begins where a source's path or repeat cap
    changes, and amendments `reweight`.

    Raises:
      ConfigError: A replacement of nothing or of no source of the mixture, or of a config that has stages.
    """
    amendments: Sequence[Mapping[str, Section]] = config.get("amendments", ())
    sections = [entry["replace"] for entry in amendments if "replace" in entry]
    if not sections:
        return config
    for section in sections:
        _check(section, config, f"{where}: replace from step {section['from']}")
    skips = StepMap([(entry["skip"]["from"], entry["skip"]["steps"]) for entry in amendments if "skip" in entry])
    changes: dict[str, Any] = {}
    begin, stages = 0, []
    for section in sorted(sections, key=lambda section: section["from"]):
        if not (changed := _of_stage(section)):
            continue
        step = skips.data_step(section["from"])
        if step > begin:
            stages.append({**_stage(config, begin, changes), "steps": step - begin})
            begin = step
        changes = overlay(changes, _of_source(section["source"], changed))
    schedule = config["sampler"].get("schedule") or ()
    rest = {**config, "amendments": [*_reweighted(amendments, schedule, skips)]}
    if not changes:
        return rest
    sampler = {name: value for name, value in config["sampler"].items() if name != "schedule"}
    return {**rest, "sampler": sampler, "stages": [*stages, _stage(config, begin, changes)]}


def _stage(config: Section, begin: int, changes: Section) -> dict[str, Any]:
    """Return the stage that begins at the data step `begin`, with `changes` of the mixture."""
    sampler: dict[str, Any] = {}
    mixture: dict[str, Any] = {}
    later = []
    for entry in config["sampler"].get("schedule") or ():
        if entry["step"] > begin:
            later.append({**entry, "step": entry["step"] - begin})
            continue
        sampler = overlay({"sampler": sampler}, {"sampler": {name: entry[name] for name in _SIZES if entry.get(name)}})[
            "sampler"
        ]
        for name, weight in (entry.get("weights") or {}).items():
            mixture = overlay(mixture, _of_source(name, {"weight": weight}))
    if later:
        sampler["schedule"] = later
    return {"corpus": {"mixture": overlay(mixture, changes)}, "sampler": sampler}


def _of_source(name: str, keys: Section) -> dict[str, Any]:
    """Return the part of a mixture with `keys` of a source `NAME`, or `MIXTURE/NAME` in a mixture of mixtures."""
    first, _, rest = name.partition("/")
    return {first: {"mixture": _of_source(rest, keys)} if rest else dict(keys)}


def _reweighted(
    amendments: Sequence[Mapping[str, Section]], schedule: Sequence[Section], skips: StepMap
) -> Iterator[Mapping[str, Section]]:
    """Yield the amendments, with the weights of replacements as `reweight`. A stage begins with all earlier ones, so scheduled
    weights that came after them are stated again there."""
    given = [(entry["reweight"]["from"], entry["reweight"]["weights"]) for entry in amendments if "reweight" in entry]
    given += [(section["from"], own) for entry in amendments if (own := _weights(section := entry.get("replace", {})))]
    for entry in amendments:
        if "replace" not in entry:
            yield entry
            continue
        first, weights = (section := entry["replace"])["from"], _weights(section)
        scheduled = {
            name: (each["step"], weight)
            for each in schedule
            if each["step"] <= skips.data_step(first)
            for name, weight in (each.get("weights") or {}).items()
        }
        for name, (since, weight) in scheduled.items():
            before = [skips.data_step(step) for step, each in given if name in each and step <= first]
            if _of_stage(section) and before and max(before) < since:
                weights.setdefault(name, weight)
        if weights:
            yield {"reweight": {"from": first, "weights": weights}}


def _weights(section: Section) -> dict[str, Any]:
    """Return what a replacement gives to a `reweight`."""
    weight = section.get("weight")
    return {} if weight is None or "weight" in _of_stage(section) else {section["source"]: weight}


def _of_stage(section: Section) -> dict[str, Any]:
    """Return the keys of a replacement that a stage has. An amendment `reweight` has the weights of the mixture itself."""
    weight = ("weight",) if "/" in section["source"] else ()
    return {name: section[name] for name in (*_OF_STAGE, *weight) if section.get(name) is not None}


def _check(section: Section, config: Section, where: str) -> None:
    if config.get("stages"):
        raise ConfigError(f"{where}: the config has stages. Begin a stage at this step, with the source as it is then.")
    if all(section.get(name) is None for name in (*_OF_STAGE, "weight")):
        raise ConfigError(f"{where}: changes nothing. Give path, weight or max_epochs.")
    names = list(_sources(config["corpus"].get("mixture") or {}, where))
    if section["source"] not in names:
        known = f"expected one of {', '.join(names)}" if names else "the config has one corpus and no mixture"
        raise ConfigError(f"{where}: source {section['source']!r}: {known}.")


def _sources(mixture: Section, where: str, prefix: str = "") -> Iterator[str]:
    """Yield the names of the sources of a mixture, and of the mixtures in it."""
    for name, source in mixture.items():
        if source.get("schedule"):
            raise ConfigError(f"{where}: source {prefix}{name} has a schedule. Its steps would count from there on.")
        if source.get("mixture") is None:
            yield prefix + name
        else:
            yield from _sources(source["mixture"], where, f"{prefix}{name}/")
