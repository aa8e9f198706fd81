"""Checks of a whole config against the tables of keys (`keys.py`), and the classes that its names stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grain_sft.config.keys import CORPUS, LAYOUT_OPTIONS, SAMPLER, SECTIONS, SOURCE, SOURCE_SAMPLER, TOP
from grain_sft.config.kinds import check_keys, check_kind
from grain_sft.config.schedule import check_batch_tokens, check_schedule
from grain_sft.errors import ConfigError, CorpusError, StorageError
from grain_sft.storage import RemoteOptions

_STATED: dict[str, tuple[str, ...]] = {"corpus": (), "layout": ("kind", "sequence_length"), "sampler": ("seed",)}
"""Keys that each section has to state; where one of two will do, the checks below say it."""


def validate(config: Mapping[str, Any], where: str) -> None:
    """Check the keys and kinds of a whole config, inherited parts included.

    Raises:
      ConfigError: for the first that is wrong.
    """
    check_keys(config, (*SECTIONS, *TOP), where)
    for section, keys in SECTIONS.items():
        stated = config.get(section)
        if not isinstance(stated, Mapping):
            raise ConfigError(f"{where}: {section} is {stated!r}; expected a section with {', '.join(keys)}.")
        check_keys(stated, keys, f"{where}: {section}")
        for key in _STATED[section]:
            if key not in stated:
                raise ConfigError(f"{where}: {section} lacks the key {key!r}.")
        for key, value in stated.items():
            check_kind(value, keys[key].kind, f"{where}: {section}.{key}")
    corpus, layout = config["corpus"], config["layout"]
    _check_layout(layout, f"{where}: layout")
    if "mixture" in corpus:
        check_mixture(corpus, layout, f"{where}: corpus.mixture")
    elif "path" not in corpus:
        raise ConfigError(f"{where}: corpus lacks the key 'path'.")
    _check_paths(corpus, f"{where}: corpus")
    sampler = config["sampler"]
    if ("global_batch_size" in sampler) == ("global_batch_tokens" in sampler):
        raise ConfigError(f"{where}: sampler: give one of global_batch_size (in rows) and global_batch_tokens.")
    tokens, length = sampler.get("global_batch_tokens"), config["layout"]["sequence_length"]
    if tokens is not None:
        check_batch_tokens(tokens, length, f"{where}: sampler.global_batch_tokens")
    _check_sampler(config, where)
    for name, known in TOP.items():
        if name in config:
            check_kind(config[name], known.kind, f"{where}: {name}")


def _check_paths(corpus: Mapping[str, Any], where: str) -> None:
    remap = corpus.get("path_remap", {})
    for key in ("path", "label_mask_paths"):
        paths = corpus.get(key)
        for path in paths if isinstance(paths, list) else ():
            check_kind(path, str, f"{where}.{key}: an item")
    for text in (*remap, *remap.values()):
        check_kind(text, str, f"{where}.path_remap: a prefix or its replacement")
    if "remote" in corpus:
        try:
            RemoteOptions.of(corpus["remote"])
        except (CorpusError, StorageError) as error:
            raise ConfigError(f"{where}.remote: {error}") from error


def _check_sampler(config: Mapping[str, Any], where: str) -> None:
    """Check what of a sampler goes with mixtures, and what with one corpus."""
    sampler, mixture = config["sampler"], config["corpus"].get("mixture")
    if mixture is None and "on_exhausted" in sampler:
        raise ConfigError(
            f"{where}: sampler.on_exhausted is for a mixture of corpora; one ends after its epochs. Take it out."
        )
    if mixture is not None and "epochs" in sampler:
        raise ConfigError(
            f"{where}: sampler.epochs: the sources of a mixture have epochs of their own. Give them as "
            "corpus.mixture.NAME.sampler.epochs, and sampler.on_exhausted."
        )
    if mixture is not None and sampler.get("last_batch") == "run_on":
        raise ConfigError(
            f"{where}: sampler.last_batch is 'run_on'; the sources of a mixture always run on. Take it out."
        )
    if "schedule" in sampler:
        length = config["layout"]["sequence_length"]
        check_schedule(sampler["schedule"], f"{where}: sampler.schedule", names=mixture, sizes=True, length=length)


def check_mixture(corpus: Mapping[str, Any], layout: Mapping[str, Any], where: str) -> None:
    """Check the sources of a mixture, and of those that are mixtures too."""
    if "path" in corpus:
        raise ConfigError(f"{where}: stands beside 'path'. Give one of the two.")
    mixture = corpus["mixture"]
    if not mixture:
        raise ConfigError(f"{where}: names no source.")
    for name, stated in mixture.items():
        at = f"{where}.{name}"
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"{where}: {name!r}: expected a name without '/'.")
        if not isinstance(stated, Mapping):
            raise ConfigError(f"{at} is {stated!r}; expected a section with weight and path.")
        known = {**CORPUS, **SOURCE}
        check_keys(stated, known, at)
        for key, value in stated.items():
            check_kind(value, known[key].kind, f"{at}.{key}")
        if "weight" not in stated:
            raise ConfigError(f"{at} lacks the key 'weight'.")
        _check_source(stated, layout, at)


def _check_source(stated: Mapping[str, Any], layout: Mapping[str, Any], at: str) -> None:
    _check_paths(stated, at)
    own = stated.get("layout", {})
    check_keys(own, SECTIONS["layout"], f"{at}.layout")
    for key, value in own.items():
        check_kind(value, SECTIONS["layout"][key].kind, f"{at}.layout.{key}")
    if "mixture" in stated:
        for key in ("layout", "sampler"):
            if key in stated:
                raise ConfigError(f"{at}.{key}: stands beside a mixture. Give it to the mixture's sources.")
        check_mixture(stated, layout, f"{at}.mixture")
        if "schedule" in stated:
            check_schedule(stated["schedule"], f"{at}.schedule", names=stated["mixture"], sizes=False, length=1)
        return
    for key in ("on_exhausted", "schedule"):
        if key in stated:
            raise ConfigError(f"{at}.{key}: is for a source that is a mixture. Take it out.")
    if "path" not in stated:
        raise ConfigError(f"{at} lacks the key 'path' (or 'mixture').")
    if own.get("kind", layout["kind"]) == layout["kind"]:
        own = {**layout, **own}
    _check_layout(own, f"{at}.layout")
    sampler = stated.get("sampler", {})
    check_keys(sampler, SOURCE_SAMPLER, f"{at}.sampler")
    for key, value in sampler.items():
        check_kind(value, SAMPLER[key].kind, f"{at}.sampler.{key}")


def _check_layout(layout: Mapping[str, Any], where: str) -> None:
    """Check that a layout's options are those of its kind."""
    kind = layout["kind"]
    for key in layout:
        owners = [each for each, options in LAYOUT_OPTIONS.items() if key in options]
        if owners and kind not in owners:
            known = ", ".join(("sequence_length", *LAYOUT_OPTIONS[kind]))
            raise ConfigError(
                f"{where}.{key} is an option of kind {' and '.join(owners)}; kind {kind} takes {known}. Take it "
                f"out, or write kind: {owners[0]}."
            )
