"""Checks of a plan: rows hold each document at most once, and no more than fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import GrainSftError
from grain_sft.layout import COUNTS, plan_columns
from grain_sft.storage import artifact
from grain_sft.verify.finding import Report

Arrays = Mapping[str, npt.NDArray[Any]]

_COLUMNS = {"start": "i8", "length": "u4", "document": "i8", "ends": "i8", "counts": "i8"}


def check_plan_file(report: Report, path: str, corpus: Corpus | None) -> None:
    """Check the plan in a file: its checksum, and its rows.

    Args:
      report: Report of what is found.
      path: Path of the file.
      corpus: Corpus of the plan; without it, its documents are not checked.
    """
    try:
        arrays, depends = artifact.open_file(Path(path))
    except GrainSftError as error:
        report.wrong("files", path, str(error))
        return
    report.figures |= {"bytes": os.path.getsize(path), "arrays": sorted(arrays)}
    recipe = depends.get("recipe")
    length = recipe.get("sequence_length") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(length, int) or "plan" not in depends:
        report.note("plan", path, f"the checksum is right; it holds {', '.join(sorted(arrays))}, and no plan.")
        return
    if corpus is None:
        report.note(
            "plan", path, "the corpus was not given (--corpus), so documents were not compared with the plan's."
        )
    elif not _is_of(report, path, recipe, depends.get("documents"), corpus):
        return
    check_plan(report, path, arrays, recipe, corpus)


def _is_of(report: Report, path: str, recipe: Mapping[str, Any], stated: object, corpus: Corpus) -> bool:
    """Report a plan of other documents than the corpus's, and return whether it is of these."""
    try:
        content = corpus.find_documents(recipe.get("boundaries", "auto"), recipe.get("bos_token_id")).content
    except GrainSftError as error:
        report.wrong("boundaries", corpus.shards[0].path, str(error))
        return False
    if stated != content:
        report.wrong("plan", path, f"is a plan of the documents {stated}, but those of the corpus given are {content}.")
    return bool(stated == content)


def check_plan(report: Report, where: str, arrays: Arrays, recipe: Mapping[str, Any], corpus: Corpus | None) -> None:
    """Check the arrays of a plan.

    Args:
      report: Report of what is found.
      where: Path of the plan, or of its config.
      arrays: Columns of the plan.
      recipe: Options of the packing.
      corpus: Corpus of the plan, or None.
    """
    if not _has_columns(report, where, arrays):
        return
    start, length, document, ends = (arrays[name] for name in ("start", "length", "document", "ends"))
    report.figures |= {"rows": len(ends), "pieces": len(start)}
    counts = np.diff(ends, prepend=0)
    if (counts < 1).any() or (ends[-1] if len(ends) else 0) != len(start):
        row = int(np.flatnonzero(counts < 1)[0]) if (counts < 1).any() else len(ends) - 1
        report.wrong("plan", where, f"ends at piece {ends[row] if len(ends) else 0} of {len(start)}.", f"row {row}")
        return
    stop = start + length
    held = np.add.reduceat(length, ends - counts, dtype=np.int64) if len(ends) else np.zeros(0, np.int64)
    most, segments = recipe["sequence_length"], recipe.get("max_segments")
    _first(report, where, "row", held > most, lambda row: f"holds {held[row]} tokens, but a row has {most}.")
    if isinstance(segments, int):
        over = counts > segments
        _first(report, where, "row", over, lambda row: f"holds {counts[row]} documents; max_segments is {segments}.")
    _first(
        report, where, "piece", (length < 1) | (start < 0), lambda at: f"is of {length[at]} tokens from {start[at]} on."
    )
    order = np.lexsort((start, document))
    again = np.zeros(len(order), np.bool_)
    again[1:] = (document[order[1:]] == document[order[:-1]]) & (start[order[1:]] < stop[order[:-1]])

    def twice(at: int) -> str:
        piece = order[at]
        return f"of document {document[piece]} is in row {np.searchsorted(ends, piece, side='right')} a second time."

    _first(report, where, "token", again, twice, number=lambda at: int(start[order[at]]))
    if corpus is not None:
        _check_against(report, where, arrays, recipe, corpus)


def _has_columns(report: Report, where: str, arrays: Arrays) -> bool:
    for name, dtype in _COLUMNS.items():
        array = arrays.get(name)
        if array is None or array.ndim != 1 or array.dtype != np.dtype(dtype):
            report.wrong(
                "plan", where, f"lacks {name}, or has it in another shape or type than int64 [n] (length: uint32)."
            )
            return False
    sizes = {len(arrays[name]) for name in ("start", "length", "document")}
    if len(sizes) > 1 or len(arrays["counts"]) != len(COUNTS):
        report.wrong("plan", where, "its columns are of different lengths.")
        return False
    return True


def _check_against(report: Report, where: str, arrays: Arrays, recipe: Mapping[str, Any], corpus: Corpus) -> None:
    """Check that pieces are inside their documents, and that the plan's counts are those of the documents."""
    start, length, document, ends = (arrays[name] for name in ("start", "length", "document", "ends"))
    try:
        documents = corpus.find_documents(recipe.get("boundaries", "auto"), recipe.get("bos_token_id")).documents
    except GrainSftError as error:
        report.wrong("boundaries", corpus.shards[0].path, str(error))
        return
    absent = (document < 0) | (document >= len(documents))
    absent_text = f"there are {len(documents)} documents."
    if _first(report, where, "piece", absent, lambda at: f"is of document {document[at]}, but {absent_text}"):
        return
    begin, whole = documents.start[document], documents.length[document]
    outside = (start < begin) | (start + length > begin + whole)
    if _first(
        report,
        where,
        "piece",
        outside,
        lambda at: (
            f"is tokens {start[at]} to {start[at] + length[at]}, but document {document[at]} is tokens {begin[at]} to "
            f"{begin[at] + whole[at]}."
        ),
    ):
        return
    expected = plan_columns(documents, document, start, length, ends)["counts"]
    for name, stated, counted in zip(COUNTS, arrays["counts"].tolist(), expected.tolist(), strict=True):
        report.figures[name] = counted
        if stated != counted:
            report.wrong("plan", where, f"states {stated} {name.replace('_', ' ')}, but its rows leave {counted}.")


def _first(report: Report, where: str, what: str, wrong: Any, say: Any, number: Any = int) -> bool:
    """Report the first index that is wrong, and how many are; return whether one is."""
    at = np.flatnonzero(wrong)
    if len(at):
        more = f" So are {len(at) - 1:,} more." if len(at) > 1 else ""
        report.wrong("plan", where, say(int(at[0])) + more, f"{what} {number(int(at[0]))}")
    return bool(len(at))
