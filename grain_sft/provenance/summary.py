"""Summary: tokens and documents by source, so that a mixture can be checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.provenance.lines import Trace

Ints = npt.NDArray[np.int64]


def summarize(parts: Trace | Iterable[Trace]) -> dict[str, list[Any]]:
    """What a trace, or the parts of `iter_trace` one after the other, holds by source; in memory of a byte a document.

    Returns:
      Columns, a line for each source that occurs: `source`, its name (its number where it has none); `documents`, how many
      different ones (0 in a layout that does not follow documents); `segments`, how many times one stands in a row;
      `tokens`; `share` of all tokens; and `trainable` tokens, where they were counted.
    """
    counts: dict[str, Ints] = {}
    seen = np.zeros(0, np.bool_)
    names: tuple[str, ...] = ()
    for part in [parts] if isinstance(parts, Trace) else parts:
        part = part.select(part.instance >= 0)
        names, size = part.source_names, len(part.source_names)
        highest = int(part.document.max(initial=-1)) + 1
        if highest > len(seen):
            seen = np.append(seen, np.zeros(max(highest, 2 * len(seen)) - len(seen), np.bool_))
        documents, lines = np.unique(part.document, return_index=True)
        lines, documents = lines[documents >= 0], documents[documents >= 0]
        new = lines[~seen[documents]]
        seen[part.document[new]] = True
        added = {
            "documents": np.bincount(part.source[new], minlength=size),
            "segments": np.bincount(part.source[_begins(part)], minlength=size),
            "tokens": _sums(part.source, part.stop - part.start, size),
        }
        if part.trainable is not None:
            added["trainable"] = _sums(part.source, part.trainable, size)
        counts = {key: column + counts.get(key, 0) for key, column in added.items()}
    if not counts:
        return {name: [] for name in ("source", "documents", "segments", "tokens", "share")}
    there = np.flatnonzero(counts["tokens"])
    tokens = counts["tokens"][there]
    columns: dict[str, list[Any]] = {"source": [names[number] or str(number) for number in there.tolist()]}
    columns |= {key: counts[key][there].tolist() for key in ("documents", "segments", "tokens")}
    columns["share"] = (tokens / max(1, int(tokens.sum()))).tolist()
    if "trainable" in counts:
        columns["trainable"] = counts["trainable"][there].tolist()
    return columns


def _begins(part: Trace) -> npt.NDArray[np.bool_]:
    """Which lines are the first piece of a segment."""
    same = np.zeros(len(part), np.bool_)
    if len(part):
        same[1:] = (part.step[1:] == part.step[:-1]) & (part.row[1:] == part.row[:-1])
        same[1:] &= part.segment[1:] == part.segment[:-1]
    return ~same


def _sums(groups: Ints, values: Ints, count: int) -> Ints:
    """Sum of the values of each group. Weights are added as float64, exact to 2^53."""
    return np.bincount(groups, weights=values, minlength=count).astype(np.int64)
