"""Stages of a config that has `replace` amendments.

If an amendment replaces the files of a source, for example, a new stage begins at the amendment's step. `keys_of_stage` returns
the keys of an amendment that have this effect.

Data steps count all batches of the data, also those that an amendment skips. If an amendment skips 5 batches from step 10 on,
step 20 reads data step 25.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft.config.amendments import keys_of_stage, weights_of
from grain_sft.config.parts import rows_of_batch, sizes_of
from grain_sft.config.reading import overlay
from grain_sft.config.sections import SIZES
from grain_sft.config.stages import configs_of_stages, sources_of
from grain_sft.errors import ConfigError
from grain_sft.options import Section
from grain_sft.sampling import BatchSizes, StepMap


def with_stages_of_replacements(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a validated config with a new stage at each replacement that needs one.

    The amendments stay in the config, because receipts list them. Some new stages need `reweight` amendments too
    (`_weights_to_restate`).

    Raises:
      ConfigError: A replacement changes nothing, or its source is in no stage from the replacement's step on.
    """
    amendments: Sequence[Mapping[str, Section]] = config.get("amendments", ())
    sections = sorted((entry["replace"] for entry in amendments if "replace" in entry), key=lambda each: each["from"])
    if not sections:
        return config
    skips = StepMap([(entry["skip"]["from"], entry["skip"]["steps"]) for entry in amendments if "skip" in entry])
    stages = list(_stages_of(config))
    steps = [(skips.data_step(section["from"]), section) for section in sections]
    for step, section in steps:
        _check_replace(section, [stage for _, end, stage in stages if step < end], where)
    steps = [(step, section) for step, section in steps if keys_of_stage(section)]
    if not steps:
        return config
    entries: list[Mapping[str, Section]] = []
    amended = _amended_weights(amendments, skips)
    for entry in amendments:
        entries.append(entry)
        if "replace" in entry and keys_of_stage(entry["replace"]):
            changes = _weights_to_restate(entry["replace"], stages, amended, skips)
            entries += [{"reweight": {"from": step, "weights": weights}} for step, weights in changes]
    divided = [part for begin, end, stage in stages for part in _divide(stage, begin, end, steps)]
    # a config with stages can't have a schedule outside of them
    without_schedules = _stage_after({name: config.get(name, {}) for name in ("corpus", "sampler")}, sys.maxsize)
    return {**config, **without_schedules, "amendments": entries, "stages": divided}


def _divide(stage: Section, begin: int, end: int, sections: Sequence[tuple[int, Section]]) -> Iterator[Section]:
    """Divide a stage at each replacement of one of its sources.

    The stage has the data steps `begin` to `end` - 1. `sections` are pairs (data step, section `replace`), ascending.
    """
    for step, section in sections:
        if step >= end or section["source"] not in dict(sources_of(stage["corpus"])):
            continue
        if step > begin:
            yield _with_steps(stage, step - begin)
            remaining_steps = None if end == sys.maxsize else end - step
            stage, begin = _with_steps(_stage_after(stage, step - begin), remaining_steps), step
        stage = overlay(stage, {"corpus": _corpus_of_source(section["source"], keys_of_stage(section))})
    yield stage


def _stages_of(config: Mapping[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (first data step, data step after the last, stage) of each stage. The stage has its whole corpus and sampler."""
    stages = config.get("stages") or [{}]
    begin = 0
    for stage, whole in zip(stages, configs_of_stages({**config, "stages": stages}), strict=True):
        steps = stage.get("steps")
        if stage.get("tokens"):
            steps = _num_steps(whole, stage["tokens"])
        end = sys.maxsize if steps is None else begin + steps
        yield begin, end, {**stage, "corpus": whole["corpus"], "sampler": whole["sampler"]}
        begin = end


def _num_steps(config: Section, tokens: int) -> int:
    """Return the number of steps in which a stage with this config reads `tokens`, as `Stage.num_steps` does."""
    length, sampler = config["layout"]["sequence_length"], config["sampler"]
    sizes = BatchSizes(rows_of_batch(sampler, length) or 1, sizes_of(sampler.get("schedule", ()), length))
    return sizes.step_of(-(-tokens // length) - 1) + 1


def _with_steps(stage: Section, steps: int | None) -> dict[str, Any]:
    endless = {name: value for name, value in stage.items() if name not in ("steps", "tokens")}
    return endless if steps is None else {**endless, "steps": steps}


def _stage_after(stage: Section, steps: int) -> dict[str, Any]:
    """Return a stage without its first `steps` steps.

    If `steps` is 100, a value that the schedule sets at step 60 becomes an initial value, and step 130 becomes step 30.
    """
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
    """Return a mixture at step `steps`. `schedule` has the changes of its weights. An inner mixture has its own schedule."""
    weights: dict[str, Any] = {}
    later = {}
    for entry in schedule:
        weights |= (entry.get("weights") or {}) if entry["step"] <= steps else {}
    for name, source in mixture.items():
        inner = dict(source)
        if inner.get("mixture"):
            own = inner.pop("schedule", ())
            inner |= {"mixture": _mixture_after(inner["mixture"], own, steps), **_schedule_after(own, steps)}
        later[name] = {**inner, "weight": weights.get(name, source["weight"])}
    return later


def _schedule_after(schedule: Sequence[Section], steps: int) -> dict[str, Any]:
    """Return `{"schedule": ...}` with the entries after `steps`, or {}."""
    later = [{**entry, "step": entry["step"] - steps} for entry in schedule if entry["step"] > steps]
    return {"schedule": later} if later else {}


def _amended_weights(amendments: Sequence[Mapping[str, Section]], skips: StepMap) -> list[tuple[int, Section]]:
    """Return a pair (data step, weights by source) for each amendment that changes weights, ascending by step."""
    amended = (
        (skips.data_step(section["from"]), section["weights"] if kind == "reweight" else weights_of(section))
        for entry in amendments
        for kind, section in entry.items()
        if kind in ("reweight", "replace")
    )
    return sorted(amended, key=lambda pair: pair[0])  # stable: within one step, the config's order stays


def _weights_to_restate(
    section: Section, stages: Sequence[tuple[int, int, Section]], amended: Sequence[tuple[int, Section]], skips: StepMap
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, weights) of the `reweight` amendments that a replacement needs if it divides a stage.

    Amendments and the stage's schedule set weights, and the latest setting counts. But a stage begins with the weights of the
    latest amendment, whatever the schedule of an earlier stage has set since. So two amendments are added, which keep the
    weights that the config has without the division. An example of one source:

      step   event                                  weight   added amendment
      100    an amendment gives weight 2            2
      200    the schedule gives weight 3            3
      300    a replacement divides the stage        3        weight 3: otherwise, the new stage begins with weight 2 of step 100
      400    the next stage of the config begins    2        weight 2: otherwise, this stage begins with weight 3 of step 300
    """
    division = skips.data_step(section["from"])
    for number, (begin, end, stage) in enumerate(stages, 1):
        if not begin < division < end or section["source"] not in dict(sources_of(stage["corpus"])):
            continue
        # step of the latest amendment of each source's weight
        amended_at = {name: step for step, weights in amended if step <= division for name in weights}
        scheduled = _scheduled_weights(stage, begin, division)
        # a source without an amendment is left out, because the new stage begins with the schedule's weight for it
        restored = {name: weight for name, (step, weight) in scheduled.items() if amended_at.get(name, step) < step}
        if restored:
            yield section["from"], restored
        amended_weights = {name: weight for step, weights in amended if step <= end for name, weight in weights.items()}
        later_sources = {name for _, _, later in stages[number:] for name in later["corpus"].get("mixture") or ()}
        for name in restored:
            if name in later_sources:
                yield skips.step_of(end), {name: amended_weights[name]}


def _scheduled_weights(stage: Section, begin: int, last: int) -> dict[str, tuple[int, Any]]:
    """Return {source: (data step, weight)} of the latest changes by the schedule of a stage, up to data step `last`.

    `begin` is the first data step of the stage.
    """
    planned = {name: source["weight"] for name, source in stage["corpus"]["mixture"].items()}
    scheduled = {}
    for entry in stage["sampler"].get("schedule", ()):
        step = begin + entry["step"]
        for name, weight in (entry.get("weights") or {}).items():
            # if an entry repeats the schedule's last weight, an amendment stays in force, as in `Mixture.reweighted`
            if step <= last and weight != planned[name]:
                planned[name] = weight
                scheduled[name] = (step, weight)
    return scheduled


def _corpus_of_source(name: str, keys: Section) -> dict[str, Any]:
    """Return a section `corpus` with only `keys` of the source `name`, such as "web/news" of the mixture "web"."""
    outer, _, inner = name.partition("/")
    return {"mixture": {outer: _corpus_of_source(inner, keys) if inner else dict(keys)}}


def _check_replace(section: Section, stages: Sequence[Section], where: str) -> None:
    """Refuse a replacement that changes nothing, or whose source is in none of `stages`."""
    where = f"{where}: replace from step {section['from']}"
    if not keys_of_stage(section) and not weights_of(section):
        raise ConfigError(f"{where}: changes nothing. Give path, weight, max_epochs or on_exhausted.")
    names = list(dict.fromkeys(name for stage in stages for name, _ in sources_of(stage["corpus"])))
    if section["source"] not in names:
        known = f"expected one of {', '.join(names)}" if names else "no mixture is read from that step on"
        raise ConfigError(f"{where}: source {section['source']!r}: {known}.")
