"""Checks of a plan: no row exceeds the sequence length, and no token is packed twice."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.layout import COUNTS, check_columns, plan_columns
from grain_sft.storage import artifact
from grain_sft.verify.finding import Report

Arrays = Mapping[str, npt.NDArray[Any]]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def check_plan_file(report: Report, path: str, corpus: Corpus | None) -> None:
    """Check the checksum and the rows of a plan file and, unless `corpus` is None, its documents."""
    arrays: Arrays = {}
    depends: Mapping[str, Any] = {}
    with report.errors("files", path):
        arrays, depends = artifact.open_file(Path(path))
    if report.has_wrong("files"):
        return
    report.figures |= {"bytes": os.path.getsize(path), "arrays": sorted(arrays)}
    recipe = depends.get("recipe")
    if not isinstance(recipe, dict) or not isinstance(recipe.get("sequence_length"), int) or "plan" not in depends:
        report.note("plan", path, f"the checksum is right; it holds {', '.join(sorted(arrays))}, and no plan.")
        return
    if corpus is None:
        sentence = "the corpus was not given (--corpus), so documents were not compared with the plan's."
        report.note("plan", path, sentence)
    else:
        with report.errors("boundaries", corpus.shards[0].path):
            stated, content = depends.get("documents"), _found_in(corpus, recipe).content
            if stated != content:
                sentence = f"is a plan of the documents {stated}, but those of the corpus given are {content}."
                report.wrong("plan", path, sentence)
    if report.sound:
        try:
            check_columns(np.iinfo(np.int64).max, recipe["sequence_length"], arrays)
        except ValueError as error:
            report.wrong("plan", path, f"{error}.")
        else:
            check_plan(report, path, arrays, recipe, corpus)


def _found_in(corpus: Corpus, recipe: Mapping[str, Any]) -> Any:
    """Return the documents of a corpus, found by the options in the `recipe` of a plan."""
    return corpus.find_documents(recipe.get("boundaries", "auto"), recipe.get("bos_token_id"))


def check_plan(report: Report, where: str, arrays: Arrays, recipe: Mapping[str, Any], corpus: Corpus | None) -> None:
    """Check the pieces of a plan whose columns `check_columns` accepts against `recipe`, the packing options, and against
    `corpus` unless it is None."""
    start, length, document, ends = (arrays[name] for name in ("start", "length", "document", "ends"))
    report.figures |= {"rows": len(ends), "pieces": len(start)}
    counts, segments = np.diff(ends, prepend=0), recipe.get("max_segments")
    first = functools.partial(_first, report, where)
    if isinstance(segments, int):
        first("row", counts > segments, lambda row: f"holds {counts[row]} documents; max_segments is {segments}.")
    order = np.lexsort((start, document))
    repeated = np.zeros(len(order), np.bool_)
    overlaps = start[order[1:]] < (start + length)[order[:-1]]
    repeated[order[1:]] = (document[order[1:]] == document[order[:-1]]) & overlaps

    def repeated_text(piece: int) -> str:
        row = np.searchsorted(ends, piece, side="right")
        return f"of document {document[piece]} is in row {row} a second time."

    first("token", repeated, repeated_text, start)
    if corpus is not None:
        with report.errors("boundaries", corpus.shards[0].path):
            _check_documents(report, where, arrays, _found_in(corpus, recipe).documents)


def _check_documents(report: Report, where: str, arrays: Arrays, documents: Any) -> None:
    """Check that each piece lies in its document, and that the plan's counts match its pieces."""
    start, length, document, ends = (arrays[name] for name in ("start", "length", "document", "ends"))
    absent, stop = (document < 0) | (document >= len(documents)), start + length
    count = f"there are {len(documents)} documents"
    if _first(report, where, "piece", absent, lambda at: f"is of document {document[at]}, but {count}."):
        return
    begin, end = documents.start[document], documents.start[document] + documents.length[document]

    def outside(at: int) -> str:
        own = f"document {document[at]} is tokens {begin[at]} to {end[at]}"
        return f"is tokens {start[at]} to {stop[at]}, but {own}."

    if _first(report, where, "piece", (start < begin) | (stop > end), outside):
        return
    expected = plan_columns(documents, document, start, length, ends)["counts"]
    for name, stated, counted in zip(COUNTS, arrays["counts"].tolist(), expected.tolist(), strict=True):
        report.figures[name] = counted
        if stated != counted:
            report.wrong("plan", where, f"states {stated} {name.replace('_', ' ')}, but its rows leave {counted}.")


def _first(
    report: Report, where: str, noun: str, wrong: Bools, sentence: Callable[[int], str], numbers: Ints | None = None
) -> bool:
    """Report the first True in `wrong`, by its index or its number in `numbers`, and the count of others, if any is True."""
    count, at = np.count_nonzero(wrong), int(wrong.argmax()) if len(wrong) else 0
    if count:
        more = f" So are {count - 1:,} more." if count > 1 else ""
        report.wrong("plan", where, sentence(at) + more, f"{noun} {at if numbers is None else numbers[at]}")
    return bool(count)
