"""`load`: a pipeline from a config, in which the five nouns stand as they are. Every key is validated."""

from __future__ import annotations

import difflib
import glob
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grain

from grain_sft import files
from grain_sft.corpus import open_corpus
from grain_sft.corpus.open import FORMATS
from grain_sft.errors import ConfigError, MissingExtraError
from grain_sft.layout import Layout, MaterializedLayout, PackedLayout, PaddedLayout, WindowLayout
from grain_sft.layout.packing import ALGORITHMS, BY_EPOCH
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import Host, IndexSampler
from grain_sft.sampling.orders import ORDERS
from grain_sft.sampling.sampler import LAST_BATCH
from grain_sft.sources import NpyDataSource
from grain_sft.transforms import NgramFilter, ShiftTargets, TrimToMultiple

INHERITS = "inherits"
LAYOUTS: dict[str, Callable[..., Layout]] = {
    "windows": WindowLayout,
    "padded": PaddedLayout,
    "packed": PackedLayout,
    "materialized": MaterializedLayout,
}
TRANSFORMS: dict[str, Callable[..., grain.transforms.Map]] = {
    "ngram_filter": NgramFilter,
    "shift_targets": ShiftTargets,
    "trim_to_multiple": TrimToMultiple,
}

Kind = type | tuple[type, ...] | tuple[str, ...]
_PATH: Kind = (str, list)
_COUNT_OR_NONE: Kind = (int, type(None))
LAYOUT_OPTIONS: dict[str, dict[str, Kind]] = {
    "windows": {},
    "padded": {"keep": ("last", "first"), "min_tokens": int},
    "packed": {
        "algorithm": tuple(ALGORITHMS),
        "long_documents": ("truncate", "fragment"),
        "source_group_size": int,
        "ties": ("stable", "numpy"),
        "max_segments": _COUNT_OR_NONE,
        "boundaries": ("auto", "eos"),
        "bos_token_id": _COUNT_OR_NONE,
        "seed": int,
        "epochs": int,
        "batch_rows": int,
    },
    "materialized": {},
}
"""Keys that a layout of each kind takes beside `kind` and `sequence_length`."""

SECTIONS: dict[str, dict[str, Kind]] = {
    "corpus": {
        "path": _PATH,
        "format": FORMATS,
        "dtype": str,
        "eos_token_id": int,
        "path_remap": dict,
        "tokenizer": str,
    },
    "layout": {
        "kind": tuple(LAYOUTS),
        "sequence_length": int,
        **{key: kind for options in LAYOUT_OPTIONS.values() for key, kind in options.items()},
    },
    "sampler": {
        "order": tuple(ORDERS),
        "seed": int,
        "global_batch_size": int,
        "global_batch_tokens": int,
        "epochs": int,
        "shuffle": bool,
        "last_batch": LAST_BATCH,
    },
}
"""Keys of each section, and what each takes: types, or the words that it may be."""

REQUIRED = {"corpus": ("path",), "layout": ("kind", "sequence_length"), "sampler": ("seed",)}


def load(config: str | os.PathLike[str] | Mapping[str, Any], *, host: Host | None = None) -> Pipeline:
    """The pipeline that a config states.

    Args:
      config: path of a .json file or, with the extra `yaml`, of a .yaml file; or the same as a dict. Relative paths of
        token files start at the folder of the config that states them or, if nothing is there, at the working
        directory; `inherits: other` starts at that folder too. What a config states goes before what it inherits.
      host: which of the data-loading processes this is; None asks JAX (and so starts its backend).

    Raises:
      ConfigError: an unknown key (with the nearest that exists), a missing one, or a value of the wrong kind.
      CorpusError, CorpusFileError, LayoutError, SamplerError: from what the config describes.
    """
    if isinstance(config, Mapping):
        where, stated = "config", _inherit("config", os.getcwd(), dict(config), ())
    else:
        where = files.normalize(config)
        where = where if files.is_remote(where) else os.path.abspath(where)
        stated = _read(where, ())
    validate(stated, where)
    corpus_keys = dict(stated["corpus"])
    corpus = open_corpus(corpus_keys.pop("path"), **corpus_keys)
    layout_keys, sampler_keys = dict(stated["layout"]), dict(stated["sampler"])
    if "global_batch_tokens" in sampler_keys:
        sampler_keys["global_batch_size"] = sampler_keys.pop("global_batch_tokens") // layout_keys["sequence_length"]
    _check_epochs(layout_keys, sampler_keys, where)
    layout = LAYOUTS[layout_keys.pop("kind")](corpus, **layout_keys)
    source = NpyDataSource(layout)
    sampler = IndexSampler(len(source), host=host or Host.from_jax(), **sampler_keys)
    return Pipeline(source, sampler, [_transform(item, where) for item in stated.get("transforms", ["shift_targets"])])


def validate(config: Mapping[str, Any], where: str) -> None:
    """Check the keys and kinds of a whole config, inherited parts included.

    Raises:
      ConfigError: for the first that is wrong.
    """
    _check_keys(config, (*SECTIONS, "transforms"), where)
    for section, keys in SECTIONS.items():
        stated = config.get(section)
        if not isinstance(stated, Mapping):
            raise ConfigError(f"{where}: {section} is {stated!r}; expected a section with {', '.join(keys)}.")
        _check_keys(stated, keys, f"{where}: {section}")
        for key in REQUIRED[section]:
            if key not in stated:
                raise ConfigError(f"{where}: {section} lacks the key {key!r}.")
        for key, value in stated.items():
            _check_kind(value, keys[key], f"{where}: {section}.{key}")
    _check_layout(config["layout"], where)
    paths, remap = config["corpus"]["path"], config["corpus"].get("path_remap", {})
    for path in paths if isinstance(paths, list) else ():
        _check_kind(path, str, f"{where}: corpus.path: an item")
    for text in (*remap, *remap.values()):
        _check_kind(text, str, f"{where}: corpus.path_remap: a prefix or its replacement")
    sampler = config["sampler"]
    if ("global_batch_size" in sampler) == ("global_batch_tokens" in sampler):
        raise ConfigError(f"{where}: sampler: give one of global_batch_size (in rows) and global_batch_tokens.")
    tokens, length = sampler.get("global_batch_tokens"), config["layout"]["sequence_length"]
    if tokens is not None and (length < 1 or tokens < length):
        raise ConfigError(
            f"{where}: sampler.global_batch_tokens is {tokens}, less than one row of layout.sequence_length={length}."
        )
    if not isinstance(config.get("transforms", []), list):
        raise ConfigError(f"{where}: transforms is {config['transforms']!r}; expected a list.")


def _check_layout(layout: Mapping[str, Any], where: str) -> None:
    """Check that a layout's options are those of its kind."""
    kind = layout["kind"]
    for key in layout:
        owners = [each for each, options in LAYOUT_OPTIONS.items() if key in options]
        if owners and kind not in owners:
            known = ", ".join(("sequence_length", *LAYOUT_OPTIONS[kind]))
            raise ConfigError(
                f"{where}: layout.{key} is an option of kind {' and '.join(owners)}; kind {kind} takes {known}. Take it "
                f"out, or write kind: {owners[0]}."
            )


def _check_epochs(layout: dict[str, Any], sampler: Mapping[str, Any], where: str) -> None:
    """Check a layout that packs each epoch anew: its rows are numbered through its epochs, and read as they are. With
    multipack, whose batches are made with their rows, fills in how many rows a batch has."""
    algorithm = layout.get("algorithm")
    if algorithm not in BY_EPOCH:
        return
    if "seed" not in layout:
        raise ConfigError(f"{where}: layout lacks the key 'seed': algorithm {algorithm} packs each epoch anew by it.")
    for key, right in (("order", "sequential"), ("epochs", 1)):
        if sampler.get(key) != right:
            raise ConfigError(
                f"{where}: sampler.{key} is {sampler.get(key)!r}; with layout.algorithm {algorithm}, which orders the rows "
                f"of all its epochs (layout.epochs) itself, expected {right!r}."
            )
    if algorithm == "multipack":
        rows = sampler["global_batch_size"]
        if layout.setdefault("batch_rows", rows) != rows:
            raise ConfigError(
                f"{where}: layout.batch_rows is {layout['batch_rows']}, but the sampler's global batch has {rows} rows; "
                "multipack makes whole batches, so these are one number. Leave layout.batch_rows out."
            )


def _read(path: str, inheriting: tuple[str, ...]) -> dict[str, Any]:
    """The config file `path` with what it inherits, not yet validated."""
    if path in inheriting:
        raise ConfigError(f"{path}: inherits itself, by way of {' and '.join(inheriting)}.")
    text = files.read_text(path)
    if Path(path).suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError as error:
            raise MissingExtraError.of(f"{path}: reading YAML", "PyYAML", "yaml") from error
        try:
            stated = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # of odd scalars
            raise ConfigError(f"{path}: not YAML: {error}") from error
    else:
        try:
            stated = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}. A YAML config is named .yaml.") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{path}: expected sections {', '.join(SECTIONS)}; found a {type(stated).__name__}.")
    return _inherit(path, os.path.dirname(path), stated, (*inheriting, path))


def _inherit(where: str, folder: str, stated: dict[str, Any], inheriting: tuple[str, ...]) -> dict[str, Any]:
    """What the config `where` in `folder` states, laid over what it inherits; its token paths are those of `folder`."""
    corpus = stated.get("corpus")
    if isinstance(corpus, Mapping) and "path" in corpus:
        path = corpus["path"]
        found = [_locate(item, folder) for item in path] if isinstance(path, list) else _locate(path, folder)
        stated["corpus"] = {**corpus, "path": found}
    parent = stated.pop(INHERITS, None)
    if parent is None:
        return stated
    if not isinstance(parent, str):
        raise ConfigError(f"{where}: {INHERITS} is {parent!r}; expected the path of another config.")
    parent = files.normalize(parent)
    if not files.is_remote(parent):
        parent = f"{folder}/{parent}" if files.is_remote(folder) else os.path.normpath(os.path.join(folder, parent))
    return _overlay(_read(parent, inheriting), stated)


def _overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` put over it, section by section; lists are replaced whole."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    sampler = top.get("sampler")
    if isinstance(sampler, Mapping) and isinstance(merged.get("sampler"), dict):
        for one, other in (("global_batch_size", "global_batch_tokens"), ("global_batch_tokens", "global_batch_size")):
            if one in sampler and other not in sampler:
                merged["sampler"].pop(other, None)  # the one replaces the other
    layout, below = top.get("layout"), base.get("layout")
    if (
        isinstance(layout, Mapping)
        and isinstance(below, Mapping)
        and layout.get("kind", below.get("kind")) != below.get("kind")
    ):
        dropped = set(below).difference(layout, ("kind", "sequence_length"))  # options of the kind that is replaced
        merged["layout"] = {key: value for key, value in merged["layout"].items() if key not in dropped}
    return merged


def _locate(path: object, folder: str) -> object:
    """A token path of a config in `folder`: below it, if it is relative and there, or the folder is in a bucket; else
    as it is. What is no path is left to `validate`."""
    if not isinstance(path, str):
        return path
    path = files.normalize(path)
    if files.is_remote(path) or os.path.isabs(path):
        return path
    if files.is_remote(folder):
        return f"{folder}/{path}"
    beside = os.path.join(folder, path)
    return beside if _is_there(beside) else path


def _is_there(path: str) -> bool:
    return os.path.exists(path) or any(True for _ in glob.iglob(path, recursive=True))


def _transform(item: object, where: str) -> grain.transforms.Map:
    """A transform given as `name` or as `{name: {option: value}}`."""
    name: object = item
    options: Any = {}
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        options = {} if options is None else options
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ConfigError(f"{where}: transforms: {item!r}; expected a name, or one name with its options.")
    _check_keys({name: None}, TRANSFORMS, f"{where}: transforms")
    make = TRANSFORMS[name]
    _check_keys(options, tuple(inspect.signature(make).parameters), f"{where}: transforms.{name}")
    for key, value in options.items():
        _check_kind(value, int, f"{where}: transforms.{name}.{key}")
    return make(**options)


def _check_keys(stated: Mapping[Any, Any], known: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    for key in stated:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.0) if known else []
            hint = f" The nearest that there is: {near[0]!r}." if near else " It takes none."
            raise ConfigError(f"{where}: unknown key {key!r}.{hint}")


def _check_kind(value: object, kind: Kind, where: str) -> None:
    if isinstance(kind, tuple) and isinstance(kind[0], str):
        if value not in kind:
            raise ConfigError(f"{where} is {value!r}; expected one of {', '.join(map(str, kind))}.")
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(
            "null" if each is type(None) else each.__name__ for each in names if isinstance(each, type)
        )
        raise ConfigError(f"{where} is {value!r}; expected {expected}.")
