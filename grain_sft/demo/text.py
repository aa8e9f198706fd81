"""The text that every Python carries: docstrings of its standard library."""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grain_sft.errors import GrainSftError

MAX_CHARACTERS = 3_500_000
MIN_CHARACTERS = 100_000  # fewer make no tokenizer

_SKIPPED_FOLDERS = {
    *("__pycache__", "dist-packages", "site-packages"),
    *("test", "tests", "idle_test"),
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
}
_KINDS = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
_STATEMENTS = ("body", "handlers", "orelse", "finalbody", "cases")


class Entry(NamedTuple):
    """A docstring, and what it is about.

    Attributes:
      kind: "module", "class" or "function".
      name: Name with dots, such as json.dumps.
      text: Text that is not empty.
    """

    kind: str
    name: str
    text: str


def docstrings(max_characters: int = MAX_CHARACTERS) -> list[Entry]:
    """Return this Python's docstrings, each text once, in an order that depends on nothing but its files.

    Args:
      max_characters: Bound of all texts together: the first that would pass it is left out with all that follow.

    Raises:
      GrainSftError: this Python carries too few.
    """
    library = Path(sysconfig.get_path("stdlib"))
    entries, seen, count = [], set(), 0
    for kind, name, text in library_docstrings(library):
        text = text.strip()
        if not text or text in seen or not _is_text(text):
            continue
        if count + len(text) > max_characters:
            break
        count += len(text)
        seen.add(text)
        entries.append(Entry(kind, name, text))
    if count < min(MIN_CHARACTERS, max_characters):
        raise GrainSftError(
            f"{library}: the demo trains on the docstrings of Python's standard library, and found {count} "
            f"characters of the {MIN_CHARACTERS} that it needs. This Python comes without its source files: use a full "
            "installation."
        )
    return entries


def library_docstrings(library: Path) -> Iterator[Entry]:
    """Yield the docstrings of the .py files below `library`, sorted by path; tests, demos and installed packages are left out.

    Files are parsed, never imported; one that cannot be read or parsed is skipped.
    """
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(library).with_suffix("").parts
                yield from _docstrings(path, ".".join(parts).removesuffix(".__init__"))


def _docstrings(path: Path, module: str) -> Iterator[Entry]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    pending: list[tuple[ast.AST, str]] = [(tree, module)]  # nodes, and the name of what they are in
    while pending:
        node, name = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not isinstance(node, ast.Module):
                name = f"{name}.{node.name}"
            yield Entry(_KINDS[type(node)], name, ast.get_docstring(node) or "")
        for field in reversed(_STATEMENTS):
            pending.extend((child, name) for child in reversed(getattr(node, field, ())))


def _is_text(text: str) -> bool:
    """Return False for NUL, and for half a surrogate pair, which UTF-8 does not have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
