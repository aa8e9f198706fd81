"""From documents as corpora number them to documents as a trace numbers them, and epochs of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import Layout

Ints = npt.NDArray[np.int64]


def follows_documents(layout: Layout, rows: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each of `rows` (int64 [n]) is made of documents that have numbers."""
    found: npt.NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
    for name, at, _ in layout.split(rows):
        found[at] = layout.parts[name].follows_documents
    return found


def number_of_document(layout: Layout, source: str, number: int) -> int:
    """Return the number that document `number` of a mixture's source has in a trace; without a source, `number`.

    Raises:
      RowIndexError: no such source, or a name where there is no mixture.
      CorpusError, CorpusFileError: the documents of a source that does not follow documents cannot be found.
    """
    if source in layout.parts:
        return layout.first_document(source) + number
    if not source:
        return number
    named = "none: it is no mixture" if "" in layout.parts else ", ".join(layout.parts)
    raise RowIndexError(f"document {source}:{number}: no such source; there are {named}.")


def layouts_of(layout: Layout) -> list[tuple[int, Layout]]:
    """Return the layouts of whose corpora a trace numbers the documents, each with the number of its first: of a mixture those
    of all sources that follow documents."""
    parts = layout.parts
    following = {name: part for name, part in parts.items() if part.follows_documents or not name}
    return [(layout.first_document(name), part) for name, part in following.items()]


def numbers_in(layout: Layout, documents: Ints) -> Ints:
    """Return the numbers, ascending, of those documents of a layout that hold a token of `documents` of its corpus."""
    found, own = layout.documents, layout.corpus.documents
    if found is None or found is own:
        return documents
    start, length = own.start[documents], own.length[documents]
    first = (found.start + found.length).searchsorted(start, side="right")
    count = np.maximum(found.start.searchsorted(start + length, side="left") - first, 0)
    return np.unique(first.repeat(count) + np.arange(int(count.sum())) - (count.cumsum() - count).repeat(count))


def epochs_of(layout: Layout, epochs: Ints, rows: Ints) -> Ints:
    """Return the epochs (int64 [n]) of the sampler that read `rows`, counted in epochs of the layout where it packs each
    anew."""
    found = epochs.copy()
    for name, at, own in layout.split(rows):
        part = layout.parts[name]
        found[at] = epochs[at] * part.epochs + part.epoch_of(own)[0]
    return found
