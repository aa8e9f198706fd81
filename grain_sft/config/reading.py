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
"""`corpus.path` in a trainer's GPTConfig."""

_MOST_INHERITED = 100
_PATH: Places = {}
_NAMES: Places = {}
_ANY = "*"
_CORPUS: Places = {"path": _PATH, "label_mask_paths": _PATH, "root": _PATH}
_CORPUS["mixture"] = {_ANY: _CORPUS}
_AMENDMENT: Places = {"withdraw": {"documents": _NAMES}, "replace": {"path": _PATH}}
_PLACES: Places = {"corpus": _CORPUS, DATASET_DIR: _PATH, "stages": {"corpus": _CORPUS}, "amendments": _AMENDMENT}
"""Places of paths in a config: keys, or `_ANY` for every key, down to `_PATH`, or to `_NAMES` of documents or of files of
names. Items of a list have the same places."""

_EXCLUSIVE = (("sampler", ("global_batch_size", "global_batch_tokens")), ("corpus", ("path", "mixture")))
"""Keys of a section that exclude each other: one replaces the other, inherited one."""


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
    """Return `base` with the values of `top` put over it, section by section; lists are replaced whole."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    for section, keys in _EXCLUSIVE:
        given = top.get(section)
        stated = [key for key in keys if isinstance(given, Mapping) and key in given]
        if len(stated) == 1 and isinstance(merged[section], dict):
            merged[section] = {key: value for key, value in merged[section].items() if key in stated or key not in keys}
    layout, below = top.get("layout"), base.get("layout")
    if isinstance(layout, Mapping) and isinstance(below, Mapping):
        replaced = layout.get("kind") not in (None, below.get("kind"))
        dropped = set(below).difference(layout, ("kind", "sequence_length")) if replaced else ()
        merged["layout"] = {key: value for key, value in merged["layout"].items() if key not in dropped}
    return merged


def _located(stated: Any, places: Places, folder: str) -> Any:
    """Return a value of a config with the paths at `places` in it, or in its items, as `_locate` finds them."""
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
    """Return a token path, or a list of them, below `folder` if it is relative and exists there or the folder is in a bucket;
    else as it is. `validate` refuses values that are not paths."""
    if isinstance(path, list):
        return [_locate(item, folder) for item in path]
    if isinstance(path, str) and len(words := words_of(path)) > 1:
        return [_locate(word, folder) for word in words]
    if not isinstance(path, str) or not path or files.is_remote(path := files.normalize(path)) or os.path.isabs(path):
        return path
    beside = os.path.join(folder, path)
    return beside if files.is_remote(folder) or _exists(beside) else path


def _locate_list(name: str, folder: str) -> object:
    """Return the path of a file that lists documents, as `_locate` finds it; else `name`. It may be that of a source whose
    folder has the same name."""
    is_document = re.fullmatch(r"(.*:)?\d+", name, re.DOTALL)
    path = name if is_document or files.is_remote(name) else _locate(name, folder)
    return path if isinstance(path, str) and path != name and files.is_file(path) else name


def _exists(path: str) -> bool:
    return any(os.path.exists(path + suffix) for suffix in ("", PREFIX_SUFFIX)) or any(
        True for _ in glob.iglob(path, recursive=True)
    )
