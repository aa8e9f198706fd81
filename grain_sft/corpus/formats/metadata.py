"""Metadata of a corpus: the tokenizer and the ids that the JSON files in its folders state."""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeVar

import msgspec
from absl import logging

from grain_sft.errors import ConfigError, CorpusError, CorpusFileError, GrainSftError, RemoteTimeoutError
from grain_sft.options import check_value
from grain_sft.storage import MANY_THREADS, Count, files, in_threads

T = TypeVar("T")

PREPARE = "prepare.json"
"""Name of the file in a corpus's folder with the request, tokenizer and inputs of `grain-sft prepare`."""
SPLIT = "corpus.json"
"""Name of the file with a split's metadata, in the split's folder."""
TOKENIZER = "tokenizer"
"""Name of the folder with the files of a corpus's tokenizer, in the corpus's folder."""
SPLIT_FORMAT = "grain_sft corpus"
SPLIT_VERSION = 1
LABEL_MASKS = "label_masks"
"""Key in the metadata of format "olmo". False means that the corpus has no label masks, because all tokens take loss."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PART = re.compile(rf"train|val|shard_\d+|{TOKENIZER}")  # names of the folder of a split, of a shard or of the tokenizer
# A path in JSON. It may have the characters \udc80 to \udcff, which Python makes of bytes that are not UTF-8.
_PATH = re.compile(r'"(?:path|tokenizer)": "(?:[^"\\\ud800-\udc7f\udd00-\udfff]|\\.)*"')
_FILES = (".npy", ".bin", ".json", ".parquet")  # `_list` sends no request for a path of which a part has such an ending


@dataclasses.dataclass(frozen=True)
class CorpusMetadata:
    """Attributes of a `CorpusData` that metadata files state. An attribute that no file states is None or empty.

    Attributes:
      path: Path of the corpus.json or prepare.json that states the other attributes.
    """

    eos_token_id: Count | None = None
    pad_token_id: Count | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    source_names: tuple[str, ...] = ()
    path: str = ""

    def filled(self, **values: Any) -> Self:
        """Return a copy in which `values` replace attributes that are None."""
        unknown = {name: value for name, value in values.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **unknown)

    @classmethod
    def of(cls, data: "Json", advice: str = "It was edited or damaged.") -> Self:
        """Return the metadata in a JSON object whose keys are the names of these attributes. Errors end with `advice`."""
        return dataclasses.replace(data.convert(cls, advice), path=data.path)

    @property
    def of_split(self) -> bool:
        """Whether the metadata come from the split's own corpus.json, not from the prepare.json of the corpus."""
        return files.name_of(self.path) == SPLIT if self.path else False


class DirectoryListing:
    """Names of the files in local and remote folders, and JSON objects in these files.

    Each folder is listed once, and each JSON file is read once. If a folder can't be listed, it has no names.
    """

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}
        self._objects: dict[str, Json] = {}  # by path

    def names(self, folder: str) -> frozenset[str]:
        """Return the names of files and folders in `folder`. A timeout raises a RemoteTimeoutError."""
        if folder not in self._names:
            self._names[folder] = frozenset(_list(folder))
        return self._names[folder]

    def list_at_once(self, paths: Iterable[str]) -> None:
        """List the remote folders of the files `paths` in several threads, because each folder waits for a request."""
        folders = {files.parent(path) for path in paths if files.is_remote(path)}
        if len(folders) > 1:
            list(in_threads(self.names, folders, threads=MANY_THREADS))

    def find(self, folder: str, name: str) -> str:
        """Return the path of the file `name` in `folder`; "" if it does not exist."""
        return files.join(folder, name) if name in self.names(folder) else ""

    def read_json(self, folder: str, name: str) -> "Json":
        """Return the JSON object in the file `name` in `folder`; {} with the path "" if there is no such file of grain_sft."""
        path = self.find(folder, name)
        if path not in self._objects:
            head = files.read_range(path, 0, 1 << 20) if path and name == SPLIT else b""
            is_foreign = head and SPLIT_FORMAT.encode() not in head  # a corpus.json of another tool
            self._objects[path] = Json.load(path) if path and not is_foreign else Json("", {})
        return self._objects[path]

    def sidecars(self, path: str, *candidates: str) -> list[str]:
        """Return the names in `candidates` that exist in the folder of `path`.

        If the folder can't be listed, check each name by itself.
        """
        folder = files.parent(path)
        try:
            names = self.names(folder)
        except RemoteTimeoutError as error:
            raise RemoteTimeoutError(f"{path}: the folder of its sidecar files can't be listed. {error}") from error
        if files.name_of(path) in names:  # the folder could be listed
            return [name for name in candidates if name in names]
        if not files.exists(path):
            return []  # opening `path` reports that it is missing
        return [name for name in candidates if files.exists(files.join(folder, name))]

    def sidecar(self, path: str, name: str) -> str:
        """Return the path of the file `name` in the folder of the file `path`; "" if it does not exist."""
        return files.join(files.parent(path), name) if self.sidecars(path, name) else ""


def _list(folder: str) -> list[str]:
    """Return the names in a folder; [] if it can't be listed. Opening a file in the folder then raises an error."""
    try:
        if not files.is_remote(folder):
            return os.listdir(folder)
        if any(part.endswith(_FILES) for part in folder.split("/")):
            return []
        with files.remote(folder) as client:
            return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in client.ls(folder, detail=False)]
    except RemoteTimeoutError:
        raise
    except (OSError, ValueError):  # a CorpusFileError is an OSError
        return []


def is_visible(path: str) -> bool:
    """Return whether a file exists; False if a request for it is refused. A timeout raises a RemoteTimeoutError."""
    try:
        return files.exists(path)
    except RemoteTimeoutError:
        raise
    except CorpusFileError:
        return False


class Json:
    """A JSON object in a file."""

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @classmethod
    def load(cls, path: str, advice: str = "") -> Self:
        """Return the JSON object in the file `path`. If the file holds none, raise a CorpusError that ends with `advice`."""
        text = files.read_text(path)
        try:
            data = json.loads(text)
            if "\\u" in text:
                # `encode` raises a ValueError for half of a surrogate pair. Only paths may contain halves, so `sub` removes the
                # paths first.
                _PATH.sub("", json.dumps(data, ensure_ascii=False)).encode()
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path}: not JSON that can be read ({error}).{advice}") from error
        if not isinstance(data, dict):
            raise CorpusError(f"{path}: expected a JSON object, found a {type(data).__name__}.{advice}")
        return cls(path, data)

    def get(self, key: str, kind: Any = Any) -> Any:
        """Return the value of `key`; None if it is missing. Raise a CorpusError if it is not of type `kind`."""
        value = self.data.get(key)
        try:
            if value is not None:
                check_value(value, kind, f"{self.path}: {key}")
        except ConfigError as error:
            raise CorpusError(str(error)) from error
        return value

    def count(self, key: str) -> int | None:
        """Return the integer at `key`, 0 or more; None if the key is missing."""
        count: int | None = self.get(key, Count)
        return count

    def object(self, key: str) -> "Json":
        """Return the object at `key`; {} if the key is missing."""
        return Json(f"{self.path}: {key}", self.get(key, dict) or {})

    def convert(self, kind: type[T], advice: str = "It was edited or damaged.") -> T:
        """Return the object as a `kind`, a dataclass or msgspec Struct. Unknown keys are ignored. Errors end with `advice`."""
        try:
            return msgspec.convert(self.data, kind)
        except (msgspec.ValidationError, OverflowError) as error:
            raise CorpusError(f"{self.path}: {error}. {advice}") from error


def read_metadata(folders: Iterable[str], listing: DirectoryListing) -> CorpusMetadata:
    """Return the metadata in the first of `folders` that has a corpus.json or a prepare.json."""
    for folder in folders:
        data = listing.read_json(folder, SPLIT)
        if data.get("format") == SPLIT_FORMAT:
            return parse_metadata(data)
        prepare = listing.read_json(folder, PREPARE)
        if prepare.path:
            return _parse_prepare(prepare)
    return CorpusMetadata()


def prepare_manifest(shard: str) -> str | None:
    """Return the path of the prepare.json of a shard's corpus; None if the corpus has none.

    The search goes upwards from the shard's folder to the first folder that is not named like a split or shard: DIR for
    DIR/train/shard_00000/tokens.bin.
    """
    return next(filter(files.exists, (files.join(folder, PREPARE) for folder in folders_above(shard))), None)


def folders_above(path: str) -> Iterator[str]:
    """Yield the folder of a file, and those above it up to the first that is not named like a split, shard or tokenizer."""
    folder = files.parent(path)
    while _PART.fullmatch(files.name_of(folder)):
        yield folder
        folder = files.parent(folder)
    yield folder


def folders_of_split(home: str) -> list[str]:
    """Return the folders that may have metadata of the split in folder `home`. For DIR/train, these are DIR/train and DIR."""
    return [home, files.parent(home)] if files.name_of(home) in ("train", "val") else [home]


def parse_metadata(data: Json) -> CorpusMetadata:
    """Return the metadata in a corpus.json."""
    if data.get("version") != SPLIT_VERSION:
        raise CorpusError(f"{data.path}: version {data.get('version')!r}; expected {SPLIT_VERSION}. Update grain_sft.")
    return CorpusMetadata.of(data)


class _Input(msgspec.Struct):
    path: str


class _Inputs(msgspec.Struct):
    inputs: list[_Input] = []


def _parse_prepare(data: Json) -> CorpusMetadata:
    """Return the metadata in a prepare.json."""
    tokenizer = data.object("tokenizer")
    eos, pad, sha256 = tokenizer.count("eos_token_id"), tokenizer.count("pad_token_id"), tokenizer.get("sha256", str)
    name = data.object("request").get("tokenizer", str) or None
    inputs = tuple(entry.path for entry in data.convert(_Inputs).inputs)
    return CorpusMetadata(eos, pad, name, sha256, source_names=inputs, path=data.path)


def split_metadata(*, format: str, split: str, **metadata: Any) -> dict[str, Any]:
    """Return the content of a split's corpus.json."""
    return {"format": SPLIT_FORMAT, "version": SPLIT_VERSION, "corpus_format": format, "split": split, **metadata}


def warn_unknown(folder: str, lacks: str, metadata: CorpusMetadata, eos_token_id: int | None) -> None:
    """Warn if the EOS id and the tokenizer of a split are unknown. `lacks` names the missing metadata files."""
    if metadata.eos_token_id is None and metadata.tokenizer_sha256 is None and eos_token_id is None:
        lacks = f"ids in {metadata.path}" if metadata.path else lacks
        problem = f"{folder}: lacks {lacks}, so its tokenizer and the id of the token that ends a document are unknown"
        effect = f"rows are padded with token {metadata.pad_token_id or 0}"
        fix = "Copy such a file from the original corpus, or give eos_token_id"
        logging.warning("%s; %s. %s.", problem, effect, fix)


def fill_ids(metadata: CorpusMetadata, folder: str, listing: DirectoryListing) -> CorpusMetadata:
    """Return `metadata`, with unknown EOS and padding ids taken from the JSON files in `folder`/tokenizer.

    If one of these files can't be read, all are ignored. But a timeout raises an error: otherwise, hosts might have different
    ids.
    """
    tokenizer_folder = listing.find(folder, TOKENIZER)
    if not tokenizer_folder:
        return metadata
    texts: dict[str, str] = {}  # such as {"eos_token_id": "</s>"}
    ids: dict[str, Any] = {}  # such as {"</s>": 2}
    try:
        for name in _TOKENIZER_FILES:
            data = listing.read_json(tokenizer_folder, name)
            ids |= {entry["content"]: entry["id"] for entry in data.get("added_tokens", list) or []}
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
    token_ids = {name: ids.get(text) for name, text in texts.items()}
    valid = {name: value for name, value in token_ids.items() if type(value) is int and value >= 0}
    return metadata.filled(**valid)
