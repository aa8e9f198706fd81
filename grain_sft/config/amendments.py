"""Section `amendments` of a config: changes that begin at a step of the run, such as skipped steps or withdrawn documents."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from grain_sft.errors import ConfigError
from grain_sft.layout import Layout, documents_named_in
from grain_sft.options import REQUIRED, Option, Options, Section, check, options_of
from grain_sft.pipeline import Amendment
from grain_sft.sampling import OnExhausted


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a `skip` amendment, besides `from`.

    Args:
      steps: Number of steps whose batches are never read.
    """

    steps: Annotated[int, msgspec.Meta(ge=1)]


class Withdraw(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a `withdraw` amendment, besides `from`.

    Args:
      documents: Documents whose tokens become padding. An entry is one of five: the number of a document, as `grain-sft trace`
        prints it; `code:17` for document 17 of the mixture's source `code`; `chats.jsonl:17` for line 17 of an input of
        `grain-sft prepare`; `code` or `chats.jsonl` for all documents of this source or input; or the path of a file with such
        entries, one a line.
    """

    documents: int | str | list[int | str]


class Replace(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a `replace` amendment, besides `from`.

    Args:
      source: Name of a source of the mixture; `MIXTURE/NAME` in a mixture of mixtures.
      path: New files of the source, read from the first row of their order. If the run has read these files before, the
        source continues after the last row that was read of them, unless another source still reads them. The source keeps its
        other keys.
      weight: New weight of the source.
      max_epochs: Number of epochs after which the source has no rows left. Epochs before `from` count, too.
      on_exhausted: What happens when the source has no rows left: `stop`, `renormalize` or `fail`.
    """

    source: str
    path: str | list[str | float] | None = None
    weight: float | str | None = None
    max_epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    on_exhausted: OnExhausted | None = None


class Reweight(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a `reweight` amendment, besides `from`.

    Args:
      weights: New weights of sources of the mixture, by name. Other sources keep their weights.
    """

    weights: dict[str, float | str]


# `from` is a keyword of Python, so it can't be a field of a Struct.
_FROM = Option("from", Annotated[int, msgspec.Meta(ge=0)], REQUIRED, "First step that the amendment changes.")
_KINDS = {"skip": Skip, "withdraw": Withdraw, "replace": Replace, "reweight": Reweight}

AMENDMENTS: dict[str, Options] = {kind: {"from": _FROM, **options_of(keys)} for kind, keys in _KINDS.items()}
"""Keys of each kind of amendment."""


def keys_of_stage(section: Section) -> dict[str, Any]:
    """Return the keys of a `replace` amendment that need a new stage: a part of the run with its own config.

    A new weight needs no new stage, because a `reweight` amendment can set it. But such an amendment can't name a source of an
    inner mixture, such as "web/news" of the mixture "web".
    """
    names = ("path", "max_epochs", "on_exhausted", *(["weight"] if "/" in section["source"] else []))
    return {name: section[name] for name in names if section.get(name) is not None}


def weights_of(section: Section) -> dict[str, Any]:
    """Return {source: weight} if a `replace` amendment has a weight that needs no new stage (see `keys_of_stage`), else {}."""
    source, weight = section["source"], section.get("weight")
    return {} if weight is None or "/" in source else {source: weight}


def check_amendments(entries: Sequence[object], where: str) -> None:
    """Raise a ConfigError for an entry that is not one valid amendment."""
    for number, entry in enumerate(entries):
        at = f"{where}: amendments[{number}]"
        if not isinstance(entry, Mapping) or len(entry) != 1 or not entry.keys() <= AMENDMENTS.keys():
            expected = f"one of {', '.join(AMENDMENTS)} with its keys, such as skip: {{from: 9, steps: 1}}"
            raise ConfigError(f"{at} is {entry!r}; expected {expected}.")
        [(kind, section)] = entry.items()
        check(section, AMENDMENTS[kind], f"{at}.{kind}")


def make_amendments(
    entries: Sequence[Mapping[str, Section]], layouts: Sequence[Layout]
) -> tuple[list[Amendment], list[list[Amendment | None]]]:
    """Return the amendments of a run, and those of each stage. Each of these lists has one item for each of `entries`.

    Stages number their documents differently. So the item of a `withdraw` entry differs by stage: an amendment with the stage's
    own numbers, or None if the stage has none of the documents. The run gets the amendment of the first stage that has them.
    """
    by_entry = [_amendments_of_stages(kind, section, layouts) for entry in entries for kind, section in entry.items()]
    run = [next(each for each in of_stages if each is not None) for of_stages in by_entry]
    return run, [[of_stages[number] for of_stages in by_entry] for number in range(len(layouts))]


def _amendments_of_stages(kind: str, section: Section, layouts: Sequence[Layout]) -> Sequence[Amendment | None]:
    """Return the amendment of one entry for each stage, as `make_amendments` describes it."""
    if kind == "replace":
        keys = keys_of_stage(section)
        replaced = f"{section['source']} ({', '.join(keys)})" if keys else ""
        return [Amendment(section["from"], reweight=weights_of(section), replace=replaced)] * len(layouts)
    if kind != "withdraw":
        changes = {"skip": section.get("steps", 0), "reweight": section.get("weights", {})}
        return [Amendment(section["from"], **changes)] * len(layouts)
    documents_of_stages = documents_named_in(layouts, section["documents"])
    if not any(map(len, documents_of_stages)):  # without a document, `Amendment` raises a PipelineError
        return [Amendment(section["from"], withdraw=documents_of_stages[0])]
    return [Amendment(section["from"], withdraw=each) if len(each) else None for each in documents_of_stages]
