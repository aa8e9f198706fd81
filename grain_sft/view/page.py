"""Pages of HTML in one file, which load nothing and whose texts cannot run."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from typing import Any

PARTS = importlib.resources.files("grain_sft.view") / "parts"


def part(name: str) -> str:
    """Return a style sheet or script of this package."""
    return (PARTS / name).read_text(encoding="utf-8")


def make_page(title: str, body: str, *, styles: str, script: str = "", data: Any = None) -> str:
    """Return a page of HTML whose Content-Security-Policy lets it load nothing, and run `script` alone, known by its hash.

    Args:
      title: Title as plain text.
      body: HTML, with its texts escaped.
      styles: Style sheet.
      script: Script, or "".
      data: Object for JSON, which the script finds in the element `data`.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {runs}; base-uri 'none'; form-action 'none'"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{part('page.css')}{styles}</style>",
        "</head>",
        "<body>",
        body,
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{inert_json(data)}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body>", "</html>", ""])


def inert_json(data: Any) -> str:
    """Return JSON in ASCII that no HTML parser takes for markup."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
