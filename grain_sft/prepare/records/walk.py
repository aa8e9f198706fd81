"""The files that an input names: a file, a glob, or a folder with all that is below it."""

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from grain_sft.errors import CorpusFileError
from grain_sft.storage import files

_COMPRESSED = r"(\.gz|\.zst)?$"
_RECORDS = re.compile(rf"\.(jsonl|ndjson|json){_COMPRESSED}|\.(parquet|arrow|feather)$")
_ARRAY_RECORD = re.compile(r"\.array_?record(-[0-9]+-of-[0-9]+)?$")
_TEXT = re.compile(rf"\.(txt|md){_COMPRESSED}")
_DATASET_INFO = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # of Hugging Face and TensorFlow
_BESIDE_INFO = ("state.json", "features.json")  # likewise, in the folder of a dataset_info.json
_PREPARED = "prepare.json"  # in the folder of a prepared corpus
_REJECTED = ".rejected.jsonl"  # next to that folder, after its name
_SPLITS = {  # of the files in a folder of this name, and of a file whose name begins with this word
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
}

Folders = tuple[str, ...]


def is_text(path: str) -> bool:
    """Return whether a path has the name of a text, which is one document: .txt or .md, perhaps compressed."""
    return _TEXT.search(path) is not None


def is_array_record(path: str) -> bool:
    """Return whether a path has the name of an ArrayRecord."""
    return _ARRAY_RECORD.search(path) is not None


def expand(path: str) -> Sequence[str]:
    """Return the files that a path, a glob or a folder names, sorted.

    A folder means the files of records below it or, if there are none, its texts. Folders whose names begin with a point or an
    underscore, prepared corpora with their rejected records, and a dataset's files without data are left out.

    Raises:
      CorpusFileError: There is no such file, or a folder has several splits of a dataset, or the same folder twice.
    """
    path = files.normalize(path)
    found: Sequence[str] = [path]
    problem = "names no file"
    if glob.has_magic(path) and (files.is_remote(path) or not os.path.exists(path)):
        found = files.glob(path)
    elif files.is_folder(path):
        found = _files_of(path)
    elif not files.is_remote(path) and not os.path.exists(path):
        found, problem = [], "no such file"
    if not found:
        raise CorpusFileError(
            f"{path}: {problem}. Expected .jsonl, .json, .parquet, .arrow, .array_record, .txt or .md files, a glob, or "
            "a folder of them."
        )
    return found


def _files_of(folder: str) -> Sequence[str]:
    """Return the files that a folder means as an input."""
    below = dict(_remote(folder) if files.is_remote(folder) else _local(Path(folder), (), frozenset()))
    made = {folders for name, folders in below.items() if folders and files.name_of(name) == _PREPARED}

    def is_made(name: str) -> bool:
        parts = (*below[name], files.name_of(name).removesuffix(_REJECTED))
        return any(parts[:depth] in made for depth in range(1, len(parts) + 1))

    names = sorted(name for name in below if not is_made(name))
    found = _files_with_data([name for name in names if _RECORDS.search(name) or is_array_record(name)])
    found = found or [name for name in names if is_text(name)]
    if not files.is_remote(folder):
        files.check_distinct(dict.fromkeys(map(files.parent, found)))
    splits: dict[str, str] = {}  # a file of each
    for name in found:
        for part in (*below[name], re.split("[-_.]", files.name_of(name))[0]):
            splits.setdefault(_SPLITS.get(part.lower(), ""), name)
    splits.pop("", None)
    if len(splits) > 1:
        raise CorpusFileError(
            f"{folder}: has files of the splits {' and '.join(splits)}: {', '.join(splits.values())}. Expected one of them. "
            "Name its folder, or its files."
        )
    return found


def _remote(folder: str) -> Iterator[tuple[str, Folders]]:
    """Yield each file below a remote folder, and the names of the folders between them."""
    with files.remote(folder) as client:
        path = str(client.info(folder)["name"]).strip("/")  # names may have another protocol: gs for gcs
        for name in client.find(folder):
            folders = tuple(name.strip("/")[len(path) + 1 :].split("/")[:-1])
            if not any(map(_is_hidden, folders)):
                yield str(client.unstrip_protocol(name)), folders


def _local(folder: Path, folders: Folders, above: frozenset[str]) -> Iterator[tuple[str, Folders]]:
    """Yield the same for a local folder. `above` has the real paths of the folders that it is in."""
    here = os.path.realpath(folder)
    if here in above:
        raise CorpusFileError(f"{folder}: is a link to a folder that it is in. Remove the link, or name the files.")
    with files.reading(str(folder)):
        entries = list(folder.iterdir())
    for entry in entries:
        if not entry.is_dir():
            yield str(entry), folders
        elif not _is_hidden(entry.name):
            yield from _local(entry, (*folders, entry.name), above | {here})


def _is_hidden(name: str) -> bool:
    """Return whether a folder of this name is left out, as by the readers of Arrow and Spark."""
    return name.startswith((".", "_"))


def _files_with_data(names: Sequence[str]) -> list[str]:
    """Return those of `names` that hold data."""
    by_folder: dict[str, set[str]] = {}
    for name in names:
        by_folder.setdefault(files.parent(name), set()).add(files.name_of(name))
    data = {folder: _names_with_data(folder, own) for folder, own in by_folder.items()}
    return [name for name in names if files.name_of(name) in data[files.parent(name)]]


def _names_with_data(folder: str, names: set[str]) -> set[str]:
    """Return those of the `names` in one folder that hold data. A saved dataset names its own files."""
    if "dataset_dict.json" in names:
        splits = _names(folder, "dataset_dict.json", "splits")
        example = files.join(folder, *splits[:1])
        raise CorpusFileError(
            f"{folder}: is a dataset with the splits {', '.join(splits)}. Name one of them: {example}"
        )
    if "dataset_info.json" not in names:
        return names.difference(_DATASET_INFO)
    data = names.difference(_DATASET_INFO, _BESIDE_INFO)
    if "state.json" in names:  # written by save_to_disk; other files are caches of a dataset that was loaded from here
        if _names(folder, "state.json", "_indices_data_files", "filename"):
            raise CorpusFileError(
                f"{folder}: its rows are chosen by an index. Load it and save it again with save_to_disk."
            )
        named = _names(folder, "state.json", "_data_files", "filename")
        if missing := sorted(set(named) - data):
            raise CorpusFileError(
                f"{files.join(folder, missing[0])}: is missing, but state.json names it. Copy it again."
            )
        return set(named)
    splits = _names(folder, "dataset_info.json", "splits")
    if len(splits) > 1 and data:
        pattern = files.join(folder, f"*{splits[0]}*")
        raise CorpusFileError(
            f"{folder}: has the splits {', '.join(splits)} of a dataset. Name the files of one: '{pattern}'"
        )
    return {name for name in data if not name.startswith("cache-")}


def _names(folder: str, name: str, key: str, name_key: str = "name") -> list[str]:
    """Return the names that a JSON file lists under `key`: texts, keys, or the values of `name_key`; [] if it has none."""
    path = files.join(folder, name)
    try:
        listed = json.loads(files.read_text(path)).get(key) or ()
        return [str(each[name_key]) if isinstance(each, dict) else str(each) for each in listed]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CorpusFileError(f"{path}: is not what a dataset has there ({error}). Copy the dataset again.") from error
