"""Which machine made a plan: its rows beside those that each order of equal lengths gives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import TIES
from grain_sft.layout.plan import VERSION, Recipe, check_columns, make_plan
from grain_sft.storage import artifact as artefact

Arrays = Mapping[str, npt.NDArray[Any]]

VARIANTS = tuple(ties for ties in TIES if ties != "numpy")


@dataclasses.dataclass(frozen=True)
class MadePlan:
    """A plan that some machine made.

    Attributes:
      arrays: start, length and ends, as in `Plan`.
      recipe: what it was made by, but for the ties.
      says: what it says of its ties itself; "" where it says nothing.
    """

    arrays: Arrays
    recipe: Recipe
    says: str


@dataclasses.dataclass(frozen=True)
class Match:
    """A plan beside the one that `ties` gives.

    Attributes:
      ties: one of `VARIANTS`.
      equal: whether all rows are; None where it can't be made here.
      row: the first that differs.
      message: the same in words.
    """

    ties: str
    equal: bool | None
    row: int | None
    message: str


def read_made_plan(
    where: str | os.PathLike[str],
    corpus: Corpus,
    sequence_length: int,
    *,
    long_documents: str = "truncate",
    source_group_size: int = 1,
    bos_token_id: int | None = None,
    paths: Sequence[str] | None = None,
) -> MadePlan:
    """A plan of ours, or one of OLMo-core's.

    Args:
      where: a plan's file in our cache, or OLMo-core's work directory.
      long_documents, source_group_size, bos_token_id, paths: as OLMo-core had them; a plan of ours says them itself.

    Raises:
      LayoutError: no plan of this corpus and sequence length.
      StorageError: it can't be read, or is damaged.
    """
    if Path(where).is_dir():
        layout = PackedLayout.from_olmo_core(
            corpus,
            sequence_length,
            where,
            long_documents=long_documents,
            source_group_size=source_group_size,
            bos_token_id=bos_token_id,
            paths=paths,
        )
        plan = layout.plans[0]
        arrays: Arrays = {"start": plan.start, "length": plan.length, "ends": plan.ends}
        return MadePlan(arrays, dataclasses.replace(layout.recipe, plan=None), "")
    found, depends = artefact.open_file(Path(where))
    stated = depends.get("recipe")
    if not isinstance(stated, dict) or not {"start", "length", "ends"} <= found.keys():
        raise LayoutError(f"{where}: holds no plan. Plans are the files below `plans` in the cache folder.")
    if depends.get("plan") != VERSION:
        raise LayoutError(
            f"{where}: a plan of version {depends.get('plan')}; expected {VERSION}, which makes other plans."
        )
    numpy = depends.get("numpy")
    try:
        recipe = Recipe(**stated | {"plan": None})
        of_numpy = f", numpy {numpy['version']}, {numpy['sort']}" if numpy else ""
        documents = recipe.finder(corpus).content
        check_columns(corpus.num_tokens, recipe.sequence_length, found)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise LayoutError(f"{where}: is damaged ({error}). Delete it; it will be made again.") from error
    if depends.get("documents") != documents:
        raise LayoutError(f"{where}: a plan of the documents {depends.get('documents')}; expected {documents}.")
    if stated["sequence_length"] != sequence_length:
        raise LayoutError(f"{where}: has rows of {stated['sequence_length']} tokens; expected {sequence_length}.")
    says = f"ties={recipe.ties!r}{of_numpy}"
    if stated.get("plan"):
        says = "read from OLMo-core's work directory"
    return MadePlan(found, recipe, says)


def which_machine(plan: MadePlan, corpus: Corpus) -> list[Match]:
    """A plan beside those of all variants: stable, and each of the sorts of the numpy that is installed."""
    matches = []
    for ties in VARIANTS:
        try:
            made = make_plan(corpus, dataclasses.replace(plan.recipe, ties=ties))
        except LayoutError as error:
            if ties == "stable":
                raise
            matches.append(Match(ties, None, None, f"not known. {error}"))
            continue
        row = first_difference(plan.arrays, made)
        if row is None:
            matches.append(Match(ties, True, None, f"equal, all {len(made['ends']):,} rows"))
        else:
            matches.append(Match(ties, False, row, _difference(row, plan.arrays, made)))
    return matches


def first_difference(one: Arrays, other: Arrays) -> int | None:
    """The first row that two plans do not have in common; None where they are equal."""
    rows = min(len(one["ends"]), len(other["ends"]))
    pieces = min(len(one["start"]), len(other["start"]))
    wrong_ends = np.flatnonzero(one["ends"][:rows] != other["ends"][:rows])
    differ = (one["start"][:pieces] != other["start"][:pieces]) | (one["length"][:pieces] != other["length"][:pieces])
    wrong_pieces = np.flatnonzero(differ)
    first = [int(wrong_ends[0])] if len(wrong_ends) else []
    if len(wrong_pieces):
        first.append(int(np.searchsorted(one["ends"], wrong_pieces[0], side="right")))
    if len(one["ends"]) != len(other["ends"]):
        first.append(rows)
    return min(first, default=None)


def _difference(row: int, plan: Arrays, made: Arrays) -> str:
    """What is another in the first row that differs."""
    there, here = (_spans(row, arrays) for arrays in (plan, made))
    if there is None or here is None:
        return (
            f"row {row:,} is the first that differs: {'the plan has' if there is None else 'this makes'} no more rows"
        )
    segment = next(
        (at for at, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here))
    )
    held = [
        f"tokens {spans[segment][0]:,} to {spans[segment][1]:,}" if segment < len(spans) else "nothing"
        for spans in (there, here)
    ]
    return f"row {row:,} is the first that differs: as segment {segment + 1} the plan holds {held[0]}, this {held[1]}"


def _spans(row: int, arrays: Arrays) -> list[tuple[int, int]] | None:
    """(first token, token after the last) of each segment of a row, counted through the corpus."""
    if row >= len(arrays["ends"]):
        return None
    begin, end = (int(arrays["ends"][row - 1]) if row else 0), int(arrays["ends"][row])
    start, length = arrays["start"][begin:end].astype(np.int64), arrays["length"][begin:end].astype(np.int64)
    return list(zip(start.tolist(), (start + length).tolist(), strict=True))
