"""Write `docs/config.schema.json`, and the tables of `docs/config.md`: `python docs/config_page.py`.

The text around the tables is written by hand. A table is between `<!-- keys: NAME -->` and `<!-- end of keys -->`.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from grain_sft.config import config_schema
from grain_sft.config.amendments import AMENDMENTS
from grain_sft.config.gpt_config import GPT_CONFIG
from grain_sft.config.sections import CORPUS, LAYOUT, SAMPLER, STAGE, TOP, ScheduleEntry, Source, layout_options
from grain_sft.layout import LAYOUTS
from grain_sft.options import REQUIRED, Options, expected, help_in_configs, is_struct, kinds_of, options_of
from grain_sft.registry import table_of
from grain_sft.transforms import TRANSFORMS

PAGE = Path(__file__).with_name("config.md")
SCHEMA = Path(__file__).with_name("config.schema.json")

_TABLE = re.compile(r"(<!-- keys: ([\w ]+) -->\n).*?(<!-- end of keys -->)", flags=re.DOTALL)


def tables() -> dict[str, Options]:
    """Return the options of each table of the page, by its name."""
    return {
        "top": TOP,
        "corpus": CORPUS,
        "layout": LAYOUT,
        **{f"layout {kind}": options for kind in LAYOUTS if (options := layout_options(kind))},
        "sampler": SAMPLER,
        "source": options_of(Source),
        "schedule": options_of(ScheduleEntry),
        **{f"transform {name}": options for name in TRANSFORMS if (options := options_of(TRANSFORMS[name]))},
        "stage": STAGE,
        **{f"amendment {kind}": options for kind, options in AMENDMENTS.items()},
        "GPTConfig": GPT_CONFIG,
    }


def written(page: str) -> str:
    """Return `page` with its tables made anew from the code."""
    found = tables()
    return _TABLE.sub(lambda match: match[1] + table(found[match[2]]) + match[3], page)


def schema() -> str:
    """Return the text of the JSON Schema of configs, which the first line of each shipped config names."""
    return json.dumps(config_schema(), indent=1) + "\n"


def table(options: Options) -> str:
    """Return a Markdown table with a row for each key."""
    return f"\n| key | type | default | meaning |\n|---|---|---|---|\n{table_rows(options)}\n"


def table_rows(options: Options, prefix: str = "") -> str:
    """Return the rows of a Markdown table: key, type, default, meaning. Nested sections follow their key."""
    rows = ""
    for option in options.values():
        default = "required" if option.default is REQUIRED else "none" if option.default is None else code(option.default)
        kinds = ", ".join(dict.fromkeys(map(marked, kinds_of(option.type))))
        rows += f"| `{prefix}{option.name}` | {kinds} | {default} | {help_in_configs(option)} |\n"
        for kind in filter(is_struct, kinds_of(option.type)):
            rows += table_rows(options_of(kind), f"{prefix}{option.name}.")
    return rows


def marked(kind: Any) -> str:
    """Return a type for the documentation."""
    words = get_args(kind) if get_origin(kind) is Literal else table_of(kind)
    if words is not None:
        return ", ".join(map(code, words))
    if get_origin(kind) is Annotated:
        return marked(get_args(kind)[0])
    if is_struct(kind):
        return "mapping"
    return "`true`, `false`" if kind is bool else expected(kind).removeprefix("an ").removeprefix("a ")


def code(value: object) -> str:
    """Return a value between backticks."""
    return f"`{value if isinstance(value, str) else json.dumps(value, default=list)}`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    SCHEMA.write_text(schema())
