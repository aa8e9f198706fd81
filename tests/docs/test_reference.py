"""The reference has every public name, and each says what it is."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import doc_pages as pages
import pytest

import grain_sft
from grain_sft.cli.main import COMMANDS

TEXT = pages.read("reference.md")
INTERNAL = {"demo", "observers", "storage"}
"""Rooms whose doors are for other rooms; users get what is theirs of them elsewhere."""
PACKAGES = [
    found.name
    for found in pkgutil.iter_modules(grain_sft.__path__)
    if hasattr(importlib.import_module(f"grain_sft.{found.name}"), "__all__") and found.name not in INTERNAL
]
MODULES = re.findall(r"^\.\. automodule:: (\S+)", TEXT, flags=re.MULTILINE)


def test_the_table_has_the_names_of_the_top_level():
    listed = re.findall(r"^\| \{py:\w+\}`(\w+) <", TEXT, flags=re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(grain_sft.__all__)


def test_every_command_is_in_it():
    listed = dict(re.findall(r"^\| `grain-sft ([\w-]+)` \| (.+) \|$", TEXT, flags=re.MULTILINE))
    assert listed == COMMANDS


def test_public_packages_are_in_it():
    rooms = {"corpus", "layout", "sampling", "provenance", "transforms", "prepare", "config", "verify", "view"}
    assert rooms <= set(PACKAGES)
    assert {f"grain_sft.{package}" for package in PACKAGES} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_a_module_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for public in getattr(module, "__all__", ()):
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__ and not thing.__doc__.startswith(f"{public}("), f"{name}.{public}"


def test_every_public_function_and_class_of_the_package_says_what_it_is():
    """Also those that no page shows: whoever reads the code meets them."""
    silent = []
    for path in sorted(Path(grain_sft.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                silent += [] if ast.get_docstring(node) else [f"{path}:{node.lineno} {node.name}"]
    assert not silent
