"""Metadata of a corpus: corpus.json of a split, prepare.json of the whole, and reading such files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from absl import logging

from grain_sft.corpus.formats.tree import Tree
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import files

PREPARE = "prepare.json"
SPLIT = "corpus.json"
"""In each split's folder, so that a split that is copied alone keeps its tokenizer and ids."""
SPLIT_FORMAT = "grain_sft corpus"
SPLIT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is known of where a corpus comes from; None or empty where nothing is.

    Attributes:
      eos_token_id: the token that ends a document, as the format says, or else the tokenizer's.
      pad_token_id: of the tokenizer.
      tokenizer: name of the tokenizer: the path or name that was given when the corpus was made.
      tokenizer_sha256: hash of the tokenizer.
      source_names: paths of the inputs.
      path: of corpus.json or prepare.json; "" where there is none.
    """

    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    source_names: tuple[str, ...] = ()
    path: str = ""

    def filled(self, **values: Any) -> Origin:
        """Return a copy that has `values` where this has none."""
        return dataclasses.replace(
            self, **{name: value for name, value in values.items() if getattr(self, name) is None}
        )


class Json:
    """A JSON object in a file, its values read by key and checked."""

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path = path
        self._data = data

    @classmethod
    def load(cls, path: str) -> Json:
        """The object in the file `path`.

        Raises:
          CorpusFileError: missing or unreadable.
          CorpusError: not a JSON object.
        """
        try:
            data = json.loads(files.read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise CorpusError(f"{path}: not JSON ({error}).") from error
        except ValueError as error:  # integers of thousands of digits
            raise CorpusError(f"{path}: not JSON that can be read ({error}).") from error
        if not isinstance(data, dict):
            raise CorpusError(f"{path}: expected a JSON object, found a {type(data).__name__}.")
        return cls(path, data)

    def get(self, key: str) -> Any:
        """The value of `key` as it is; None where there is none."""
        return self._data.get(key)

    def entries(self) -> list[tuple[str, Any]]:
        """Every key and its value."""
        return list(self._data.items())

    def text(self, key: str) -> str | None:
        """A string."""
        value: str | None = self._checked(key, str, "a string")
        return value

    def count(self, key: str) -> int | None:
        """An integer, 0 or more."""
        value: int | None = self._checked(key, int, "an integer, 0 or more")
        if value is not None and not 0 <= value < 1 << 63:
            raise CorpusError(f"{self.path}: {key} is {value!r}; expected an integer, 0 or more.")
        return value

    def object(self, key: str) -> Json:
        """An object; an empty one where there is none."""
        return Json(f"{self.path}: {key}", self._checked(key, dict, "an object") or {})

    def items(self, key: str) -> list[Any]:
        """A list; an empty one where there is none."""
        return self._checked(key, list, "a list") or []

    def _checked(self, key: str, kind: type, expected: str) -> Any:
        value = self._data.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CorpusError(f"{self.path}: {key} is {shortened(repr(value))}; expected {expected}.")
        return value


def read_origin(folders: Iterable[str], tree: Tree) -> Origin:
    """Return what the first corpus.json or prepare.json in `folders` says; nothing where there is none.

    Args:
      folders: the split's folder, then that of the corpus.

    Raises:
      CorpusError: keys of the wrong type.
    """
    for folder in folders:
        names = tree.names(folder)
        if SPLIT in names:
            data = Json.load(files.join(folder, SPLIT))
            if data.get("format") == SPLIT_FORMAT:  # another tool may have a file of that name
                return origin_of(data)
        if PREPARE in names:
            return _prepared(Json.load(files.join(folder, PREPARE)))
    return Origin()


def origin_of(data: Json) -> Origin:
    """Return the origin that a split's metadata state.

    Raises:
      CorpusError: keys of the wrong type, or metadata of a later version.
    """
    if data.get("version") != SPLIT_VERSION:
        raise CorpusError(
            f"{data.path}: version {data.get('version')!r}; this grain_sft reads version {SPLIT_VERSION}. Update grain_sft."
        )
    names = data.items("source_names")
    if not all(isinstance(name, str) for name in names):
        raise CorpusError(f"{data.path}: source_names is {shortened(repr(names))}; expected a list of strings.")
    return Origin(
        eos_token_id=data.count("eos_token_id"),
        pad_token_id=data.count("pad_token_id"),
        tokenizer=data.text("tokenizer"),
        tokenizer_sha256=data.text("tokenizer_sha256"),
        source_names=tuple(names),
        path=data.path,
    )


def split_metadata(
    *,
    format: str,
    split: str,
    eos_token_id: int | None,
    pad_token_id: int | None,
    tokenizer: str | None,
    tokenizer_sha256: str | None,
    vocab_size: int | None,
    source_names: Sequence[str],
) -> dict[str, Any]:
    """Return the content of a split's corpus.json."""
    return {
        "format": SPLIT_FORMAT,
        "version": SPLIT_VERSION,
        "corpus_format": format,
        "split": split,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "tokenizer": tokenizer,
        "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": vocab_size,
        "source_names": list(source_names),
    }


def _prepared(data: Json) -> Origin:
    tokenizer = data.object("tokenizer")
    names = []
    for number, entry in enumerate(data.items("inputs")):
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise CorpusError(
                f"{data.path}: inputs[{number}] is {shortened(repr(entry))}; expected an object with a path."
            )
        names.append(entry["path"])
    return Origin(
        eos_token_id=tokenizer.count("eos_token_id"),
        pad_token_id=tokenizer.count("pad_token_id"),
        tokenizer=data.object("request").text("tokenizer") or None,
        tokenizer_sha256=tokenizer.text("sha256"),
        source_names=tuple(names),
        path=data.path,
    )


def warn_unknown(folder: str, lacks: str, origin: Origin, eos_token_id: int | None) -> None:
    """Warn where a split was copied without the metadata that its format keeps in the folder above.

    Args:
      folder: of the split.
      lacks: names of the files that would hold the ids.
      origin: what was found.
      eos_token_id: what the caller gave.
    """
    if origin.eos_token_id is None and origin.tokenizer_sha256 is None and eos_token_id is None:
        logging.warning(
            "%s: lacks %s, so its tokenizer, its padding id and the id of the token that ends a document are not known; "
            "rows are padded with token 0. Copy one of these files from the corpus, or give eos_token_id.",
            folder,
            lacks,
        )
