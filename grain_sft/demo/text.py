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
_KINDS = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
_STATEMENTS = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A text, and what it is about.

    Attributes:
      kind: "module", "class", "function" or "topic".
      name: with dots, such as json.dumps; of a topic, as `help()` takes it.
      text: not empty.
    """

    kind: str
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """Texts of one origin.

    Attributes:
      label: name of the origin, as a mix file has it.
      entries: none has another's text.
    """

    label: str
    entries: tuple[Entry, ...]

    @property
    def documents(self) -> tuple[str, ...]:
        """The texts."""
        return tuple(entry.text for entry in self.entries)

    @property
    def num_characters(self) -> int:
        """Of all texts."""
        return sum(map(len, self.documents))


def docstrings(max_characters: int = MAX_CHARACTERS) -> Source:
    """This Python's docstrings, in an order that depends on nothing but its files.

    Args:
      max_characters: of all together; the first that would pass it is left out with all that follow.

    Raises:
      GrainSftError: this Python carries too few.
    """
    library = Path(sysconfig.get_path("stdlib"))
    source = Source("stdlib_docstrings", tuple(_bounded(library_docstrings(library), max_characters)))
    if source.num_characters < min(MIN_CHARACTERS, max_characters):
        raise GrainSftError(
            f"{library}: the demo trains on the docstrings of Python's standard library, and found {source.num_characters} "
            f"characters of the {MIN_CHARACTERS} that it needs. This Python comes without its source files: use a full "
            "installation."
        )
    return source


def python_sources(max_characters: int = MAX_CHARACTERS) -> list[Source]:
    """This Python's docstrings and, where it comes with them, the topics of its `help()`.

    Args:
      max_characters: of both together, as in `docstrings`.

    Raises:
      GrainSftError: this Python carries too few docstrings.
    """
    library = docstrings(max_characters)
    topics = Source("python_topics", tuple(_bounded(help_topics(), max_characters - library.num_characters)))
    return [source for source in (library, topics) if source.entries]


def library_docstrings(library: Path) -> Iterator[Entry]:
    """Docstrings of the .py files below `library`, sorted by path; tests, demos and installed packages are left out.

    Files are parsed, never imported; one that can't be read or parsed is skipped.
    """
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(library).with_suffix("").parts
                yield from _docstrings(path, ".".join(parts).removesuffix(".__init__"))


def help_topics() -> Iterator[Entry]:
    """The texts behind `help('ASSIGNMENT')` and the like, sorted by name; none where Python comes without them."""
    try:
        from pydoc_data import topics
    except ImportError:
        return
    for name, text in sorted(topics.topics.items()):
        yield Entry("topic", name, text)


def _docstrings(path: Path, module: str) -> Iterator[Entry]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are not ours to mend
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    pending: list[tuple[ast.AST, str]] = [(tree, module)]  # nodes, and the name of what they are in
    while pending:
        node, name = pending.pop()
        if isinstance(node, _DOCUMENTED):
            if not isinstance(node, ast.Module):
                name = f"{name}.{node.name}"
            yield Entry(_KINDS[type(node)], name, ast.get_docstring(node) or "")
        for field in reversed(_STATEMENTS):
            pending.extend((child, name) for child in reversed(getattr(node, field, ())))


def _bounded(entries: Iterable[Entry], max_characters: int) -> Iterator[Entry]:
    """Entries whose text, without the space around it, is text and new, up to so many characters."""
    seen = set()
    for entry in entries:
        text = entry.text.strip()
        if not text or text in seen or not _is_text(text):
            continue
        max_characters -= len(text)
        if max_characters < 0:
            return
        seen.add(text)
        yield dataclasses.replace(entry, text=text)


def _is_text(text: str) -> bool:
    """False where it holds NUL, or half a surrogate pair, which UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
