"""The reference has every public name, and each says what it is."""

import importlib
import inspect
import re

import doc_pages as pages
import pytest

import grain_sft
from grain_sft.cli.main import COMMANDS

TEXT = pages.read("reference.md")
PACKAGES = ("corpus", "layout", "sampling", "mixture", "transforms", "trace", "prepare", "receipt", "config")
MODULES = re.findall(r"^\.\. automodule:: (\S+)", TEXT, flags=re.MULTILINE)


def test_the_table_has_the_names_of_the_top_level():
    listed = re.findall(r"^\| \{py:\w+\}`(\w+) <", TEXT, flags=re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(grain_sft.__all__)


def test_every_command_is_in_it():
    listed = dict(re.findall(r"^\| `grain-sft ([\w-]+)` \| (.+) \|$", TEXT, flags=re.MULTILINE))
    assert listed == COMMANDS


@pytest.mark.parametrize("package", PACKAGES)
def test_public_packages_are_in_it(package):
    assert f"grain_sft.{package}" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_a_module_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for public in getattr(module, "__all__", ()):
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__ and not thing.__doc__.startswith(f"{public}("), f"{name}.{public}"
