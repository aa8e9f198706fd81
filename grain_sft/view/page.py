"""Frame of all HTML pages of this package."""

import base64
import hashlib
import html
import importlib.resources
import json
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>
{styles}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
{script}</body>
</html>
"""


def part(name: str) -> str:
    """Return the text of a file in the folder `parts`, such as "page.css"."""
    return (importlib.resources.files("grain_sft.view") / "parts" / name).read_text(encoding="utf-8")


def make_page(title: str, body: str, *, styles: str, data: Any, script: str = "") -> str:
    """Return a page of HTML. Its Content-Security-Policy forbids loading anything, and running any script but `script`.

    Args:
      title: Title, as plain text.
      body: HTML of the body. The caller has escaped all texts in it.
      styles: Style sheet of this page, in addition to page.css.
      data: JSON value for the script and for other programs, in the element with the id `data`.
      script: JavaScript; "" for none.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    script_src = f"'sha256-{digest}'" if script else "'none'"
    json_text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # escaped, so that no HTML parser reads the data as markup
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return _PAGE.format(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {script_src}; base-uri 'none'; form-action 'none'",
        title=html.escape(title),
        styles=part("page.css") + styles,
        body=body,
        data=json_text,
        script=f"<script>{script}</script>\n" if script else "",
    )
