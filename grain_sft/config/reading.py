"""Reading of config files. A config is merged with the configs that it inherits."""

import contextlib
import glob
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grain_sft.config.sections import SECTIONS, SIZES
from grain_sft.corpus import PREFIX_SUFFIX, words_of
from grain_sft.errors import ConfigError, CorpusFileError, shortened
from grain_sft.layout import ListFile
from grain_sft.storage import files

INHERITS = "inherits"
DATASET_DIR = "dataset_dir"
"""Key of a `GPTConfig` with the same meaning as our `corpus.path`."""

_MOST_INHERITED = 100  # number of configs in the longest chain of `inherits`
_EXCLUSIVE = (SIZES, SIZES[::-1], ("path", "mixture"), ("mixture", "path"))
"""Pairs (stated key, excluded key): a config that states the first key does not inherit the second."""
_REMOVED_BY_NULL = ("on_exhausted", "schedule", "transforms")
"""Keys that count as left out if their value is null. Other keys whose value may be null have None as their default."""


class _RefusedError(Exception):
    """Valid YAML that could be misunderstood. The message begins with the number of the line."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML that differs from YAML 1.1, PyYAML's version, in three ways.

    A repeated key is an error. The number 010 is an error, because it is 8 in YAML 1.1 and 10 in YAML 1.2. 2:17 is text; in
    YAML 1.1 it is the number 137.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        return self.DEFAULT_SCALAR_TAG if is_number and ":" in value else tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return the node of a mapping. Refuse a repeated key."""
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


def read(path: str, inheriting: list[str]) -> dict[str, Any]:
    """Return the sections of a config file, merged with those that it inherits. The sections are not validated.

    `inheriting` [a, b] means: a inherits b, and b inherits `path`. The function appends `path`, and then the configs that
    `path` inherits.
    """
    if path in inheriting:
        circle = " -> ".join([*inheriting[inheriting.index(path) :], path])
        raise ConfigError(f"{path}: inherits itself: {circle}. Remove one of these keys {INHERITS!r}.")
    if len(inheriting) >= _MOST_INHERITED:
        chain = f"is inherited through {len(inheriting)} configs, from {inheriting[0]} on"
        raise ConfigError(f"{path}: {chain}. Expected fewer than {_MOST_INHERITED}. Join some of them.")
    if not files.is_remote(path) and not os.path.exists(path):
        inherited = f" {inheriting[-1]} inherits it." if inheriting else ""
        raise CorpusFileError(f"{path}: no such file.{inherited} Fix the path.")
    text = files.read_text(path)
    is_yaml = Path(path).suffix in (".yaml", ".yml")
    try:
        stated = yaml.load(text, _Loader) if is_yaml else _load_json(text)  # a SafeLoader runs no code
        json.dumps(stated, default=repr, skipkeys=True)  # raises ValueError if a value contains itself, by a YAML alias
    except _RefusedError as error:
        raise ConfigError(f"{path}: line {error}") from None
    # PyYAML raises more than YAMLError: ValueError for 2024-13-01, LookupError and AttributeError for odd scalars.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # errors of PyYAML end with a line that points to a column
        fix = "\nFix the file." if is_yaml else ". A YAML config is named .yaml. Fix the file, or its name."
        raise ConfigError(f"{path}: not {'YAML' if is_yaml else 'JSON'}: {error}{fix}") from error
    if not isinstance(stated, dict):
        found = "nothing" if stated is None else shortened(repr(stated))
        raise ConfigError(f"{path}: expected sections {', '.join(SECTIONS)}; found {found}. Write these sections.")
    inheriting.append(path)
    return inherit(path, os.path.dirname(path), stated, inheriting)


def _load_json(text: str) -> Any:
    """Return the value of a JSON text. Refuse a repeated key, which `_Loader` finds because JSON is also YAML."""
    value = json.loads(text)
    with contextlib.suppress(yaml.YAMLError, RecursionError):  # JSON that PyYAML can't parse is not checked
        # JSON allows these characters; PyYAML refuses most of them
        yaml.compose(re.sub("[\t\x7f-\x9f]", " ", text), _Loader)
    return value


def inherit(where: str, folder: str, stated: dict[str, Any], inheriting: list[str]) -> dict[str, Any]:
    """Return `stated`, the sections of a config in `folder`, laid over the sections that the config inherits.

    `where` is the name of the config in messages. `inheriting` is as in `read`, and ends with this config, if it is a file.
    """
    stated = _located(stated, _PATHS, folder)
    parent = stated.pop(INHERITS, None)
    if parent is None:
        return overlay({}, stated)  # leaves out keys of `_REMOVED_BY_NULL` that are null
    if not isinstance(parent, str):
        raise ConfigError(f"{where}: {INHERITS} is {parent!r}; expected the path of another config. Give one.")
    parent = files.normalize(parent)
    if not files.is_remote(parent):
        # a path that does not exist in the folder of the config starts at the working directory
        in_working_directory, parent = os.path.abspath(parent), _joined(folder, parent)
        if not files.is_remote(folder):
            parent = os.path.normpath(parent)
            if not _exists(parent) and _exists(in_working_directory):
                parent = in_working_directory
    return overlay(read(parent, inheriting), stated)


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with the values of `top`. Mappings are merged key by key; lists are replaced whole.

    A key of `top` removes the key of `base` that it excludes (`_EXCLUSIVE`), and null removes a key of `_REMOVED_BY_NULL`.
    Sections `layout` are merged by `overlay_layout`.
    """
    merged = dict(base)
    for key, excluded in _EXCLUSIVE:
        # sources of a mixture may be named "path" and "mixture"
        are_sources = isinstance(top.get(key), Mapping) and isinstance(base.get(excluded), Mapping)
        if key in top and excluded not in top and not are_sources:
            merged.pop(excluded, None)
    for key, value in top.items():
        below = merged.get(key)
        # a mapping `below` is a source of a mixture that has the name `key`
        if value is None and key in _REMOVED_BY_NULL and not isinstance(below, Mapping):
            merged.pop(key, None)
            continue
        if isinstance(value, Mapping):
            below = below if isinstance(below, Mapping) else {}
            value = overlay_layout(below, value) if key == "layout" else overlay(below, value)
        merged[key] = value
    return merged


def overlay_layout(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overlay` of two sections `layout`. If their kinds differ, only `sequence_length` is copied from `base`."""
    kind, base_kind = top.get("kind"), base.get("kind")
    if None not in (kind, base_kind) and kind != base_kind:
        base = {name: length for name, length in base.items() if name == "sequence_length"}
    return overlay(base, top)


def _located(stated: Any, paths: Any, folder: str) -> Any:
    """Return a value of a config, with relative paths joined to `folder`. `paths` has the form of `_PATHS`."""
    if isinstance(stated, list):
        return [_located(item, paths, folder) for item in stated]
    if callable(paths):
        return paths(stated, folder)
    if paths is None or not isinstance(stated, Mapping):
        return stated
    return {key: _located(value, paths.get(key, paths.get(_ANY_KEY)), folder) for key, value in stated.items()}


def _locate(path: object, folder: str) -> object:
    """Join a relative path to `folder` if it exists there, or if `folder` is in a bucket.

    A blend of Megatron-LM, such as "0.3 a 0.7 b", becomes a list of its words: weights, and prefixes of token files.
    """
    if not isinstance(path, str) or not path:
        return path  # `validate` refuses a wrong type
    words = words_of(path)
    if len(words) > 1:
        # words 0, 2, 4, ... are weights
        return [word if number % 2 == 0 else _locate(word, folder) for number, word in enumerate(words)]
    path = files.normalize(path)
    if files.is_remote(path) or os.path.isabs(path):
        return path
    joined = _joined(folder, path)
    return joined if files.is_remote(folder) or _exists(joined) else path


def _locate_list(name: object, folder: str) -> object:
    """Return `name` as a `ListFile` (a file that lists documents) if `folder` has a file of that name; else `name`."""
    # "5" and "web:5" name documents, and never a file
    if not isinstance(name, str) or files.is_remote(name) or re.fullmatch(r"(.*:)?\d+", name, re.DOTALL):
        return name
    path = _locate(name, folder)
    if not isinstance(path, str) or path == name or not files.is_file(path):
        return name
    list_file = ListFile(path)
    list_file.name = name
    return list_file


class TokenizerPath(str):
    """Path of a tokenizer in the folder of a config. `name` is the path as the config states it."""

    name: str


def _locate_tokenizer(name: object, folder: str) -> object:
    """Return `name` as a `TokenizerPath` if it exists in `folder` and both are local. Otherwise return `name`."""
    if not isinstance(name, str) or not name or files.is_remote(name) or files.is_remote(folder):
        return name
    path = TokenizerPath(_joined(folder, name))
    path.name = getattr(name, "name", name)  # sections that `read_config` returned may be loaded again
    return path if os.path.exists(path) else name


def _joined(folder: str, path: str) -> str:
    """Return `path` in `folder`. In a bucket, resolve a leading "." or "..": "gs://a/b" and "../c" give "gs://a/c"."""
    scheme, separator, name = os.path.join(folder, path).rpartition("://")
    if separator and path.startswith("."):
        name = os.path.normpath(name)
    return f"{scheme}{separator}{name}"


def _exists(path: str) -> bool:
    """Return whether `path` is a file, a folder, the prefix of token files, or a glob that matches."""
    return os.path.exists(path) or os.path.exists(path + PREFIX_SUFFIX) or any(glob.iglob(path, recursive=True))


_ANY_KEY = "*"  # matches any key, such as the name of a source
_CORPUS: dict[str, Any] = {"path": _locate, "label_mask_paths": _locate, "root": _locate, "tokenizer": _locate_tokenizer}
_CORPUS["mixture"] = {_ANY_KEY: _CORPUS}
_PATHS = {
    "corpus": _CORPUS,
    DATASET_DIR: _locate,
    "stages": {"corpus": _CORPUS},
    "amendments": {"withdraw": {"documents": _locate_list}, "replace": {"path": _locate}},
}
"""Tree of the keys of a config whose values are paths. A leaf is the function that joins the path to the config's folder."""
