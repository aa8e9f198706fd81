"""Section `amendments` of a config."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from grain_sft.errors import ConfigError
from grain_sft.layout import Layout, documents_named_in
from grain_sft.options import REQUIRED, Option, Options, check
from grain_sft.pipeline import Amendment
from grain_sft.sampling import OnExhausted

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
    "replace": {
        "from": _FROM,
        "source": Option(
            "source", str, REQUIRED, "Name of a source of the mixture; `MIXTURE/NAME` in a mixture of mixtures."
        ),
        "path": Option(
            "path",
            str | list[str | float] | None,
            None,
            "New files of the source, read from the first row that the run has not read; its other keys stay.",
        ),
        "weight": Option("weight", float | str | None, None, "Weight of the source."),
        "max_epochs": Option(
            "max_epochs",
            Annotated[int, msgspec.Meta(ge=1)] | None,
            None,
            "Epochs after which the source has no rows left, those before `from` included.",
        ),
        "on_exhausted": Option(
            "on_exhausted",
            OnExhausted | None,
            None,
            "What happens when the source has no rows left: `stop`, `renormalize` or `fail`.",
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


def keys_of_stage(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a replacement that need a new stage. The weight of a source of the outermost mixture needs none."""
    names = ("path", "max_epochs", "on_exhausted", *(("weight",) if "/" in section["source"] else ()))
    return {name: section[name] for name in names if section.get(name) is not None}


def weights_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that a replacement gives to sources of the outermost mixture."""
    given = section.get("weight") is not None and "/" not in section["source"]
    return {section["source"]: section["weight"]} if given else {}


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


def make_amendments(
    entries: Sequence[Mapping[str, Mapping[str, Any]]], layouts: Sequence[Layout]
) -> tuple[list[Amendment], list[list[Amendment | None]]]:
    """Return the amendments of a run, one for each checked entry, and those of each stage, one list for each layout.

    Stages number their documents differently, so `withdraw` differs by stage; it is None in a stage without such documents.
    The run's amendment is that of the first stage where it is not None.
    """
    run: list[Amendment] = []
    stages: list[list[Amendment | None]] = [[] for _ in layouts]
    for kind, section in (item for entry in entries for item in entry.items()):
        made = _made(kind, section, layouts)
        run.append(next(each for each in made if each is not None))
        for own, each in zip(stages, made, strict=True):
            own.append(each)
    return run, stages


def _made(kind: str, section: Mapping[str, Any], layouts: Sequence[Layout]) -> Sequence[Amendment | None]:
    """Return the amendment of an entry for each layout; None for one that it does not change."""
    if kind == "replace":
        keys = keys_of_stage(section)
        replaced = f"{section['source']} ({', '.join(keys)})" if keys else ""
        return [Amendment(section["from"], reweight=weights_of(section), replace=replaced)] * len(layouts)
    if kind != "withdraw":
        changes = {"skip": section.get("steps", 0), "reweight": section.get("weights", {})}
        return [Amendment(section["from"], **changes)] * len(layouts)
    named = section["documents"] if isinstance(section["documents"], list) else [section["documents"]]
    found = documents_named_in(layouts, named)
    if not any(map(len, found)):
        return [Amendment(section["from"], withdraw=found[0])]  # raises, as nothing is withdrawn
    return [Amendment(section["from"], withdraw=each) if len(each) else None for each in found]
