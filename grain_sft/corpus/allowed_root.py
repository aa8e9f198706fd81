"""Root: a folder that no file of a corpus may lie outside of, for mixes and indexes that others have written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from grain_sft.corpus.corpus import Corpus
from grain_sft.storage import files, inside, outside


class Root:
    """A local folder or a URL. Links are followed: what counts is where a file really is.

    Args:
      root: the folder.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        path = files.normalize(root)
        self._remote = files.is_remote(path)
        self._folder = (path if self._remote else os.path.realpath(path)).rstrip("/") + "/"

    def check(self, paths: Iterable[str]) -> None:
        """Refuse paths that lie outside.

        Raises:
          CorpusError: for the first that does.
        """
        for path in paths:
            remote = files.is_remote(path)
            real = path if remote else os.path.realpath(path)
            if remote != self._remote or not real.startswith(self._folder) or (remote and ".." in path.split("/")):
                raise outside(path, real, self._folder)

    def opening(self, given: object) -> contextlib.AbstractContextManager[None]:
        """Have files that are opened meanwhile lie in the root; but `given`, which the caller named, may lie elsewhere."""
        but = files.normalize(given) if isinstance(given, str | os.PathLike) else ""
        return inside(None if self._remote else self._folder, but)

    def bound(self, corpus: Corpus) -> Corpus:
        """Return `corpus` with files that have to lie in the root whenever they are opened.

        Raises:
          CorpusError: one lies outside now.
        """
        self.check(file.path for file in corpus.files())
        if self._remote:
            return corpus

        def bind(file: Any) -> Any:
            return None if file is None else dataclasses.replace(file, root=self._folder)

        shards = tuple(
            dataclasses.replace(bind(shard), loss=bind(shard.loss), boundaries=bind(shard.boundaries))
            for shard in corpus.shards
        )
        return dataclasses.replace(corpus, shards=shards, sources_file=bind(corpus.sources_file))
