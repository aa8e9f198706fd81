"""Messages that the page of troubleshooting quotes are messages of the code."""

import ast
import re

import doc_pages as pages

PACKAGE = pages.DOCS.parent / "grain_sft"
PAGE = "troubleshooting.md"
LEAST = 30


def said(path) -> list[str]:
    """Every text in a module, with … where a value stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def quoted() -> list[str]:
    """What stands in bold code at the beginning of a line of the page."""
    return re.findall(r"^\*\*`+ ?(.+?) ?`+\*\*$", pages.read(PAGE), flags=re.MULTILINE)


def test_every_message_that_is_quoted_is_one_of_the_codes():
    texts = [re.sub(r"\s+", " ", text) for path in PACKAGE.rglob("*.py") for text in said(path)]
    messages = quoted()
    assert len(messages) >= LEAST
    missing = [message for message in messages if not any(message in text for text in texts)]
    assert not missing


def test_every_message_is_explained_and_none_twice():
    messages = quoted()
    assert len(set(messages)) == len(messages)
    parts = re.split(r"^\*\*`.*`\*\*$", pages.read(PAGE), flags=re.MULTILINE)[1:]
    for message, part in zip(messages, parts, strict=True):
        assert len(part.split()) >= 12, message
