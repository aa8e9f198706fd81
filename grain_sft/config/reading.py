"""Reading configs: files, what they inherit, and where their relative paths start."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grain_sft.config.sections import SECTIONS
from grain_sft.errors import ConfigError
from grain_sft.storage import files

INHERITS = "inherits"
DATASET_DIR = "dataset_dir"
"""Of a trainer's GPTConfig: `corpus.path`."""

_MOST_INHERITED = 100

_JSON_PARTS = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\]]')


class _TwiceError(Exception):
    """A key that is given twice, and its line."""


class _Loader(yaml.SafeLoader):
    """YAML in which no mapping has a key twice."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise _TwiceError(str(key.value), key.start_mark.line + 1)
            seen.add((key.tag, str(key.value)))
        return node


def read(path: str, inheriting: tuple[str, ...]) -> dict[str, Any]:
    """The config file `path` with what it inherits, not yet validated."""
    if path in inheriting:
        raise ConfigError(f"{path}: inherits itself, by way of {' and '.join(inheriting)}.")
    if len(inheriting) >= _MOST_INHERITED:
        raise ConfigError(
            f"{path}: is inherited through {len(inheriting)} configs, from {inheriting[0]} on. Expected fewer than "
            f"{_MOST_INHERITED}. Join some of them."
        )
    text = files.read_text(path)
    if Path(path).suffix in (".yaml", ".yml"):
        try:
            stated = yaml.load(text, _Loader)  # of SafeLoader
            twice = None
        except _TwiceError as error:
            stated, twice = None, error.args
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # of odd scalars
            raise ConfigError(f"{path}: not YAML: {error}") from error
    else:
        try:
            stated = json.loads(text)
            twice = _twice_in_json(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}. A YAML config is named .yaml.") from error
    if twice is not None:
        key, line = twice
        raise ConfigError(f"{path}: line {line}: the key {key!r} is given a second time. Remove one of the two.")
    if not isinstance(stated, dict):
        raise ConfigError(f"{path}: expected sections {', '.join(SECTIONS)}; found a {type(stated).__name__}.")
    return inherit(path, os.path.dirname(path), stated, (*inheriting, path))


def _twice_in_json(text: str) -> tuple[str, int] | None:
    """The first key that stands twice in one object of `text`, which is JSON, and its line."""
    keys: list[set[str]] = []  # of the objects and arrays that are open
    for match in _JSON_PARTS.finditer(text):
        if match[0] in "{[":
            keys.append(set())
        elif match[0] in "}]":
            keys.pop()
        elif match[2] is not None:
            key = json.loads(match[1])
            if key in keys[-1]:
                return key, text.count("\n", 0, match.start()) + 1
            keys[-1].add(key)
    return None


def inherit(where: str, folder: str, stated: dict[str, Any], inheriting: tuple[str, ...]) -> dict[str, Any]:
    """What the config `where` in `folder` states, laid over what it inherits; its token paths are those of `folder`."""
    corpus = stated.get("corpus")
    if isinstance(corpus, Mapping):
        stated["corpus"] = _located(corpus, folder)
    if DATASET_DIR in stated:
        stated[DATASET_DIR] = _locate(stated[DATASET_DIR], folder)
    parent = stated.pop(INHERITS, None)
    if parent is None:
        return stated
    if not isinstance(parent, str):
        raise ConfigError(f"{where}: {INHERITS} is {parent!r}; expected the path of another config.")
    parent = files.normalize(parent)
    if not files.is_remote(parent):
        beside = f"{folder}/{parent}" if files.is_remote(folder) else os.path.normpath(os.path.join(folder, parent))
        here = os.path.abspath(parent)
        parent = here if not files.is_remote(folder) and not _is_there(beside) and _is_there(here) else beside
    return overlay(read(parent, inheriting), stated)


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` put over it, section by section; lists are replaced whole."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    sampler = top.get("sampler")
    if isinstance(sampler, Mapping) and isinstance(merged.get("sampler"), dict):
        for one, other in (("global_batch_size", "global_batch_tokens"), ("global_batch_tokens", "global_batch_size")):
            if one in sampler and other not in sampler:
                merged["sampler"].pop(other, None)  # the one replaces the other
    corpus = top.get("corpus")
    if isinstance(corpus, Mapping) and isinstance(merged.get("corpus"), dict):
        for one, other in (("path", "mixture"), ("mixture", "path")):
            if one in corpus and other not in corpus:
                merged["corpus"].pop(other, None)
    layout, below = top.get("layout"), base.get("layout")
    if (
        isinstance(layout, Mapping)
        and isinstance(below, Mapping)
        and layout.get("kind", below.get("kind")) != below.get("kind")
    ):
        dropped = set(below).difference(layout, ("kind", "sequence_length"))  # options of the kind that is replaced
        merged["layout"] = {key: value for key, value in merged["layout"].items() if key not in dropped}
    return merged


def _located(corpus: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A section with its token paths, and those of the sources of a mixture, as `_locate` finds them."""
    found = dict(corpus)
    for key in ("path", "label_mask_paths"):
        if key in corpus:
            path = corpus[key]
            found[key] = [_locate(item, folder) for item in path] if isinstance(path, list) else _locate(path, folder)
    if "root" in corpus:
        found["root"] = _locate(corpus["root"], folder)
    mixture = corpus.get("mixture")
    if isinstance(mixture, Mapping):
        found["mixture"] = {
            name: _located(source, folder) if isinstance(source, Mapping) else source
            for name, source in mixture.items()
        }
    return found


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
