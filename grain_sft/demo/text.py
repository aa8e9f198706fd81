"""The text that every Python carries: docstrings of its standard library, and the topics of its `help()`."""

from __future__ import annotations

import ast
import dataclasses
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from grain_sft.errors import GrainSftError

MAX_CHARACTERS = 3_500_000  # of all sources together
MIN_CHARACTERS = 100_000  # fewer make no tokenizer

_SKIPPED_FOLDERS = {
    *("__pycache__", "dist-packages", "site-packages"),
    *("test", "tests", "idle_test"),
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents of one origin.

    Attributes:
      label: name of the origin, as a mix file has it.
      documents: their texts, none empty and none twice.
    """

    label: str
    documents: tuple[str, ...]

    @property
    def num_characters(self) -> int:
        """Of all documents."""
        return sum(map(len, self.documents))


def python_sources(max_characters: int = MAX_CHARACTERS) -> list[Source]:
    """This Python's own documentation, in an order that depends on nothing but its files.

    Args:
      max_characters: of all sources together; a document that would pass it is left out with all that follow.

    Raises:
      GrainSftError: this Python carries too little text.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = []
    left = max_characters
    for label, documents in (("stdlib_docstrings", library_docstrings(library)), ("python_topics", help_topics())):
        source = Source(label, tuple(_bounded(documents, left)))
        left -= source.num_characters
        if source.documents:
            sources.append(source)
    found = sum(source.num_characters for source in sources)
    if found < min(MIN_CHARACTERS, max_characters):
        raise GrainSftError(
            f"{library}: the demo trains on the docstrings of Python's standard library, and found {found} characters of "
            f"the {MIN_CHARACTERS} that it needs. This Python comes without its source files: use a full installation."
        )
    return sources


def library_docstrings(library: Path) -> Iterator[str]:
    """Docstrings of the .py files below `library`, sorted by path; tests, demos and installed packages are left out.

    Files are parsed, never imported; one that can't be read or parsed is skipped.
    """
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield from _docstrings(Path(folder, name))


def help_topics() -> Iterator[str]:
    """The texts behind `help('ASSIGNMENT')` and the like, sorted by name; none where Python comes without them."""
    try:
        from pydoc_data import topics
    except ImportError:
        return
    for _, text in sorted(topics.topics.items()):
        yield text


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are not ours to mend
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""
        for field in reversed(_STATEMENTS):
            pending.extend(reversed(getattr(node, field, ())))


def _bounded(documents: Iterable[str], max_characters: int) -> Iterator[str]:
    """Documents that are text and new, up to so many characters."""
    seen = set()
    for document in documents:
        text = document.strip()
        if not text or text in seen or not _is_text(text):
            continue
        max_characters -= len(text)
        if max_characters < 0:
            return
        seen.add(text)
        yield text


def _is_text(text: str) -> bool:
    """False where it holds half a surrogate pair, which UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
