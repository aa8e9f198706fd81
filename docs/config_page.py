"""Writes `docs/config.schema.json`, and the tables of `docs/config.md`: `python docs/config_page.py`.

The text around the tables is written by hand. A table stands between `<!-- keys: NAME -->` and `<!-- end of keys -->`.
"""

import json
import re
from pathlib import Path

from grain_sft.config import config_schema
from grain_sft.config.sections import tables
from grain_sft.options import Options, table_rows

PAGE = Path(__file__).with_name("config.md")
SCHEMA = Path(__file__).with_name("config.schema.json")

_TABLE = re.compile(r"(<!-- keys: ([\w ]+) -->\n).*?(<!-- end of keys -->)", flags=re.DOTALL)


def written(page: str) -> str:
    """Return `page` with its tables as the code has them today."""
    found = tables()
    return _TABLE.sub(lambda match: match[1] + table(found[match[2]]) + match[3], page)


def schema() -> str:
    """Return the JSON Schema of configs, as the modelines of the shipped configs name it."""
    return json.dumps(config_schema(), indent=1) + "\n"


def table(options: Options) -> str:
    """Return a Markdown table with a row for each key."""
    return f"\n| key | type | default | meaning |\n|---|---|---|---|\n{table_rows(options)}\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    SCHEMA.write_text(schema())
