"""Messages that the page of troubleshooting quotes are messages of the code."""

import ast
import re

import doc_pages as pages


def texts_of(path) -> list[str]:
    """Every text in a module, with … where a value is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [re.sub(r"\s+", " ", text) for text in found]


def test_every_message_that_is_quoted_is_one_of_the_codes_and_is_explained_once():
    _, *parts = re.split(r"^\*\*`+ ?(.+?) ?`+\*\*$", pages.read("troubleshooting.md"), flags=re.MULTILINE)
    messages, explanations = parts[::2], parts[1::2]
    texts = [text for path in (pages.DOCS.parent / "grain_sft").rglob("*.py") for text in texts_of(path)]
    assert len(set(messages)) == len(messages) >= 30
    assert not [message for message in messages if not any(message in text for text in texts)]
    assert not [message for message, part in zip(messages, explanations, strict=True) if len(part.split()) < 12]
