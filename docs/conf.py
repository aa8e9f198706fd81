"""Sphinx, as `sphinx-build -W -b html docs OUTPUT` reads it; needs the extra `docs`."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from grain_sft.version import __version__

project = "grain_sft"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"grain_sft {version}"

myst_heading_anchors = 3

napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else attributes of dataclasses are described twice
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

_SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
_CODE = re.compile(r"`([^`]+)`")
_ANNOTATED = re.compile(r"~?\b(?:typing\.)?Annotated\[([^\[\],]+), [^\[\]]*\]")  # bounds, or a table of names
_DEFAULT = re.compile(r"<(?:function|class) [^=,]*>|<factory>")


def setup(app: Any) -> None:
    """Convert docstrings, plain text with Google's sections, to reStructuredText, which Sphinx reads."""
    app.connect("autodoc-process-docstring", _to_restructured_text, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", _simplified)
    app.connect("autodoc-skip-member", _is_field)


def _simplified(app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, result: str) -> Any:
    """Return the signature with `int` for `Annotated[int, Meta(ge=1)]`, and with `...` for defaults that code makes."""
    return signature and (_DEFAULT.sub("...", _ANNOTATED.sub(r"\1", signature)), result)


def _is_field(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Skip the fields of a NamedTuple: the docstring of the class describes them."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def _to_restructured_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark up blocks that are indented outside of Google's sections: as code after a blank line, else as a list."""
    found: list[str] = []
    in_section, block, before, bullets = False, "", "", 0
    for line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text and not indent:
            in_section = line in _SECTIONS
            if block:
                found.append("")
            block = ""
        elif text and not in_section and not block:
            block = "list" if before else "code"
            first = indent
            found += [""] if before else ["::", ""]
        if in_section and bool(bullets) != text.startswith("- ") and not (bullets and indent > bullets):
            found.append("")  # before the first item, or after the last
            bullets = indent if text.startswith("- ") else 0
        if block == "list" and text:
            found.append(("* " if indent == first else "  ") + _escaped(text))
        else:
            found.append(line if block == "code" else line[:indent] + _escaped(text))
        before = text
    if what in ("property", "attribute", "data"):
        found[:0] = ["..", ""]  # napoleon reads the text before a colon in the first line as a type
    lines[:] = found


def _escaped(text: str) -> str:
    """Return `text` with names between backticks as literals, and without other markup."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"\\ ``{part}``\\ " for part in parts[1::2]]
    return "".join(parts)
