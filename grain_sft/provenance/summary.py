"""Summary of a trace: documents and tokens by source."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from grain_sft.provenance.lines import Trace
from grain_sft.types import Bools, Ints

_BLOCK = 1 << 20  # document numbers in each array of `_SeenDocuments`


def summarize(parts: Trace | Iterable[Trace]) -> dict[str, list[Any]]:
    """Return the number of documents and tokens of each source. This takes about one byte of memory per document of the run.

    Args:
      parts: Trace, or the parts that `iter_trace` yields.

    Returns:
      Columns by name, with an entry for each source in the trace, even if an amendment has withdrawn all its tokens.
        source: Name of the source, or its number if it has no name.
        documents: Number of distinct documents; 0 if the layout does not follow documents.
        segments: Number of segments with tokens of the source.
        tokens: Number of tokens, without those that an amendment has withdrawn.
        share: Share of the tokens of all sources.
        trainable: Number of tokens that take loss; absent if the trace did not count them.
    """
    counts: dict[str, Any] = dict.fromkeys(("documents", "segments", "tokens", "share"), np.zeros(1, np.int64))
    seen = _SeenDocuments()
    names: tuple[str, ...] = ()
    for part in parts if isinstance(parts, Iterable) else [parts]:
        part = part.select(part.source >= 0)
        names, size = part.source_names, len(part.source_names)
        documents, lines = np.unique(part.document, return_index=True)
        documents, lines = documents[documents >= 0], lines[documents >= 0]
        lines_of_new_documents = lines[seen.add(documents)]  # the first line of each document states its source
        segment_of_line = np.stack([part.step, part.row, part.segment])
        begins_segment = np.ones(len(part), np.bool_)
        begins_segment[1:] = (segment_of_line[:, 1:] != segment_of_line[:, :-1]).any(axis=0)
        # Each (segment, source) becomes one number, so a segment counts once for each of its sources. In layout `megatron_gpt`,
        # a segment has documents of several sources.
        sources_of_segments = np.unique(begins_segment.cumsum() * size + part.source) % size
        added = {
            "documents": np.bincount(part.source[lines_of_new_documents], minlength=size),
            "segments": np.bincount(sources_of_segments, minlength=size),
        }
        tokens = part.stop - part.start - (0 if part.withdrawn is None else part.withdrawn)
        for name, values in (("tokens", tokens), ("trainable", part.trainable)):
            if values is not None:  # `bincount` adds float64, which is exact up to 2^53
                added[name] = np.bincount(part.source, weights=values, minlength=size).astype(np.int64)
        counts |= {name: column + counts.get(name, 0) for name, column in added.items()}
    counts["share"] = counts["tokens"] / max(1, int(counts["tokens"].sum()))
    used = np.flatnonzero(counts["segments"])
    sources = [names[number] or str(number) for number in used.tolist()]
    return {"source": sources} | {name: column[used].tolist() for name, column in counts.items()}


class _SeenDocuments:
    """Set of document numbers, one byte per number, in blocks of 2^20 numbers. Only a block with a document has an array.

    The numbers may have large gaps: `RunDocuments` reserves a number for each token of a layout that does not follow documents,
    and a trace has no lines with these numbers.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Bools] = {}

    def add(self, documents: Ints) -> Bools:
        """Add `documents`, int64 [n] ascending. Return which of them are new, bool [n]."""
        new = np.ones(len(documents), np.bool_)
        for block in np.unique(documents // _BLOCK).tolist():
            in_block = slice(*documents.searchsorted((block * _BLOCK, (block + 1) * _BLOCK)))
            offsets = documents[in_block] - block * _BLOCK
            seen = self._blocks.setdefault(block, np.zeros(_BLOCK, np.bool_))
            new[in_block] = ~seen[offsets]
            seen[offsets] = True
        return new
