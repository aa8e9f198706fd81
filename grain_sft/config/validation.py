"""Checks of a whole config."""

from collections.abc import Iterable, Mapping

from grain_sft.config import sections
from grain_sft.config.amendments import check_amendments
from grain_sft.config.reading import overlay_layout
from grain_sft.config.stages import check_stages, configs_of_stages
from grain_sft.errors import ConfigError, CorpusError, StorageError
from grain_sft.layout import LAYOUTS
from grain_sft.options import Section, check, check_keys, check_value, options_of
from grain_sft.storage import RemoteOptions


def validate(config: Section, where: str) -> None:
    """Raise a ConfigError for the first wrong key or value of a config, or of one of its stages."""
    check_keys(config, (*sections.SECTIONS, *sections.TOP), where)
    check({key: value for key, value in config.items() if key in sections.TOP}, sections.TOP, where)
    check_amendments(config.get("amendments", ()), where)
    if config.get("stages"):
        check_stages(config, where)
        for number, stage in enumerate(configs_of_stages(config)):
            validate(stage, f"{where}: stages[{number}]")
        return
    corpus, layout, sampler = (config.get(section) for section in sections.SECTIONS)
    check(corpus, sections.CORPUS, f"{where}: corpus")
    check_layout(layout, f"{where}: layout")
    check(sampler, sections.SAMPLER, f"{where}: sampler")
    assert isinstance(corpus, Mapping) and isinstance(layout, Mapping) and isinstance(sampler, Mapping)
    _check_corpus(corpus, layout, f"{where}: corpus", "'path'")
    mixture, length = corpus.get("mixture"), layout["sequence_length"]
    if sum(sampler.get(key) is not None for key in sections.SIZES) != 1:
        raise ConfigError(f"{where}: sampler: give one of global_batch_size (in rows) and global_batch_tokens.")
    _check_batch_tokens(sampler, length, f"{where}: sampler")
    _check_mixed(sampler, mixture is not None, f"{where}: sampler")
    if "schedule" in sampler:
        _check_schedule(sampler["schedule"], f"{where}: sampler.schedule", mixture, length)


def check_layout(layout: object, where: str) -> None:
    """Check a section `layout`."""
    if not isinstance(layout, Mapping) or "kind" not in layout:  # then `check` raises an error
        check(layout, sections.all_layout_options(), where)
    assert isinstance(layout, Mapping)
    kind = layout["kind"]
    check_value(kind, sections.LAYOUT["kind"].type, f"{where}.kind")
    options = {**sections.LAYOUT, **sections.layout_options(kind)}
    for key in layout:
        owners = [each for each in LAYOUTS if key in sections.layout_options(each)]
        if owners and key not in options:
            known = ", ".join(name for name in options if name != "kind")
            problem = f"{where}.{key} is an option of kind {' and '.join(owners)}; kind {kind} takes {known}"
            raise ConfigError(f"{problem}. Take it out, or write kind: {owners[0]}.")
    check(layout, options, where)


def _check_mixed(sampler: Section, mixed: bool, where: str) -> None:
    """Refuse `on_exhausted` for one corpus, and `epochs` and `last_batch: run_on` for a mixture (`mixed`)."""
    if not mixed and "on_exhausted" in sampler:
        raise ConfigError(f"{where}.on_exhausted is for a mixture; one corpus ends after its epochs. Take it out.")
    if mixed and sampler.get("epochs") is not None:
        hint = "Give corpus.mixture.NAME.max_epochs, and sampler.on_exhausted"
        raise ConfigError(f"{where}.epochs: the sources of a mixture have epochs of their own. {hint}.")
    if mixed and sampler.get("last_batch") == "run_on":
        raise ConfigError(f"{where}.last_batch is 'run_on'; the sources of a mixture always run on. Take it out.")


def _check_corpus(corpus: Section, layout: Section, where: str, lacking: str) -> None:
    """Check a section `corpus`, or a source of a mixture. `lacking` is what the error names if `path` is missing."""
    if "remote" in corpus:
        try:
            RemoteOptions.of(corpus["remote"])
        except (CorpusError, StorageError) as error:
            raise ConfigError(f"{where}.remote: {error}") from error
    mixture = corpus.get("mixture")
    if mixture is None:
        if corpus.get("path") is None:
            raise ConfigError(f"{where} lacks the key {lacking}. Add it.")
        return
    where = f"{where}.mixture"
    if corpus.get("path") is not None:
        raise ConfigError(f"{where} is given as well as 'path'. Give one of the two.")
    if not mixture:
        raise ConfigError(f"{where}: names no source. Add one or more.")
    for name, source in mixture.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"{where}: {name!r}: expected a name without '/'.")
        check(source, sections.SOURCE, f"{where}.{name}")
        _check_source(source, layout, f"{where}.{name}")


def _check_source(source: Section, layout: Section, where: str) -> None:
    """Check a source of a mixture. `layout` is the config's section, some keys of which the source may change."""
    is_mixture = source.get("mixture") is not None
    for key in ("layout", "sampler", "max_epochs") if is_mixture else ("schedule",):
        if key in source:
            fitting = "with a path" if is_mixture else "that is a mixture"
            raise ConfigError(f"{where}.{key} is for a source {fitting}. Take it out.")
    _check_corpus(source, layout, where, "'path' (or 'mixture')")
    if "schedule" in source:
        _check_schedule(source["schedule"], f"{where}.schedule", source["mixture"], None)
    if not is_mixture:
        check_layout(overlay_layout(layout, source.get("layout", {})), f"{where}.layout")
        own_sampler = source.get("sampler", {})
        check(own_sampler, sections.SOURCE_SAMPLER, f"{where}.sampler", require=False)
        if None not in (source.get("max_epochs"), own_sampler.get("epochs")):
            raise ConfigError(f"{where}.sampler.epochs is the same as max_epochs. Give one of the two.")


def _check_schedule(entries: list[Section], where: str, names: Iterable[str] | None, length: int | None) -> None:
    """Check a schedule.

    Args:
      names: Names of the sources whose weights may change. None if the config has no mixture; weights are then refused.
      length: Number of tokens in a row. None if the schedule is that of a source; batch sizes are then refused.
    """
    refused = (*(sections.SIZES if length is None else ()), *(("weights",) if names is None else ()))
    known = [name for name in options_of(sections.ScheduleEntry) if name not in refused]
    # the first of `known` is "step"
    for number, entry in enumerate(entries):
        at, step = f"{where}[{number}]", entry["step"]
        check_keys(entry, known, at)
        changed = [key for key in known if key != "step" and entry.get(key) is not None]
        if not changed or set(sections.SIZES) <= set(changed):
            raise ConfigError(f"{at}: give what changes at step {step}: {', '.join(known[1:])}. Give at most one size.")
        last = entries[number - 1]["step"] if number else 0
        if step <= last:
            raise ConfigError(f"{at}.step is {step}, after step {last}; expected entries in order of their steps.")
        _check_batch_tokens(entry, length, at)
        if "weights" in changed and names is not None:
            check_keys(entry["weights"], names, f"{at}.weights")


def _check_batch_tokens(section: Section, length: int | None, where: str) -> None:
    """Check that `global_batch_tokens` is a multiple of `length`: 8192 tokens are 4 rows of 2048, and 8000 are refused.

    Without a `length`, nothing is checked: the schedule of a source has no batch sizes.
    """
    tokens = section.get("global_batch_tokens")
    if tokens is None or length is None:
        return
    found = f"{where}.global_batch_tokens is {tokens}"
    if tokens < length:
        raise ConfigError(f"{found}, less than one row of layout.sequence_length={length}. Give {length} or more.")
    rows, remainder = divmod(tokens, length)
    if remainder:
        found += f", which is {rows} rows of layout.sequence_length={length} and {remainder} tokens"
        raise ConfigError(f"{found}. Expected whole rows. Give {rows * length} or {(rows + 1) * length}.")
