"""What stands beside a corpus about it: our prepare.json, and the metadata files of the formats."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from grain_sft import files
from grain_sft.corpus.formats.tree import Tree
from grain_sft.errors import CorpusError, shortened

PREPARE = "prepare.json"


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is known of where a corpus comes from; None or empty where nothing is.

    Attributes:
      eos_token_id: the token that ends a document, as the format says, or else the tokenizer's.
      pad_token_id: of the tokenizer.
      tokenizer_sha256: hash of the tokenizer.
      source_names: paths of the inputs.
      path: of prepare.json; "" where there is none.
    """

    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tokenizer_sha256: str | None = None
    source_names: tuple[str, ...] = ()
    path: str = ""


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


def read_origin(root: str, tree: Tree) -> Origin:
    """What the prepare.json of `root` says; nothing where there is none.

    Raises:
      CorpusError: keys of the wrong type.
    """
    if PREPARE not in tree.names(root):
        return Origin()
    data = Json.load(files.join(root, PREPARE))
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
        tokenizer_sha256=tokenizer.text("sha256"),
        source_names=tuple(names),
        path=data.path,
    )
