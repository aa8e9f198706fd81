"""Reading configs: files, what they inherit, and where their relative paths start."""

import contextlib
import glob
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grain_sft.config.sections import SECTIONS
from grain_sft.corpus import PREFIX_SUFFIX, words_of
from grain_sft.errors import ConfigError
from grain_sft.storage import files

Places = dict[str, Any]

INHERITS = "inherits"
DATASET_DIR = "dataset_dir"
"""Key of a trainer's GPTConfig that has the value of `corpus.path`."""

_MOST_INHERITED = 100
_PATH: Places = {}
_NAMES: Places = {}
_ANY = "*"
_CORPUS: Places = {"path": _PATH, "label_mask_paths": _PATH, "root": _PATH}
_CORPUS["mixture"] = {_ANY: _CORPUS}
_AMENDMENT: Places = {"withdraw": {"documents": _NAMES}, "replace": {"path": _PATH}}
_PLACES: Places = {"corpus": _CORPUS, DATASET_DIR: _PATH, "stages": {"corpus": _CORPUS}, "amendments": _AMENDMENT}
"""Tree of the keys of a config that hold paths; `_ANY` stands for every key, and a list for each of its items. Its leaves are
`_PATH`, a path, and `_NAMES`, names of documents or paths of files that list such names."""

_EXCLUSIVE = (("global_batch_size", "global_batch_tokens"), ("path", "mixture"))
"""Pairs of keys of which a section has one: a stated key removes the inherited other one."""


class _RepeatedKeyError(Exception):
    """A key that is given twice."""


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key, and reads 2:17 as text (for YAML 1.1 it is 137, in base 60)."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        return self.DEFAULT_SCALAR_TAG if is_number and ":" in value else tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise _RepeatedKeyError(f"{key.start_mark.line + 1}: the key {str(key.value)!r} is given a second time")
            seen.add((key.tag, str(key.value)))
        return node


def read(path: str, inheriting: tuple[str, ...]) -> dict[str, Any]:
    """Return the sections of a config file and of what it inherits, not yet validated; `inheriting` are those above it."""
    if path in inheriting:
        raise ConfigError(f"{path}: inherits itself, by way of {' and '.join(inheriting)}.")
    if len(inheriting) >= _MOST_INHERITED:
        chain = f"is inherited through {len(inheriting)} configs, from {inheriting[0]} on"
        raise ConfigError(f"{path}: {chain}. Expected fewer than {_MOST_INHERITED}. Join some of them.")
    text = files.read_text(path)
    is_yaml = Path(path).suffix in (".yaml", ".yml")
    try:
        stated = yaml.load(text, _Loader) if is_yaml else _load_json(text)  # _Loader is a SafeLoader
    except _RepeatedKeyError as error:
        raise ConfigError(f"{path}: line {error}. Remove one of the two.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # of odd YAML scalars
        hint = "" if is_yaml else ". A YAML config is named .yaml."
        raise ConfigError(f"{path}: not {'YAML' if is_yaml else 'JSON'}: {error}{hint}") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{path}: expected sections {', '.join(SECTIONS)}; found a {type(stated).__name__}.")
    return inherit(path, os.path.dirname(path), stated, (*inheriting, path))


def _load_json(text: str) -> Any:
    """Return the value of JSON without repeated keys, which the reader of YAML finds with their lines."""
    value = json.loads(text)
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        yaml.compose(text.replace("\t", " "), _Loader)
    return value


def inherit(where: str, folder: str, stated: dict[str, Any], inheriting: tuple[str, ...]) -> dict[str, Any]:
    """Return the sections of the config `where` in `folder`, laid over what it inherits, with its token paths located."""
    stated = _located(stated, _PLACES, folder)
    parent = stated.pop(INHERITS, None)
    if parent is None:
        return stated
    if not isinstance(parent, str):
        raise ConfigError(f"{where}: {INHERITS} is {parent!r}; expected the path of another config.")
    parent = files.normalize(parent)
    if not files.is_remote(parent):
        here, parent = os.path.abspath(parent), os.path.join(folder, parent)
        if not files.is_remote(folder):
            parent = os.path.normpath(parent)
            parent = here if not _exists(parent) and _exists(here) else parent
    return overlay(read(parent, inheriting), stated)


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `top` put over it, section by section; lists are replaced whole.

    A stated key removes the other of its `_EXCLUSIVE` pair, and another `layout.kind` the options of the inherited layout.
    """
    merged = dict(base)
    for one, other in (*_EXCLUSIVE, *(pair[::-1] for pair in _EXCLUSIVE)):
        are_sources = isinstance(top.get(one), Mapping) and isinstance(base.get(other), Mapping)  # with these names
        if one in top and other not in top and not are_sources:
            merged.pop(other, None)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    layout, below = top.get("layout"), base.get("layout")
    if isinstance(layout, Mapping) and isinstance(below, Mapping):
        replaced = layout.get("kind") not in (None, below.get("kind"))
        dropped = set(below).difference(layout, ("kind", "sequence_length")) if replaced else ()
        merged["layout"] = {key: value for key, value in merged["layout"].items() if key not in dropped}
    return merged


def _located(stated: Any, places: Places, folder: str) -> Any:
    """Return a value of a config in which `_locate` has replaced the paths at `places`; a list has them in each item."""
    if places is _PATH:
        return _locate(stated, folder)
    if places is _NAMES and isinstance(stated, str):
        return _locate_list(stated, folder)
    if isinstance(stated, list):
        return [_located(each, places, folder) for each in stated]
    if not isinstance(stated, Mapping):
        return stated
    found = dict(stated)
    for key, value in stated.items():
        if (below := places.get(key, places.get(_ANY))) is not None:
            found[key] = _located(value, below, folder)
    return found


def _locate(path: object, folder: str) -> object:
    """Return a token path, or each of a list, joined to the config's `folder` if it is relative and exists there.

    In a bucket, relative paths are joined without a check. `validate` refuses values that are not paths.
    """
    if isinstance(path, list):
        return [_locate(item, folder) for item in path]
    if isinstance(path, str) and len(words := words_of(path)) > 1:  # a blend: weights and prefixes in turn
        return [word if at % 2 == 0 else _locate(word, folder) for at, word in enumerate(words)]
    if not isinstance(path, str) or not path or files.is_remote(path := files.normalize(path)) or os.path.isabs(path):
        return path
    beside = os.path.join(folder, path)
    return beside if files.is_remote(folder) or _exists(beside) else path


def _locate_list(name: str, folder: str) -> object:
    """Return the path of a file that lists documents, as `_locate` finds it. If no file is called `name`, it names documents
    or a source and is returned as it is, even where a folder has that name."""
    is_document = re.fullmatch(r"(.*:)?\d+", name, re.DOTALL)
    path = name if is_document or files.is_remote(name) else _locate(name, folder)
    return path if isinstance(path, str) and path != name and files.is_file(path) else name


def _exists(path: str) -> bool:
    return any(os.path.exists(path + suffix) for suffix in ("", PREFIX_SUFFIX)) or any(
        True for _ in glob.iglob(path, recursive=True)
    )
