"""Section `amendments` of a config."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from grain_sft.errors import ConfigError
from grain_sft.layout import Layout
from grain_sft.options import REQUIRED, Option, Options, check
from grain_sft.pipeline import Amendment, documents_named

_FROM = Option("from", Annotated[int, msgspec.Meta(ge=0)], REQUIRED, "First step that differs.")

AMENDMENTS: dict[str, Options] = {
    "skip": {
        "from": _FROM,
        "steps": Option(
            "steps", Annotated[int, msgspec.Meta(ge=1)], REQUIRED, "Number of steps whose batches are never read."
        ),
    },
    "withdraw": {
        "from": _FROM,
        "documents": Option(
            "documents",
            int | str | list[int | str],
            REQUIRED,
            "Documents whose tokens are padding: their numbers in `grain-sft trace`; `NAME:NUMBER` in a source of a mixture; "
            "`INPUT:LINE`, a record that the corpus was prepared from; the name of a source or of an input, for all of its "
            "documents; or the path of a file of these, one a line.",
        ),
    },
    "reweight": {
        "from": _FROM,
        "weights": Option(
            "weights", dict[str, float | str], REQUIRED, "Weights of a mixture's sources, by name; the others stay."
        ),
    },
}
"""Keys of each kind of amendment."""


def check_amendments(entries: Sequence[object], where: str) -> None:
    """Raise a ConfigError where an entry is not one amendment with its keys."""
    for number, entry in enumerate(entries):
        at = f"{where}: amendments[{number}]"
        if not isinstance(entry, Mapping) or len(entry) != 1 or not entry.keys() <= AMENDMENTS.keys():
            kinds = ", ".join(AMENDMENTS)
            raise ConfigError(
                f"{at} is {entry!r}; expected one of {kinds} with its keys, such as skip: {{from: 9, steps: 1}}."
            )
        [(kind, section)] = entry.items()
        check(section, AMENDMENTS[kind], f"{at}.{kind}")


def make_amendments(entries: Sequence[Mapping[str, Mapping[str, Any]]], layout: Layout) -> list[Amendment]:
    """Return the amendments of checked entries, for a run with `layout`."""
    return [_made(each["from"], kind, each, layout) for entry in entries for kind, each in entry.items()]


def _made(step: int, kind: str, section: Mapping[str, Any], layout: Layout) -> Amendment:
    if kind == "withdraw":
        named = section["documents"]
        return Amendment(step, withdraw=documents_named(layout, named if isinstance(named, list) else [named]))
    return Amendment(step, skip=section.get("steps", 0), reweight=section.get("weights", {}))
