"""Writes the tables of `docs/config.md` from the tables of the code: `python docs/config_page.py`.

The text around the tables is written by hand. A table stands between `<!-- keys: NAME -->` and `<!-- end of keys -->`.
"""

import json
import re
from pathlib import Path

from grain_sft.config import keys
from grain_sft.config.kinds import Kind, check_kind
from grain_sft.errors import ConfigError

PAGE = Path(__file__).with_name("config.md")

TABLES: dict[str, keys.Table] = {
    "top": keys.TOP,
    "corpus": keys.CORPUS,
    "remote": keys.REMOTE,
    "layout": keys.LAYOUT,
    **{f"layout {kind}": table for kind, table in keys.LAYOUT_OPTIONS.items() if table},
    "sampler": keys.SAMPLER,
    "source": keys.SOURCE,
    "schedule": keys.SCHEDULE,
    **{f"transform {name}": table for name, table in keys.TRANSFORM_OPTIONS.items() if table},
    "GPTConfig": keys.GPT_CONFIG,
}

_TYPES = {str: "string", int: "integer", float: "number", bool: "`true`, `false`", list: "list", dict: "mapping"}
_TABLE = re.compile(r"(<!-- keys: ([\w ]+) -->\n).*?(<!-- end of keys -->)", flags=re.DOTALL)


def written(page: str) -> str:
    """Return `page` with its tables as the code has them today."""
    return _TABLE.sub(lambda match: match[1] + table(TABLES[match[2]]) + match[3], page)


def table(entries: keys.Table) -> str:
    """Return a table of Markdown with a row for each key."""
    rows = [f"| `{name}` | {_kind(key.kind)} | {_default(key)} | {key.meaning} |\n" for name, key in entries.items()]
    return "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows) + "\n"


def _kind(kind: Kind) -> str:
    if isinstance(kind, tuple) and isinstance(kind[0], str):
        return ", ".join(f"`{word}`" for word in kind)
    types = list(kind) if isinstance(kind, tuple) else [kind]
    if float in types:
        types.remove(int)
    return " or ".join(_TYPES.get(each, "`null`") for each in types)


def _default(key: keys.Key) -> str:
    try:
        check_kind(key.default, key.kind, "")
    except ConfigError:
        return "none" if key.default is None else str(key.default)  # text
    if key.default == keys.REQUIRED or "`" in str(key.default):
        return str(key.default)
    return f"`{key.default if isinstance(key.default, str) else json.dumps(key.default)}`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
