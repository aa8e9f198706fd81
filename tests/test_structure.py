"""Structure of the package: rooms import in order, and what crosses a file goes through its public names."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "grain_sft"
ALLOWED = {"isinstance": 0, "underscore": 5, "compared": 0, "past a door": 1, "long file": 0, "large folder": 0}
"""Most of each kind that the package may still have: lower a number with each removal, to 0."""
MOST_LINES, MOST_FILES = 300, 20
NAMES = (
    *("best_fit_decreasing", "first_fit_decreasing", "multipack", "concat_then_split", "shuffled_best_fit"),
    *("maxtext", "episode", "openchat", "random", "sequential", "olmo", "shuffle"),
    *("primer", "episodes", "plain", "episode_tool", "windows", "padded", "packed", "materialized"),
)
"""Algorithms, orders, formats, templates and layouts: entries of tables, which carry what others must know of them."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def classes() -> dict[str, set[Path]]:
    """The files that define each class of ours; exceptions are there to be caught anywhere."""
    found: dict[str, set[Path]] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Error"):
                found.setdefault(node.name, set()).add(path)
    return found


def names_in(node: ast.expr) -> list[str]:
    """The class names of the second argument of an `isinstance`."""
    return [
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    ]


def foreign_isinstance(path: Path, tree: ast.Module) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and any(name in classes() and path not in classes()[name] for name in names_in(node.args[1]))
    ]


def foreign_underscores(path: Path, tree: ast.Module) -> list[str]:
    """Attributes `_name` that are read of something else than what this file defines."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own |= {
        each.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for each in node.targets
        if isinstance(each, ast.Name)
    }
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ("_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames")  # documented
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and node.attr not in own
    ]


def compared_names(path: Path, tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            texts = [
                each.value
                for part in (node.left, *node.comparators)
                for each in ast.walk(part)
                if isinstance(each, ast.Constant)
            ]
            if any(text in NAMES and path.stem != text for text in texts):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}")
    return found


def past_doors(path: Path, tree: ast.Module) -> list[str]:
    """Imports of a file that is in another room, instead of from the room's door or the door of a folder in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.count(".") >= 2:
            _, room, *rest = node.module.split(".")
            if (
                room != path.relative_to(PACKAGE).parts[0]
                and PACKAGE.joinpath(room, *rest).with_suffix(".py").is_file()
            ):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.module}")
    return found


def counted() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in ALLOWED}
    for path, tree in trees().items():
        found["isinstance"] += foreign_isinstance(path, tree)
        found["underscore"] += foreign_underscores(path, tree)
        found["compared"] += compared_names(path, tree)
        found["past a door"] += past_doors(path, tree)
        if len(path.read_text().splitlines()) > MOST_LINES:
            found["long file"].append(str(path.relative_to(PACKAGE)))
    folders = Counter(path.parent for path in trees())
    found["large folder"] = [str(folder) for folder, count in folders.items() if count > MOST_FILES]
    return found


def test_what_crosses_files_goes_through_public_names():
    found = counted()
    over = {name: places for name, places in found.items() if len(places) > ALLOWED[name]}
    assert not over, "\n".join(f"{name}: {len(places)}\n  " + "\n  ".join(places) for name, places in over.items())


if __name__ == "__main__":
    for name, places in counted().items():
        print(f"{name}: {len(places)}", *places, sep="\n  ")
    print("lines:", sum(len(path.read_text().splitlines()) for path in trees()))
