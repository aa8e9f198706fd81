"""Files of the package use only public names of other folders, through `__init__.py`. Files and folders stay small."""

import ast
import functools
from collections import Counter
from pathlib import Path

from grain_sft.corpus import FORMATS
from grain_sft.layout import ALGORITHMS, LAYOUTS
from grain_sft.prepare import TEMPLATES
from grain_sft.sampling import ORDERS

PACKAGE = Path(__file__).parents[1] / "grain_sft"
DOCUMENTED = (
    *("_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames"),  # documented by Python
    *("_info", "_cat_file"),  # coroutines of fsspec, for callers that run in its loop
    "_run_exitfuncs",  # a function of atexit, the only way to run exit functions before `os._exit` (cli/interrupts.py)
)
MOST_LINES, MOST_FILES = 300, 20
NAMES = {*ALGORITHMS, *FORMATS, *LAYOUTS, *ORDERS, *TEMPLATES} - {"files", "grain", "index", "megatron", "rows", "text"}
"""Names of entries of the tables, except words that also mean something else. Other code must not compare with them."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def classes() -> dict[str, set[Path]]:
    """Return the files that define each class of the package. Exceptions are left out, because any file may catch them."""
    found: dict[str, set[Path]] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Error"):
                found.setdefault(node.name, set()).add(path)
    return found


def foreign_isinstance(path: Path, node: ast.AST) -> bool:
    """Return whether the second argument of an `isinstance` names a class of the package from another file."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")):
        return False
    names = [getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(node.args[1])]
    return any(name in classes() and path not in classes()[name] for name in names)


@functools.cache
def own_attributes(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def foreign_underscore(path: Path, node: ast.AST) -> bool:
    """Return whether the node is an attribute `_name` that its file neither defines nor assigns."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in DOCUMENTED
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and node.attr not in own_attributes(path)
    )


def compared_name(path: Path, node: ast.AST) -> bool:
    """Return whether the node compares something with one of `NAMES`, outside of the file with that name."""
    if not isinstance(node, ast.Compare):
        return False
    parts = [each for part in (node.left, *node.comparators) for each in ast.walk(part)]
    return any(isinstance(each, ast.Constant) and each.value in NAMES and path.stem != each.value for each in parts)


def past_a_door(path: Path, node: ast.AST) -> bool:
    """Return whether the node imports a file of another top-level folder, instead of the `__init__.py` of a folder."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    if isinstance(node, ast.Import):
        modules = [each.name for each in node.names]
    own_room = path.relative_to(PACKAGE).parts[0]
    inside = [module.split(".")[1:] for module in modules if module.startswith("grain_sft.")]
    others = [names for names in inside if len(names) > 1 and names[0] != own_room]
    return any(PACKAGE.joinpath(*names).with_suffix(".py").is_file() for names in others)


CHECKS = {"isinstance": foreign_isinstance, "underscore": foreign_underscore, "compared": compared_name}
CHECKS |= {"past a door": past_a_door}


def violations() -> dict[str, list[str]]:
    nodes = [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
    found = {
        name: [f"{path}:{node.lineno} {ast.unparse(node)}" for path, node in nodes if check(path, node)]
        for name, check in CHECKS.items()
    }
    files = [*trees(), *Path(__file__).parent.rglob("*.py")]
    found["long file"] = [str(path) for path in files if len(path.read_text().splitlines()) > MOST_LINES]
    folders = Counter(path.parent for path in files)
    found["large folder"] = [str(folder) for folder, count in folders.items() if count > MOST_FILES]
    return found


def test_the_package_keeps_to_its_structure():
    found = violations()
    assert not any(found.values()), "\n".join(f"{name}: {place}" for name in found for place in found[name])
