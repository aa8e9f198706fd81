"""Tree: the names in a folder and its subfolders, each listed once."""

from __future__ import annotations

import os

from grain_sft.errors import CorpusFileError, RemoteTimeoutError
from grain_sft.storage import files

_FILES = (".npy", ".bin", ".json", ".parquet")  # not worth asking a bucket for what is in them


class Tree:
    """Listings of local or remote folders. What is no folder, or can't be listed, has no names."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}

    def names(self, folder: str) -> frozenset[str]:
        """What is in `folder`, files and folders."""
        if folder not in self._names:
            self._names[folder] = frozenset(_list(folder))
        return self._names[folder]

    def beside(self, path: str, *candidates: str) -> list[str]:
        """Those of `candidates`, names of files, that are in the folder of the file `path`.

        Asks for each where the folder can't be listed: a file that is not seen would not be read.
        """
        folder = files.parent(path)
        try:
            names = self.names(folder)
        except RemoteTimeoutError as error:
            raise RemoteTimeoutError(f"{path}: the folder of its sidecar files can't be listed. {error}") from error
        if files.name_of(path) in names:
            return [name for name in candidates if name in names]
        if not files.exists(path):
            return []  # whoever opens it next says so
        return [name for name in candidates if files.exists(files.join(folder, name))]


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
            return []  # whoever opens it next says why
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []
