"""Summary of a trace: documents and tokens by source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.provenance.lines import Trace

_BLOCK = 1 << 20  # documents that are marked in one array


def summarize(parts: Trace | Iterable[Trace]) -> dict[str, list[Any]]:
    """Return the documents and tokens of each source in a trace or in the parts of `iter_trace`. It needs a byte per document.

    Returns:
      Columns by name, with a line for each source that occurs.
        source: Name of the source, or its number if it has no name.
        documents: Number of distinct documents; 0 in a layout that does not follow documents.
        segments, tokens: Number of segments, and of tokens that are not withdrawn.
        share: Share of all tokens.
        trainable: Number of tokens that take loss; absent where they were not counted.
    """
    counts: dict[str, Any] = dict.fromkeys(("documents", "segments", "tokens"), np.zeros(1, np.int64))
    seen: dict[
        int, npt.NDArray[np.bool_]
    ] = {}  # of each block of numbers: the documents of a later stage may begin late
    names: tuple[str, ...] = ()
    for part in parts if isinstance(parts, Iterable) else [parts]:
        part = part.select(part.instance >= 0)
        names, size = part.source_names, len(part.source_names)
        documents, lines = np.unique(part.document, return_index=True)
        documents, lines = documents[documents >= 0], lines[documents >= 0]
        first = np.ones(len(documents), np.bool_)
        for block in np.unique(documents // _BLOCK).tolist():
            here = slice(*documents.searchsorted((block * _BLOCK, (block + 1) * _BLOCK)))
            of_block = seen.setdefault(block, np.zeros(_BLOCK, np.bool_))
            first[here] = ~of_block[documents[here] - block * _BLOCK]
            of_block[documents[here] - block * _BLOCK] = True
        new = lines[first]
        where = np.stack([part.step, part.row, part.segment])
        begins = np.append(True, (where[:, 1:] != where[:, :-1]).any(axis=0))[: len(part)]
        added = {"documents": np.bincount(part.source[new], minlength=size)}
        added["segments"] = np.bincount(part.source[begins], minlength=size)
        tokens = part.stop - part.start - (0 if part.withdrawn is None else part.withdrawn)
        for name, values in (("tokens", tokens), ("trainable", part.trainable)):
            if values is not None:  # added as float64, exact to 2^53
                added[name] = np.bincount(part.source, weights=values, minlength=size).astype(np.int64)
        counts = {name: column + counts.get(name, 0) for name, column in added.items()}
    counts["share"] = counts["tokens"] / max(1, int(counts["tokens"].sum()))
    used = np.flatnonzero(counts["tokens"])
    columns: dict[str, list[Any]] = {"source": [names[number] or str(number) for number in used.tolist()]}
    order = [name for name in ("documents", "segments", "tokens", "share", "trainable") if name in counts]
    return columns | {name: counts[name][used].tolist() for name in order}
