"""Conversion of a config's `replace` amendments to stages."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft.config.amendments import keys_of_stage, weights_of
from grain_sft.config.nouns import Section, rows_of_batch, sizes_of
from grain_sft.config.reading import overlay
from grain_sft.config.sections import SIZES
from grain_sft.config.stages import configs_of_stages
from grain_sft.errors import ConfigError
from grain_sft.sampling import BatchSizes, StepMap


def with_stages_of_replacements(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a validated config with a new stage at each step at which a source's path or repeat cap is replaced.

    The amendments stay in the config, because receipts list them. A new stage begins with the weights of all earlier
    amendments, even those that the config's schedule has changed since. A `reweight` restores the scheduled weights. It
    ends with the stage of the config that was divided.

    Raises:
      ConfigError: A replacement changes nothing, or no stage from its step on has the source.
    """
    amendments: Sequence[Mapping[str, Section]] = config.get("amendments", ())
    sections = sorted((entry["replace"] for entry in amendments if "replace" in entry), key=lambda each: each["from"])
    if not sections:
        return config
    skips = StepMap([(entry["skip"]["from"], entry["skip"]["steps"]) for entry in amendments if "skip" in entry])
    stages = list(_stages_of(config))
    for section in sections:
        _check(section, [stage for _, end, stage in stages if skips.data_step(section["from"]) < end], where)
    sections = [section for section in sections if keys_of_stage(section)]
    if not sections:
        return config
    entries: list[Mapping[str, Section]] = []
    for entry in amendments:
        entries.append(entry)
        if "replace" in entry:
            changes = _weights_to_restate(entry["replace"], stages, amendments, skips)
            entries += [{"reweight": {"from": step, "weights": weights}} for step, weights in changes]
    steps = [(skips.data_step(section["from"]), section) for section in sections]
    made = [part for begin, end, stage in stages for part in _divide(stage, begin, end, steps)]
    without_schedules = _stage_after({name: config.get(name, {}) for name in ("corpus", "sampler")}, sys.maxsize)
    return {**config, **without_schedules, "amendments": entries, "stages": made}


def _divide(
    stage: dict[str, Any], begin: int, end: int, sections: Sequence[tuple[int, Section]]
) -> Iterator[dict[str, Any]]:
    """Yield the parts of the stage of data steps `begin` to `end - 1`; `sections` are replacements with their data steps."""
    for step, section in sections:
        if step >= end or section["source"] not in _sources(stage["corpus"]):
            continue
        if step > begin:
            yield _with_steps(stage, step - begin)
            left = None if end == sys.maxsize else end - step
            stage, begin = _with_steps(_stage_after(stage, step - begin), left), step
        stage = overlay(stage, {"corpus": _corpus_of_source(section["source"], keys_of_stage(section))})
    yield stage


def _stages_of(config: Mapping[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (first data step, data step after the last, stage with its whole corpus and sampler) of each stage."""
    stated = config.get("stages") or [{}]
    begin = 0
    for stage, whole in zip(stated, configs_of_stages({**config, "stages": stated}), strict=True):
        steps = stage.get("steps") or (_num_steps(whole, stage["tokens"]) if stage.get("tokens") else None)
        end = sys.maxsize if steps is None else begin + steps
        yield begin, end, {**stage, "corpus": whole["corpus"], "sampler": whole["sampler"]}
        begin = end


def _num_steps(config: Section, tokens: int) -> int:
    """Return the number of steps in which the stage of a config reads `tokens`, as `Stage.num_steps` does."""
    length, sampler = config["layout"]["sequence_length"], config["sampler"]
    sizes = BatchSizes(rows_of_batch(sampler, length) or 1, sizes_of(sampler.get("schedule", ()), length))
    return sizes.step_of(-(-tokens // length) - 1) + 1


def _with_steps(stage: Section, steps: int | None) -> dict[str, Any]:
    """Return a stage with another number of steps; None for no end."""
    rest = {name: value for name, value in stage.items() if name not in ("steps", "tokens")}
    return rest if steps is None else {**rest, "steps": steps}


def _stage_after(stage: Section, steps: int) -> dict[str, Any]:
    """Return a stage without its first `steps`. Earlier schedule entries become initial values; later ones count from there."""
    corpus, sampler = stage["corpus"], dict(stage["sampler"])
    schedule = sampler.pop("schedule", ())
    for entry in schedule:
        if entry["step"] <= steps:
            sizes = {name: entry[name] for name in SIZES if entry.get(name) is not None}
            sampler = overlay({"sampler": sampler}, {"sampler": sizes})["sampler"]
    if corpus.get("mixture"):
        corpus = {**corpus, "mixture": _mixture_after(corpus["mixture"], schedule, steps)}
    return {**stage, "corpus": corpus, "sampler": {**sampler, **_schedule_after(schedule, steps)}}


def _mixture_after(mixture: Section, schedule: Sequence[Section], steps: int) -> dict[str, Any]:
    """Return a mixture, and the mixtures in it, with the weights that their schedules have set after `steps`."""
    weights: dict[str, Any] = {}
    for entry in schedule:
        weights |= (entry.get("weights") or {}) if entry["step"] <= steps else {}
    later = {}
    for name, source in mixture.items():
        inner = dict(source)
        if inner.get("mixture"):
            own = inner.pop("schedule", ())
            inner |= {"mixture": _mixture_after(inner["mixture"], own, steps), **_schedule_after(own, steps)}
        later[name] = {**inner, "weight": weights.get(name, source["weight"])}
    return later


def _schedule_after(schedule: Sequence[Section], steps: int) -> dict[str, Any]:
    """Return `{"schedule": ...}` with the entries after `steps`, which count from there; {} if no entry is left."""
    later = [{**entry, "step": entry["step"] - steps} for entry in schedule if entry["step"] > steps]
    return {"schedule": later} if later else {}


def _weights_to_restate(
    section: Section,
    stages: Sequence[tuple[int, int, Section]],
    amendments: Sequence[Mapping[str, Section]],
    skips: StepMap,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the (step, weights) of each `reweight` that a replacement needs where it divides a stage.

    The first restores weights that the stage's schedule set after their last amendment. The others set these back to the
    amendments' values at the first step of the next stage.
    """
    first = skips.data_step(section["from"])
    given = [(entry["reweight"]["from"], entry["reweight"]["weights"]) for entry in amendments if "reweight" in entry]
    given += [(entry["replace"]["from"], weights_of(entry["replace"])) for entry in amendments if "replace" in entry]
    given = sorted(((skips.data_step(step), weights) for step, weights in given), key=lambda pair: pair[0])
    for number, (begin, end, stage) in enumerate(stages, 1):
        if not (begin < first < end and keys_of_stage(section) and section["source"] in _sources(stage["corpus"])):
            continue
        scheduled: dict[str, Any] = {}
        for entry in stage["sampler"].get("schedule", ()):
            if (since := begin + entry["step"]) <= first:
                scheduled |= {name: (since, weight) for name, weight in (entry.get("weights") or {}).items()}
        steps = {name: [step for step, weights in given if name in weights and step <= first] for name in scheduled}
        restated = {
            name: weight for name, (since, weight) in scheduled.items() if steps[name] and steps[name][-1] < since
        }
        if restated:
            yield section["from"], restated
        later = {name for _, _, each in stages[number:] for name in each["corpus"].get("mixture") or ()}
        for name in restated:
            if name in later:
                amended = [weights[name] for step, weights in given if name in weights and step <= end]
                yield skips.step_of(end), {name: amended[-1]}


def _corpus_of_source(name: str, keys: Section) -> dict[str, Any]:
    """Return a section `corpus` with `keys` of a source `NAME`, or `MIXTURE/NAME` in a mixture of mixtures."""
    first, _, rest = name.partition("/")
    return {"mixture": {first: _corpus_of_source(rest, keys) if rest else dict(keys)}}


def _check(section: Section, stages: Sequence[Section], where: str) -> None:
    """Refuse a replacement that changes nothing, or whose source none of `stages` has."""
    where = f"{where}: replace from step {section['from']}"
    if not keys_of_stage(section) and not weights_of(section):
        raise ConfigError(f"{where}: changes nothing. Give path, weight, max_epochs or on_exhausted.")
    names = list(dict.fromkeys(name for stage in stages for name in _sources(stage["corpus"])))
    if section["source"] not in names:
        known = f"expected one of {', '.join(names)}" if names else "no mixture is read from that step on"
        raise ConfigError(f"{where}: source {section['source']!r}: {known}.")


def _sources(corpus: Section, prefix: str = "") -> Iterator[str]:
    """Yield the names of the sources of a section `corpus`, and of the mixtures in it."""
    for name, source in (corpus.get("mixture") or {}).items():
        if source.get("mixture") is None:
            yield prefix + name
        else:
            yield from _sources(source, f"{prefix}{name}/")
