"""Root: a folder that no file of a corpus may lie outside of, for mixes and indexes that others have written."""

from __future__ import annotations

import os
from collections.abc import Iterable

from grain_sft import files
from grain_sft.corpus.corpus import Corpus
from grain_sft.errors import CorpusError


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
                at = "" if real == path else f" (it is {real})"
                raise CorpusError(
                    f"{path}: lies outside of {self._folder}{at}, which was given as the root of all files. Mend the mix or "
                    "the index that names it, or give a root that holds it."
                )

    def check_corpus(self, corpus: Corpus) -> None:
        """The same, of all files of a corpus."""
        self.check(file.path for file in corpus.files())
