"""The links, names, commands, config keys and quoted messages in the pages of docs/ exist."""

import ast
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import doc_pages as pages
import pytest

import grain_sft
from grain_sft.cli.main import COMMANDS
from grain_sft.config.sections import SECTIONS

ROOT = pages.DOCS.parent
PACKAGE = Path(grain_sft.__file__).parent
REFERENCE = pages.read("reference.md")
INTERNAL = {"demo", "observers", "storage"}
"""Packages in grain_sft that only its other packages import."""
PUBLIC = {
    found.name
    for found in pkgutil.iter_modules(grain_sft.__path__)
    if hasattr(importlib.import_module(f"grain_sft.{found.name}"), "__all__") and found.name not in INTERNAL
}
MODULES = re.findall(r"^\.\. automodule:: (\S+)", REFERENCE, flags=re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub and MyST give to the headings of a page."""
    headings = re.findall(r"^#{1,6} (.+)$", pages.outside_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*pages.PAGES, "../README.md"])
def test_the_links_and_the_configs_that_a_page_names_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.outside_blocks(page)):
        path, _, anchor = target.partition("#")
        found = (pages.DOCS / page).parent / path if path else pages.DOCS / page
        if not re.match(r"[a-z]+:", target):
            assert found.exists() and (not anchor or anchor in anchors(found.name)), f"{page}: {target}"
    names = r"\w+" if page.startswith("..") else r"(?:olmo|pretrain|eval|sft|episodes|primer|openchat)\w*"
    for path in re.findall(rf"(?<![\w/])configs/{names}\.\w+", pages.read(page)):
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_every_page_is_in_the_table_of_contents():
    listed = "\n".join(block.text for block in pages.blocks("index.md") if block.language == "{toctree}").split()
    assert {page.removesuffix(".md") for page in pages.PAGES} <= {"index", *listed}


def test_the_reference_has_every_name_of_the_top_level_every_command_and_every_public_package():
    listed = re.findall(r"^\| \{py:\w+\}`(\w+) <", REFERENCE, flags=re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(grain_sft.__all__)
    commands = dict(re.findall(r"^\| `grain-sft ([\w-]+)` \| (.+) \|$", REFERENCE, flags=re.MULTILINE))
    assert commands == {name: summary for name, (_, summary) in COMMANDS.items()}
    rooms = {"corpus", "layout", "sampling", "provenance", "transforms", "prepare", "config", "verify", "view"}
    assert rooms <= PUBLIC and {f"grain_sft.{package}" for package in PUBLIC} <= set(MODULES)


def test_every_public_function_and_class_of_the_package_says_what_it_is():
    """Functions and classes that no page shows need a docstring too, for people who read the code."""
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        silent += [] if ast.get_docstring(tree) or not tree.body else [str(path)]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                silent += [] if ast.get_docstring(node) else [f"{path}:{node.lineno} {node.name}"]
        for node in ast.walk(tree):  # methods and inner functions too, if they have more than eight lines
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                silent += [f"{path}:{node.lineno} {node.name}"] if node.end_lineno - node.lineno >= 8 else []
    assert not silent


def test_the_tables_of_config_keys_are_those_of_the_code_and_explain_every_key():
    spec = importlib.util.spec_from_file_location("config_page", pages.DOCS / "config_page.py")
    config_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config_page)
    page = pages.read("config.md")
    assert config_page.written(page) == page, "run python docs/config_page.py"
    assert config_page.schema() == pages.read("config.schema.json"), "run python docs/config_page.py"
    assert {*SECTIONS, "top"} <= set(config_page.tables())
    for name, options in config_page.tables().items():
        assert page.count(f"<!-- keys: {name} -->") == 1
        assert not [option for option in options.values() if not option.help.endswith(".")], name


def text_of(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return re.sub(r"\s+", " ", "\n".join(texts).replace("%s", "\n"))


def parts_of(message: str) -> list[str]:
    """Return the fixed texts of a message: split at punctuation marks, and at …, which replaces a value."""
    return [part.strip() for part in re.split(r"…|[.:,;](?: |$)", message) if part.strip(" .")]


def test_every_message_of_the_page_of_troubleshooting_is_in_the_code_and_is_explained_once():
    _, *parts = re.split(r"^\*\*`+ ?(.+?) ?`+\*\*$", pages.read("troubleshooting.md"), flags=re.MULTILINE)
    messages, explanations = parts[::2], parts[1::2]
    modules = [text_of(path) for path in PACKAGE.rglob("*.py")]
    assert len(set(messages)) == len(messages) >= 30
    for message in messages:
        assert any(all(part in text for part in parts_of(message)) for text in modules), message
    assert not [message for message, part in zip(messages, explanations, strict=True) if len(part.split()) < 12]
