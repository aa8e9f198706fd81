"""`load`: a pipeline from a config, in which the five nouns stand as they are. Every key is validated."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import grain

from grain_sft.config import gpt_config
from grain_sft.config.corpora import make_corpus
from grain_sft.config.keys import TRANSFORM_OPTIONS
from grain_sft.config.kinds import check_keys, check_kind
from grain_sft.config.mixture import load_mixture
from grain_sft.config.reading import inherit, read
from grain_sft.config.schedule import sizes_of
from grain_sft.config.schema import validate
from grain_sft.errors import ConfigError, GrainSftError, WrongTypeError, shortened
from grain_sft.layout import LAYOUTS
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import Host, IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.storage import files
from grain_sft.transforms import TRANSFORMS

__all__ = ["load", "stated"]

FORMER_KEYS = {"when_dry": "on_exhausted"}

Config = str | os.PathLike[str] | Mapping[str, Any]


def load(config: Config, *, host: Host | None = None) -> Pipeline:
    """The pipeline that a config states.

    Args:
      config: path of a .yaml or .json file, or the same as a dict. Relative paths of
        token files start at the folder of the config that states them or, if nothing is there, at the working
        directory; `inherits: other` too. What a config states goes before what it inherits. A trainer's `GPTConfig`,
        as the episode-indexed loader reads it, is taken as it is (`grain_sft.config.gpt_config`).
      host: which of the data-loading processes this is; None asks JAX (and so starts its backend).

    Raises:
      ConfigError: an unknown key (with the nearest that exists), a key that stands twice, a missing one, or a value of
        the wrong kind.
      CorpusError, CorpusFileError, LayoutError, SamplerError: from what the config describes; they name it too.
    """
    where, sections = stated(config)
    with _named(where):
        layout_keys, sampler_keys = dict(sections["layout"]), dict(sections["sampler"])
        if "global_batch_tokens" in sampler_keys:
            tokens = sampler_keys.pop("global_batch_tokens")
            sampler_keys["global_batch_size"] = tokens // layout_keys["sequence_length"]
        transforms = [_transform(item, where) for item in sections.get("transforms", ["shift_targets"])]
        if "mixture" in sections["corpus"]:
            source, mixed = load_mixture(sections["corpus"], layout_keys, sampler_keys, where, host or Host.from_jax())
            return Pipeline(source, mixed, transforms, audit=sections.get("audit"))
        if "schedule" in sampler_keys:
            sampler_keys["schedule"] = sizes_of(sampler_keys["schedule"], layout_keys["sequence_length"])
        corpus = make_corpus(sections["corpus"], where)
        _take_over_openchat(layout_keys, sampler_keys, where)
        _check_epochs(layout_keys, sampler_keys, where)
        layout = LAYOUTS[layout_keys.pop("kind")](corpus, **layout_keys)
        one = NpyDataSource(layout)
        sampler = IndexSampler(len(one), host=host or Host.from_jax(), **sampler_keys)
        return Pipeline(one, sampler, transforms, audit=sections.get("audit"))


def stated(config: Config) -> tuple[str, dict[str, Any]]:
    """What a config is called in messages, and its sections: validated, with what it inherits.

    Raises:
      ConfigError: as `load`.
    """
    if isinstance(config, Mapping):
        where, sections = "config", inherit("config", os.getcwd(), dict(config), ())
    else:
        if not isinstance(config, str | os.PathLike):
            raise WrongTypeError(
                f"load: config is {shortened(repr(config))} ({type(config).__name__}); expected the path of a config, or a "
                "mapping."
            )
        where = files.normalize(config)
        where = where if files.is_remote(where) else os.path.abspath(where)
        sections = read(where, ())
    if gpt_config.is_gpt_config(sections):
        sections = gpt_config.sections_of(sections, where)
    _rename_former(sections, where)
    validate(sections, where)
    return where, sections


def _rename_former(section: Any, where: str) -> None:
    """Rename keys of an earlier version, in all sections."""
    for key, value in list(section.items()) if isinstance(section, dict) else ():
        if key in FORMER_KEYS and FORMER_KEYS[key] not in section:
            warnings.warn(f"{where}: {key} is now {FORMER_KEYS[key]}.", DeprecationWarning, stacklevel=3)
            section[FORMER_KEYS[key]] = section.pop(key)
        _rename_former(value, where)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors from here name the config."""
    try:
        yield
    except GrainSftError as error:
        message = str(error)
        if message.startswith(where):
            raise
        raise type(error)(f"{where}: {message}") from error


def _take_over_openchat(layout: dict[str, Any], sampler: dict[str, Any], where: str) -> None:
    """Where order openchat meets algorithm multipack, which is that order and its batches: its seed and epochs are the
    layout's, whose rows are then read as they are."""
    algorithm = layout.get("algorithm")
    order = None if algorithm is None else ALGORITHMS[algorithm].order
    if order is None or sampler.get("order") != order:
        return
    for key, least in (("last_batch", "drop"), ("shuffle", True)):
        if sampler.get(key, least) != least:
            raise ConfigError(
                f"{where}: sampler.{key} is {sampler[key]!r}; OpenChat's batches (layout.algorithm multipack) know {least!r} "
                "only. Take it out."
            )
    if "epochs" not in sampler and "epochs" not in layout:
        raise ConfigError(
            f"{where}: sampler lacks the key 'epochs': multipack makes the rows of each epoch beforehand."
        )
    for key, default in (("seed", sampler["seed"]), ("epochs", sampler.get("epochs"))):
        if key in layout and default is not None and layout[key] != default:
            raise ConfigError(f"{where}: layout.{key} is {layout[key]}, but sampler.{key} is {default}. Leave one out.")
        layout.setdefault(key, default)
    sampler.update(order="sequential", epochs=1)


def _check_epochs(layout: dict[str, Any], sampler: Mapping[str, Any], where: str) -> None:
    """Check a layout that packs each epoch anew: its rows are numbered through its epochs, and read as they are. With
    multipack, whose batches are made with their rows, fills in how many rows a batch has."""
    algorithm = layout.get("algorithm")
    if algorithm is None or not ALGORITHMS[algorithm].packs_per_epoch:
        return
    whole_batches = ALGORITHMS[algorithm].whole_batches
    if whole_batches and "schedule" in sampler:
        raise ConfigError(
            f"{where}: sampler.schedule: algorithm {algorithm} makes whole batches of one size beforehand. Take it out."
        )
    if "seed" not in layout:
        raise ConfigError(f"{where}: layout lacks the key 'seed': algorithm {algorithm} packs each epoch anew by it.")
    for key, right in (("order", "sequential"), ("epochs", 1)):
        if sampler.get(key) != right:
            raise ConfigError(
                f"{where}: sampler.{key} is {sampler.get(key)!r}; with layout.algorithm {algorithm}, which orders the rows "
                f"of all its epochs (layout.epochs) itself, expected {right!r}."
            )
    if whole_batches:
        rows = sampler["global_batch_size"]
        if layout.setdefault("batch_rows", rows) != rows:
            raise ConfigError(
                f"{where}: layout.batch_rows is {layout['batch_rows']}, but the sampler's global batch has {rows} rows; "
                "multipack makes whole batches, so these are one number. Leave layout.batch_rows out."
            )


def _transform(item: object, where: str) -> grain.transforms.Map:
    """A transform given as `name` or as `{name: {option: value}}`."""
    name: object = item
    options: Any = {}
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        options = {} if options is None else options
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ConfigError(f"{where}: transforms: {item!r}; expected a name, or one name with its options.")
    check_keys({name: None}, tuple(TRANSFORMS), f"{where}: transforms")
    known = TRANSFORM_OPTIONS[name]
    check_keys(options, known, f"{where}: transforms.{name}")
    for key, value in options.items():
        check_kind(value, known[key].kind, f"{where}: transforms.{name}.{key}")
    return TRANSFORMS[name](**options)
