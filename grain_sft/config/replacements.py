"""Stages of a config that has `replace` amendments.

A new stage begins at the step of an amendment that replaces, for example, the files of a source. `keys_of_stage` returns the
keys of an amendment that have this effect.

Data steps count all batches of the data, also those that an amendment skips. If an amendment skips 5 batches from step 10 on,
step 20 reads data step 25.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft.config.amendments import keys_of_stage, weights_of
from grain_sft.config.parts import PartsMaker
from grain_sft.config.reading import overlay
from grain_sft.config.sections import SIZES
from grain_sft.config.stages import configs_of_stages, sources_of
from grain_sft.errors import ConfigError
from grain_sft.options import Section
from grain_sft.pipeline import Stage
from grain_sft.sampling import StepMap

Replacement = tuple[int, Section]
"""Pair (data step at which an amendment replaces a source, section `replace` of the amendment)."""


def with_stages_of_replacements(config: dict[str, Any], where: str, maker: PartsMaker) -> dict[str, Any]:
    """Return `config`, which is validated, with a new stage at each replacement that needs one.

    `maker` opens corpora only if a stage of the config states `tokens`, its length in tokens.

    The amendments stay in the config, because receipts list them. Some new stages need `reweight` amendments too
    (`_added_reweights`).

    Raises:
      ConfigError: A replacement changes nothing, or its source is in no stage from the replacement's step on.
    """
    amendments: Sequence[Mapping[str, Section]] = config.get("amendments", ())
    sections = sorted((entry["replace"] for entry in amendments if "replace" in entry), key=lambda each: each["from"])
    if not sections:
        return config
    skips = StepMap([(entry["skip"]["from"], entry["skip"]["steps"]) for entry in amendments if "skip" in entry])
    replacements = [(skips.data_step(section["from"]), section) for section in sections]
    stages = list(_stages_of(config, replacements, maker))  # tuples (first data step, data step after the last, stage)
    for step, section in replacements:
        _check_replace(section, [stage for _, end, stage in stages if step < end], where)
    dividing = [(step, section) for step, section in replacements if keys_of_stage(section)]
    if not dividing:
        return config
    entries: list[Mapping[str, Section]] = []
    dividing_so_far: list[Replacement] = []
    for number, entry in enumerate(amendments):
        entries.append(entry)
        if "replace" in entry and keys_of_stage(entry["replace"]):
            dividing_so_far.append((skips.data_step(entry["replace"]["from"]), entry["replace"]))
            entries += _added_reweights(stages, dividing_so_far, amendments, [*entries, *amendments[number + 1 :]], skips)
    divided = [part for stage in stages for _, _, part in _divide(*stage, dividing)]
    # A config with stages can't have a schedule outside of them, and each stage has a copy of it. Since no entry of a schedule
    # is after step `sys.maxsize`, this removes the schedules.
    without_schedules = _stage_after({name: config.get(name, {}) for name in ("corpus", "sampler")}, sys.maxsize)
    return {**config, **without_schedules, "amendments": entries, "stages": divided}


def _divide(begin: int, end: int, stage: Section, replacements: Sequence[Replacement]) -> Iterator[tuple[int, int, Section]]:
    """Divide a stage at each replacement of one of its sources, and yield the parts as tuples (begin, end, part).

    The stage has the data steps `begin` to `end` - 1, and each part those from its own `begin` to `end` - 1. The steps of
    `replacements` are ascending. A replacement at `begin` or before changes the first part, and does not divide the stage.
    """
    for step, section in replacements:
        if step >= end or section["source"] not in dict(sources_of(stage["corpus"])):
            continue
        if step > begin:
            yield begin, step, _with_steps(stage, begin, step)
            stage, begin = _with_steps(_stage_after(stage, step - begin), step, end), step
        stage = overlay(stage, {"corpus": _corpus_of_source(section["source"], keys_of_stage(section))})
    yield begin, end, stage


def _stages_of(
    config: Mapping[str, Any], replacements: Sequence[Replacement], maker: PartsMaker
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (first data step, data step after the last, stage) of each stage.

    The yielded stage has all keys of its corpus and sampler, also those that it inherits. The data step after the last is
    `sys.maxsize` for a stage without an end. `replacements` are as in `_divide`.
    """
    stages = config.get("stages") or [{}]
    begin = 0
    for stage, whole in zip(stages, configs_of_stages({**config, "stages": stages}), strict=True):
        steps = stage.get("steps")
        if stage.get("tokens"):
            # To count the steps, make the layout of the stage's first part: in kind `pairs`, a row has more tokens than the
            # `sequence_length` of the config.
            _, _, first_part = next(_divide(begin, sys.maxsize, whole, replacements))
            steps = Stage(*maker.make(first_part), tokens=stage["tokens"]).num_steps
        end = sys.maxsize if steps is None else begin + steps
        yield begin, end, {**stage, "corpus": whole["corpus"], "sampler": whole["sampler"]}
        begin = end


def _with_steps(stage: Section, begin: int, end: int) -> dict[str, Any]:
    """Return a stage with the data steps `begin` to `end` - 1. The stage has no end if `end` is `sys.maxsize`."""
    endless = {name: value for name, value in stage.items() if name not in ("steps", "tokens")}
    return endless if end == sys.maxsize else {**endless, "steps": end - begin}


def _stage_after(stage: Section, steps: int) -> dict[str, Any]:
    """Return a stage without its first `steps` steps.

    If `steps` is 100, a value that the schedule sets at step 60 becomes an initial value. An entry of step 130 gets step 30.
    """
    corpus, sampler = stage["corpus"], dict(stage["sampler"])
    schedule = sampler.pop("schedule", ())
    for entry in schedule:
        if entry["step"] <= steps:
            sampler = overlay(sampler, {name: entry[name] for name in SIZES if entry.get(name) is not None})
    if corpus.get("mixture"):
        corpus = {**corpus, "mixture": _mixture_after(corpus["mixture"], schedule, steps)}
    return {**stage, "corpus": corpus, "sampler": {**sampler, **_schedule_after(schedule, steps)}}


def _mixture_after(mixture: Section, schedule: Sequence[Section], steps: int) -> dict[str, Any]:
    """Return a mixture without the first `steps` steps: its weights are those of step `steps`.

    `schedule` has the changes of the weights. An inner mixture has its own schedule, which also loses these steps.
    """
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
    """Return the pair (data step, weights by source) of each `reweight` and `replace` amendment, ascending by step.

    The weights are {} for a `replace` amendment that changes no weight, or only that of a source in an inner mixture.
    """
    amended = (
        (skips.data_step(section["from"]), section["weights"] if kind == "reweight" else weights_of(section))
        for entry in amendments
        for kind, section in entry.items()
        if kind in ("reweight", "replace")
    )
    return sorted(amended, key=lambda pair: pair[0])  # stable: within one step, the config's order stays


def _added_reweights(
    stages: Sequence[tuple[int, int, Section]],
    replacements: Sequence[Replacement],
    amendments: Sequence[Mapping[str, Section]],
    entries: Sequence[Mapping[str, Section]],
    skips: StepMap,
) -> Iterator[Mapping[str, Section]]:
    """Yield `reweight` amendments, so that dividing `stages` at `replacements` changes no weight.

    Within a stage, the latest weight counts, from an amendment or from the stage's schedule. A new stage begins with the weight
    of the latest amendment, even if the schedule of the stage before has set another weight since. An example of one source:

      step   event                                  weight   added amendment
      100    an amendment gives weight 2            2
      200    the schedule gives weight 3            3
      300    a replacement divides the stage        3        weight 3 of step 200; without it, weight 2 of step 100
      400    the next stage of the config begins    2        weight 2 of step 100; without it, weight 3 of step 300

    `stages` are as `_stages_of` yields them. `entries` are `amendments` and those that were added before.
    """
    # changes of weights: `amended` has those by the amendments of the config, `present` also those by added amendments
    amended, present = _amended_weights(amendments, skips), _amended_weights(entries, skips)
    for begin, end, stage in stages:
        for part_begin, part_end, part in _divide(begin, end, stage, sorted(replacements, key=lambda pair: pair[0])):
            first_step = skips.step_of(part_begin)
            if (first := skips.data_step(first_step)) < part_end:  # otherwise, amendments skip the whole part
                found = _weights_at(first, part_begin, part, present)
                expected = _weights_at(first, begin, stage, amended)
                restated = {name: weight for name, weight in expected.items() if weight != found[name]}
                if restated:
                    present = sorted([*present, (first, restated)], key=lambda pair: pair[0])
                    yield {"reweight": {"from": first_step, "weights": restated}}


def _weights_at(step: int, begin: int, stage: Section, amended: Sequence[tuple[int, Section]]) -> dict[str, Any]:
    """Return the weight of each source at data step `step` of a stage whose first data step is `begin`.

    `amended` has the changes of weights by amendments, as `_amended_weights` returns them.
    """
    # the weights by the schedule alone
    planned = {name: source["weight"] for name, source in (stage["corpus"].get("mixture") or {}).items()}
    weights = dict(planned)
    changes = [(begin + entry["step"], False, entry.get("weights") or {}) for entry in stage["sampler"].get("schedule", ())]
    # an amendment that also names other sources does not apply to the stage
    changes += [(max(begin, since), True, given) for since, given in amended if given.keys() <= planned.keys()]
    # by step; within one step, the schedule comes before the amendments
    for since, is_amendment, given in sorted(changes, key=lambda change: change[:2]):
        if since <= step:
            # If the schedule repeats its own previous weight, the weight of an amendment stays, as in `Mixture.reweighted`.
            weights |= {name: weight for name, weight in given.items() if is_amendment or weight != planned[name]}
            planned |= {} if is_amendment else given
    return weights


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
