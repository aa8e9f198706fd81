"""Metadata of a corpus: the tokenizer and ids that its JSON files state, and how these files are found and read."""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from typing import Any, Self, TypeVar

import msgspec
from absl import logging

from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError, RemoteTimeoutError, shortened
from grain_sft.storage import Count, files

T = TypeVar("T")

PREPARE = "prepare.json"
SPLIT = "corpus.json"
"""In each split's folder, so that a split that is copied alone keeps its tokenizer and ids."""
SPLIT_FORMAT = "grain_sft corpus"
SPLIT_VERSION = 1
LABEL_MASKS = "label_masks"
"""Key of metadata. False means that no part has a label mask, because all tokens take loss."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PART = re.compile(r"train|val|shard_\d+")  # a folder of a split or of a shard
# endings of names that are not folders: a path that has one is not listed, since listing in a bucket takes requests
_FILES = (".npy", ".bin", ".json", ".parquet")


@dataclasses.dataclass(frozen=True)
class CorpusMetadata:
    """Facts in the metadata of a corpus; None or empty where the metadata have none.

    Attributes:
      eos_token_id: Token that ends a document, by the format or else by the tokenizer.
      pad_token_id: Padding token of the tokenizer.
      tokenizer: Name of the tokenizer: the path or name that was given when the corpus was made.
      tokenizer_sha256: Hash of the tokenizer's files.
      source_names: Paths of the inputs.
      path: Path of corpus.json or prepare.json.
    """

    eos_token_id: Count | None = None
    pad_token_id: Count | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    source_names: tuple[str, ...] = ()
    path: str = ""

    def filled(self, **values: Any) -> Self:
        """Return a copy with `values` where this has None."""
        missing = {name: value for name, value in values.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)

    @classmethod
    def of(cls, data: "Json", advice: str = "It was edited or damaged.") -> Self:
        """Return the metadata that a JSON object states under the names of these attributes."""
        return dataclasses.replace(data.convert(cls, advice), path=data.path)

    @property
    def of_split(self) -> bool:
        """Whether these facts come from the split's own corpus.json."""
        return files.name_of(self.path) == SPLIT if self.path else False


class DirectoryListing:
    """Names in local or remote folders, each listed once. A path that can't be listed has no names."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}

    def names(self, folder: str) -> frozenset[str]:
        """Return the names of files and folders in `folder`."""
        if folder not in self._names:
            self._names[folder] = frozenset(_list(folder))
        return self._names[folder]

    def find(self, folder: str, name: str) -> str:
        """Return the path of `name` in `folder`; "" where it is not."""
        return files.join(folder, name) if name in self.names(folder) else ""

    def sidecars(self, path: str, *candidates: str) -> list[str]:
        """Return which of the names `candidates` exist in the folder of the file `path`, even if the folder can't be listed."""
        folder = files.parent(path)
        try:
            names = self.names(folder)
        except RemoteTimeoutError as error:
            raise RemoteTimeoutError(f"{path}: the folder of its sidecar files can't be listed. {error}") from error
        if files.name_of(path) in names:
            return [name for name in candidates if name in names]
        if not files.exists(path):
            return []  # opening `path` reports that it is missing
        return [name for name in candidates if files.exists(files.join(folder, name))]

    def sidecar(self, path: str, name: str) -> str:
        """Return the path of the sidecar file `name` of the file `path`; "" where there is none."""
        return files.join(files.parent(path), name) if self.sidecars(path, name) else ""


def _list(folder: str) -> list[str]:
    if files.is_remote(folder):
        if any(part.endswith(_FILES) for part in folder.split("/")):
            return []
        try:
            with files.remote(folder) as client:
                return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in client.ls(folder, detail=False)]
        except RemoteTimeoutError:
            raise
        except CorpusFileError:
            return []  # opening a file in it reports why
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


class Json:
    """A JSON object in a file, whose values are read by key and checked. Keys that are missing have the value None."""

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @classmethod
    def load(cls, path: str, advice: str = "") -> Self:
        """Return the object in the file `path`. If it holds none, raise a CorpusError whose message ends in `advice`."""
        text = files.read_text(path)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path}: not JSON that can be read ({error}).{advice}") from error
        if not isinstance(data, dict):
            raise CorpusError(f"{path}: expected a JSON object, found a {type(data).__name__}.{advice}")
        return cls(path, data)

    def get(self, key: str) -> Any:
        """Return the unchecked value of `key`."""
        return self.data.get(key)

    def convert(self, kind: type[T], advice: str = "It was edited or damaged.") -> T:
        """Return the object as a dataclass or a msgspec Struct; further keys are ignored."""
        try:
            return msgspec.convert(self.data, kind)
        except (msgspec.ValidationError, OverflowError) as error:
            raise CorpusError(f"{self.path}: {error}. {advice}") from error

    def text(self, key: str) -> str | None:
        """Return the string of `key`. This and the methods below raise CorpusError for another type."""
        return self._checked(key, str, "a string")

    def count(self, key: str) -> int | None:
        """Return the integer, 0 or more, of `key`."""
        return self._checked(key, int, "an integer, 0 or more")

    def object(self, key: str) -> "Json":
        """Return the object of `key`, or an empty one."""
        return Json(f"{self.path}: {key}", self._checked(key, dict, "an object") or {})

    def items(self, key: str) -> list[Any]:
        """Return the list of `key`, or an empty one."""
        return self._checked(key, list, "a list") or []

    def _checked(self, key: str, kind: type[T], expected: str) -> T | None:
        value: T | None = self.data.get(key)
        in_range = not isinstance(value, int) or 0 <= value < 1 << 63
        if value is None or (type(value) is kind and in_range):
            return value
        raise CorpusError(f"{self.path}: {key} is {shortened(repr(value))}; expected {expected}.")


def read_metadata(folders: Iterable[str], listing: DirectoryListing) -> CorpusMetadata:
    """Return the metadata of the first corpus.json or prepare.json in `folders`, the split's and then that of the corpus."""
    for folder in folders:
        if path := listing.find(folder, SPLIT):
            data = Json.load(path)
            if data.get("format") == SPLIT_FORMAT:  # another tool may have a file of that name
                return parse_metadata(data)
        if path := listing.find(folder, PREPARE):
            return _parse_prepare(Json.load(path))
    return CorpusMetadata()


def prepare_manifest(shard: str) -> str | None:
    """Return the path of the prepare.json of a shard's corpus; None if it has none.

    The search goes up only from folders of a split or of a shard: what is above other folders is another corpus.
    """
    folder = files.parent(shard)
    while not files.exists(path := files.join(folder, PREPARE)):
        if not _PART.fullmatch(files.name_of(folder)):
            return None
        folder = files.parent(folder)
    return path


def folders_of_split(home: str) -> list[str]:
    """Return the folders whose metadata are those of a split: its own and, if that is train/ or val/, the corpus's."""
    return [home, files.parent(home)] if files.name_of(home) in ("train", "val") else [home]


def parse_metadata(data: Json) -> CorpusMetadata:
    """Return the metadata of a split's corpus.json."""
    if data.get("version") != SPLIT_VERSION:
        raise CorpusError(
            f"{data.path}: version {data.get('version')!r}; this grain_sft reads version {SPLIT_VERSION}. Update grain_sft."
        )
    return CorpusMetadata.of(data)


class _Input(msgspec.Struct):
    path: str


class _Inputs(msgspec.Struct):
    inputs: list[_Input] = []


def _parse_prepare(data: Json) -> CorpusMetadata:
    tokenizer, stated = data.object("tokenizer"), data.convert(_Inputs)
    return CorpusMetadata(
        eos_token_id=tokenizer.count("eos_token_id"),
        pad_token_id=tokenizer.count("pad_token_id"),
        tokenizer=data.object("request").text("tokenizer") or None,
        tokenizer_sha256=tokenizer.text("sha256"),
        source_names=tuple(entry.path for entry in stated.inputs),
        path=data.path,
    )


def split_metadata(*, format: str, split: str, **metadata: Any) -> dict[str, Any]:
    """Return the content of a split's corpus.json; `metadata` are fields of `CorpusMetadata`, and `vocab_size`."""
    return {"format": SPLIT_FORMAT, "version": SPLIT_VERSION, "corpus_format": format, "split": split, **metadata}


def warn_unknown(folder: str, lacks: str, metadata: CorpusMetadata, eos_token_id: int | None) -> None:
    """Warn if neither `metadata` nor the caller's `eos_token_id` states the ids of a split, as in a copy without the metadata
    files that `lacks` names."""
    if metadata.eos_token_id is None and metadata.tokenizer_sha256 is None and eos_token_id is None:
        logging.warning(
            "%s: lacks %s, so its tokenizer, its padding id and the id of the token that ends a document are not known; "
            "rows are padded with token 0. Copy a file that states them from the corpus, or give eos_token_id.",
            folder,
            f"ids in {metadata.path}" if metadata.path else lacks,
        )


def fill_ids(metadata: CorpusMetadata, folder: str, listing: DirectoryListing) -> CorpusMetadata:
    """Return `metadata` with the EOS and padding ids in the JSON files of `folder`/tokenizer. No tokenizer is loaded.

    They are a guess: a tokenizer whose files don't parse adds nothing. A timeout is an error, since hosts would differ.
    """
    folder = listing.find(folder, "tokenizer")
    texts: dict[str, str] = {}
    ids: dict[str, Any] = {}
    try:
        for path in filter(None, (listing.find(folder, name) for name in _TOKENIZER_FILES if folder)):
            data = Json.load(path)
            ids |= {entry["content"]: entry["id"] for entry in data.items("added_tokens")}
            ids |= {entry["content"]: int(key) for key, entry in data.object("added_tokens_decoder").data.items()}
            for key in ("eos_token", "pad_token"):
                token = data.get(key)
                text = token.get("content") if isinstance(token, dict) else token
                if isinstance(text, str):
                    texts.setdefault(f"{key}_id", text)
    except RemoteTimeoutError:
        raise
    except (GrainSftError, KeyError, TypeError, ValueError):
        return metadata
    found = {key: ids.get(text) for key, text in texts.items()}
    return metadata.filled(**{key: number for key, number in found.items() if type(number) is int and number >= 0})
