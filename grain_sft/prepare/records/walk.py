"""Expansion of an input of `grain-sft prepare` to paths of files. An input is a file, a glob or a folder."""

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grain_sft.errors import CorpusFileError
from grain_sft.storage import files

_COMPRESSION = r"\.(?i:gz|zst|bz2|xz)"  # `decompression` refuses the last two
_RECORDS = re.compile(rf"\.(jsonl|ndjson|json)({_COMPRESSION})?$|\.(parquet|arrow|feather)$", re.IGNORECASE)
ARRAY_RECORD_NAME = re.compile(r"\.array_?record(-[0-9]+-of-[0-9]+)?$")
TEXT_NAME = re.compile(rf"\.(txt|md)({_COMPRESSION})?$", re.IGNORECASE)  # a text is one document
_DATASET_INFO = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # metadata of Hugging Face datasets
_BESIDE_INFO = ("state.json", "features.json")  # metadata, but only in a folder that also has dataset_info.json
_PREPARED = "prepare.json"  # a folder with this file is a prepared corpus
_REJECTED = ".rejected.jsonl"  # `chats.rejected.jsonl` has the rejected records of the prepared corpus `chats`
_SPLITS = {
    "train": "train", "training": "train",
    "test": "test", "testing": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation", "eval": "validation",
}  # fmt: skip
"""Split by a word in the name of a folder or a file, as in `partial-train` or `c4-validation.00000.json.gz`."""

Folders = tuple[str, ...]  # folders between an input folder and a file: ("a", "b") for INPUT/a/b/file


def expand(path: str) -> list[str]:
    """Return the files that a path, a glob or a folder names, sorted.

    A folder names the files of records below it. If it has none, it names the texts below it. A glob leaves out the rejected
    records of prepared corpora. A folder leaves out

    - folders whose names begin with a dot or an underscore;
    - prepared corpora and their rejected records;
    - metadata and caches of datasets, and metadata of macOS (`._NAME`).

    Raises:
      CorpusFileError: No file has this name, two paths lead to the same folder, or a folder has several splits, a file with
        and without compression, a Delta table, or a damaged dataset.
    """
    path = files.normalize(path)
    paths, problem = [path], "names no file"
    if glob.has_magic(path) and not files.exists(path):
        paths = [match for match in files.glob(path) if not _is_rejected(match)]
    elif files.is_folder(path):
        paths = _files_below(path)
    elif not files.is_remote(path) and not os.path.exists(path):
        paths, problem = [], "no such file"
    if not paths:
        expected = ".jsonl, .json, .parquet, .arrow, .array_record, .txt or .md files, a glob, or a folder of them"
        raise CorpusFileError(f"{path}: {problem}. Expected {expected}. Fix the path.")
    return paths


def _is_rejected(path: str) -> bool:
    """Return whether a file has the rejected records of a prepared corpus next to it."""
    return path.endswith(_REJECTED) and files.exists(files.join(path.removesuffix(_REJECTED), _PREPARED))


def _files_below(folder: str) -> list[str]:
    """Return the files that a folder names, sorted. See `expand`."""
    folders_of = dict(_remote_files(folder) if files.is_remote(folder) else _local_files(Path(folder), (), frozenset()))
    # folders of the prepared corpora
    prepared = {folders for path, folders in folders_of.items() if files.name_of(path) == _PREPARED}
    if () in prepared:  # `prepare.json` is in the input folder itself
        raise CorpusFileError(f"{folder}: is a prepared corpus. Name the files or folders that it was prepared from.")

    def is_prepared(path: str) -> bool:
        """Return whether a file belongs to a prepared corpus, as a/b/FILE and a/b.rejected.jsonl belong to the corpus a/b."""
        parts = (*folders_of[path], files.name_of(path).removesuffix(_REJECTED))
        return any(parts[:depth] in prepared for depth in range(1, len(parts) + 1))

    # in an archive made on macOS, `._x.jsonl` has metadata of `x.jsonl`
    candidates = sorted(path for path in folders_of if not is_prepared(path) and not files.name_of(path).startswith("._"))
    records = [path for path in candidates if _RECORDS.search(path) or ARRAY_RECORD_NAME.search(path)]
    paths = _files_with_data(records) or [path for path in candidates if TEXT_NAME.search(path)]
    if twice := [path for path in paths if re.search(f"{_COMPRESSION}$", path) and path.rpartition(".")[0] in folders_of]:
        problem = f"{twice[0]}: is next to the same file without compression, so its records would be read twice"
        raise CorpusFileError(f"{problem}. Remove one of the two, or name the files.")
    if not files.is_remote(folder):
        files.check_distinct(dict.fromkeys(map(files.parent, paths)))
    _check_one_split(folder, {path: folders_of[path] for path in paths})
    return paths


def _check_one_split(folder: str, folders_of: Mapping[str, Folders]) -> None:
    """Refuse files of several splits. `folders_of` has the folders above each file, by the path of the file."""
    examples: dict[str, str] = {}
    for path, folders in folders_of.items():
        for word in re.split("[-_. ]", "-".join((*folders, files.name_of(path)))):
            if split := _SPLITS.get(word.lower()):
                examples.setdefault(split, path)
    if len(examples) > 1:
        problem = f"{folder}: has files of the splits {' and '.join(examples)}: {', '.join(examples.values())}"
        raise CorpusFileError(f"{problem}. Expected one split. Name the folder or the files of one split.")


def _remote_files(folder: str) -> Iterator[tuple[str, Folders]]:
    """Yield the path and the folders of each file below a remote folder."""
    with files.remote(folder) as client:
        path = str(client.info(folder)["name"]).strip("/")  # without gs:// or gcs://, as `find` returns paths
        for name in client.find(folder):
            folders = tuple(name.strip("/")[len(path) + 1 :].split("/")[:-1])
            if not any(_is_left_out(name, folder) for name in folders):
                yield str(client.unstrip_protocol(name)), folders


def _local_files(folder: Path, folders: Folders, above: frozenset[str]) -> Iterator[tuple[str, Folders]]:
    """Yield the path and the folders of each file below a local folder.

    `folders` leads from the input folder to `folder`. `above` has the real paths of the folders above `folder`. A link to one
    of them is refused, because it would make the search endless.
    """
    real_path = os.path.realpath(folder)
    if real_path in above:
        raise CorpusFileError(f"{folder}: is a link to a folder above it. Remove the link, or name the files.")
    with files.reading(str(folder)):
        entries = [(entry, entry.is_dir()) for entry in folder.iterdir()]
    for entry, is_folder in entries:
        if not is_folder:
            yield str(entry), folders
        elif not _is_left_out(entry.name, folder):
            yield from _local_files(entry, (*folders, entry.name), above | {real_path})


def _is_left_out(name: str, folder: str | Path) -> bool:
    """Return whether the subfolder `name` of `folder` is left out. Refuse the log of a Delta table, which is not read."""
    if name == "_delta_log":
        raise CorpusFileError(f"{folder}: is a Delta table, which may have files of old versions. Write new Parquet files.")
    return name.startswith((".", "_"))  # as in Arrow and Spark


def _files_with_data(paths: Sequence[str]) -> list[str]:
    """Return the `paths` without a dataset's metadata and caches."""
    by_folder: dict[str, set[str]] = {}
    for path in paths:
        by_folder.setdefault(files.parent(path), set()).add(files.name_of(path))
    with_data = {folder: _names_with_data(folder, names) for folder, names in by_folder.items()}
    return [path for path in paths if files.name_of(path) in with_data[files.parent(path)]]


def _names_with_data(folder: str, names: set[str]) -> set[str]:
    """Return the `names` of the files with data in one folder."""
    if "dataset_dict.json" in names:
        splits = _names(folder, "dataset_dict.json", "splits")
        first = files.join(folder, *splits[:1])
        raise CorpusFileError(f"{folder}: is a dataset with the splits {', '.join(splits)}. Name one of them: {first}")
    if "dataset_info.json" not in names:
        return names.difference(_DATASET_INFO)
    data = names.difference(_DATASET_INFO, _BESIDE_INFO)
    if "state.json" in names:  # `Dataset.save_to_disk` writes it. Files that it does not list are caches.
        if _names(folder, "state.json", "_indices_data_files", "filename"):
            raise CorpusFileError(f"{folder}: a file of indices selects its rows. Load the dataset, and save it again.")
        listed = set(_names(folder, "state.json", "_data_files", "filename"))
        if missing := sorted(listed - data):
            raise CorpusFileError(f"{files.join(folder, missing[0])}: missing, but state.json names it. Copy it again.")
        return listed
    splits = _names(folder, "dataset_info.json", "splits")
    if len(splits) > 1 and data:
        pattern = files.join(folder, f"*{splits[0]}*")
        raise CorpusFileError(f"{folder}: has the splits {', '.join(splits)}. Name the files of one: '{pattern}'")
    return {name for name in data if not name.startswith("cache-")}


def _names(folder: str, name: str, key: str, name_key: str = "name") -> list[str]:
    """Return ["a"] if a JSON file has ["a"], {"a": …} or [{name_key: "a"}] under `key`. Return [] if it lacks the key."""
    path = files.join(folder, name)
    try:
        entries = json.loads(files.read_text(path)).get(key) or ()
        return [str(entry[name_key]) if isinstance(entry, dict) else str(entry) for entry in entries]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CorpusFileError(f"{path}: can't be read as a file of the library datasets ({error}). Copy it again.") from error
