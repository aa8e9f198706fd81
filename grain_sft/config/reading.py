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
from grain_sft.errors import ConfigError, CorpusFileError
from grain_sft.layout import ListFile
from grain_sft.storage import files

INHERITS = "inherits"
DATASET_DIR = "dataset_dir"
"""Key of a trainer's GPTConfig that has the value of `corpus.path`."""

_MOST_INHERITED = 100
_EXCLUSIVE = {"global_batch_size": "global_batch_tokens", "path": "mixture"}
_EXCLUSIVE |= {other: key for key, other in _EXCLUSIVE.items()}
"""Keys that exclude each other in a section: a stated one removes the inherited other one."""


class _RefusedError(Exception):
    """Valid YAML with two meanings. Its text begins with the line."""


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key and 010 (8 in YAML 1.1, 10 in YAML 1.2), and reads 2:17 as text (in YAML 1.1 137)."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        return self.DEFAULT_SCALAR_TAG if is_number and ":" in value else tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                found = f"{key.start_mark.line + 1}: the key {str(key.value)!r} is given a second time"
                raise _RefusedError(f"{found}. Remove one of the two.")
            seen.add((key.tag, str(key.value)))
        return node

    def construct_yaml_int(self, node: Any) -> int:
        value = int(super().construct_yaml_int(node))
        if re.fullmatch("[-+]?0[0-7_]+", node.value) and value != (decimal := int(node.value.replace("_", ""))):
            found = f"{node.start_mark.line + 1}: {node.value} is {value} in YAML 1.1 and {decimal} in YAML 1.2"
            raise _RefusedError(f"{found}. Write {decimal} or {value}.")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read(path: str, inheriting: tuple[str, ...]) -> dict[str, Any]:
    """Return the sections of a config file and of the configs that it inherits, not yet validated.

    Args:
      inheriting: Paths of the configs through which this one is inherited, the first one first.
    """
    if path in inheriting:
        raise ConfigError(f"{path}: inherits itself, by way of {' and '.join(inheriting)}.")
    if len(inheriting) >= _MOST_INHERITED:
        chain = f"is inherited through {len(inheriting)} configs, from {inheriting[0]} on"
        raise ConfigError(f"{path}: {chain}. Expected fewer than {_MOST_INHERITED}. Join some of them.")
    if not files.is_remote(path) and not os.path.exists(path):
        inherited = f" {inheriting[-1]} inherits it." if inheriting else ""
        raise CorpusFileError(f"{path}: no such file.{inherited} Fix the path.")
    text = files.read_text(path)
    is_yaml = Path(path).suffix in (".yaml", ".yml")
    try:
        stated = yaml.load(text, _Loader) if is_yaml else _load_json(text)  # _Loader is a SafeLoader
    except _RefusedError as error:
        raise ConfigError(f"{path}: line {error}") from None
    # PyYAML raises more than YAMLError: ValueError for 2024-13-01, LookupError and AttributeError for odd scalars.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        hint = "" if is_yaml else ". A YAML config is named .yaml."
        raise ConfigError(f"{path}: not {'YAML' if is_yaml else 'JSON'}: {error}{hint}") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{path}: expected sections {', '.join(SECTIONS)}; found a {type(stated).__name__}.")
    return inherit(path, os.path.dirname(path), stated, (*inheriting, path))


def _load_json(text: str) -> Any:
    """Return the value of JSON. Refuse a repeated key, with its line: JSON is YAML too, so `_Loader` finds it."""
    value = json.loads(text)
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        yaml.compose(text.replace("\t", " "), _Loader)
    return value


def inherit(where: str, folder: str, stated: dict[str, Any], inheriting: tuple[str, ...]) -> dict[str, Any]:
    """Return the sections of the config `where` in `folder`, laid over what it inherits, with its token paths located.

    The path of the inherited config starts at `folder`, or at the working directory if it exists only there.
    """
    stated = _located(stated, _PLACES, folder)
    parent = stated.pop(INHERITS, None)
    if parent is None:
        return stated
    if not isinstance(parent, str):
        raise ConfigError(f"{where}: {INHERITS} is {parent!r}; expected the path of another config.")
    parent = files.normalize(parent)
    if not files.is_remote(parent):
        here, parent = os.path.abspath(parent), _joined(folder, parent)
        if not files.is_remote(folder):
            parent = os.path.normpath(parent)
            parent = here if not _exists(parent) and _exists(here) else parent
    return overlay(read(parent, inheriting), stated)


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `top` put over it, section by section; lists are replaced whole.

    A key of `top` removes the key of `base` with which `_EXCLUSIVE` pairs it. A `layout.kind` other than that of `base`
    removes the layout options of `base`, except `sequence_length`.
    """
    merged = dict(base)
    for one, other in _EXCLUSIVE.items():
        # In `corpus.mixture`, "path" and "mixture" may be names of sources.
        are_sources = isinstance(top.get(one), Mapping) and isinstance(base.get(other), Mapping)
        if one in top and other not in top and not are_sources:
            merged.pop(other, None)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            kind, below_kind = value.get("kind"), below.get("kind")
            if key == "layout" and None not in (kind, below_kind) and kind != below_kind:
                below = {name: below[name] for name in ("sequence_length",) if name in below}
            value = overlay(below, value)
        merged[key] = value
    return merged


def _located(stated: Any, places: Any, folder: str) -> Any:
    """Return a value of a config with its relative paths joined to `folder` where they exist there.

    Args:
      places: Tree of the keys that hold paths, such as `_PLACES`; a function that locates one path; or None where no path is.
    """
    if isinstance(stated, list):
        return [_located(each, places, folder) for each in stated]
    if callable(places):
        return places(stated, folder)
    if places is None or not isinstance(stated, Mapping):
        return stated
    return {key: _located(value, places.get(key, places.get(_ANY)), folder) for key, value in stated.items()}


def _locate(path: object, folder: str) -> object:
    """Return a token path, joined to the config's `folder` if it is relative and exists there.

    In a bucket, relative paths are joined without a check. `validate` refuses values that are not paths.
    """
    if isinstance(path, str) and len(words := words_of(path)) > 1:  # a blend: weights and prefixes in turn
        return [word if at % 2 == 0 else _locate(word, folder) for at, word in enumerate(words)]
    if not isinstance(path, str) or not path or files.is_remote(path := files.normalize(path)) or os.path.isabs(path):
        return path
    joined = _joined(folder, path)
    return joined if files.is_remote(folder) or _exists(joined) else path


def _locate_list(name: object, folder: str) -> object:
    """Return the `ListFile` at the path that `_locate` gives for `name`, or `name` itself if no file is there."""
    if not isinstance(name, str) or files.is_remote(name) or re.fullmatch(r"(.*:)?\d+", name, re.DOTALL):
        return name
    path = _locate(name, folder)
    if not isinstance(path, str) or path == name or not files.is_file(path):
        return name
    found = ListFile(path)
    found.name = name
    return found


def _joined(folder: str, path: str) -> str:
    """Return `path` below `folder`, with a leading "." or ".." resolved in a bucket, which has no such folders."""
    scheme, mark, rest = os.path.join(folder, path).rpartition("://")
    return f"{scheme}{mark}{os.path.normpath(rest) if mark and path.startswith('.') else rest}"


def _exists(path: str) -> bool:
    """Return whether `path` is a file, a folder, the prefix of token files, or a glob that matches."""
    return os.path.exists(path) or os.path.exists(path + PREFIX_SUFFIX) or any(glob.iglob(path, recursive=True))


_ANY = "*"
_CORPUS: dict[str, Any] = {"path": _locate, "label_mask_paths": _locate, "root": _locate}
_CORPUS["mixture"] = {_ANY: _CORPUS}
_PLACES = {
    "corpus": _CORPUS,
    DATASET_DIR: _locate,
    "stages": {"corpus": _CORPUS},
    "amendments": {"withdraw": {"documents": _locate_list}, "replace": {"path": _locate}},
}
"""Functions that locate the paths of a config, by the keys that hold these; `_ANY` means every key."""
