"""Documents by name: a number, a record of an input, an input, a source of a mixture, or a file of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError, RowIndexError
from grain_sft.layout.layout import Layout, sources_of
from grain_sft.layout.pieces import Ints, expand_counts
from grain_sft.layout.run_documents import RunDocuments
from grain_sft.storage import files

Named = Iterable[int | str]

_HIGHEST = np.iinfo(np.int64).max


def documents_named_in(layouts: Sequence[Layout], named: Named) -> list[Ints]:
    """Return the numbers of documents in the layout of each stage of a run: int64 [n] each, ascending.

    Args:
      layouts: Layout of each stage.
      named: Each a document's number in the run (`RunDocuments`), as a trace prints it; `NAME:NUMBER`, a document of a
        mixture's source; `INPUT:LINE`, the record of an input that the corpus was prepared from (see `documents_of_record`);
        the name of a source or an input, for all its documents; or the path of a file of these, one a line. A name that one
        stage knows holds for all that have its documents.

    Raises:
      RowIndexError: A name that is none of these, or a record that no document of the run was made of.
      CorpusError, CorpusFileError: Documents or files cannot be read, or a name fits several inputs.
    """
    run = RunDocuments(layouts)
    numbers = run_documents_named(run, named)
    found = {id(each): run.within(each, numbers) for each in run.layouts}
    return [found[id(each)] for each in layouts]


def run_documents_named(run: RunDocuments, named: Named) -> Ints:
    """Return the numbers of documents of a run, int64 [n], ascending. `named` and errors are those of `documents_named_in`."""
    numbers, found = _resolved(named, lambda name: [_in_layout(each, name) for each in run.layouts], len(run.layouts))
    documents = [run.of(layout, own) for layout, own in zip(run.layouts, found, strict=True)]
    known = [run.of(layout, run.within(layout, numbers)) for layout in run.layouts]
    missing = np.setdiff1d(numbers, np.concatenate(known))
    if len(missing):
        raise RowIndexError(f"document {missing[0]}: no stage of the run has it. Take a number that a trace prints.")
    return np.unique(np.concatenate([numbers, *documents]))


def corpus_documents_named(corpora: Sequence[Corpus], named: Named) -> Ints:
    """Return the numbers of documents, counted through all `corpora`, such as the splits of one: int64 [n], ascending.

    Args:
      corpora: Corpora whose documents are named.
      named: As in `documents_named_in`, without sources of a mixture.

    Raises:
      RowIndexError, CorpusError, CorpusFileError: as in `documents_named_in`, or a number that is not of a document.
    """
    firsts = np.cumsum([0, *(len(corpus.documents) for corpus in corpora)]).tolist()

    def find(name: str) -> list[Ints | None]:
        found = [(_in_corpus(corpus, name), first) for corpus, first in zip(corpora, firsts, strict=False)]
        given = [numbers + first for numbers, first in found if numbers is not None]
        return [np.concatenate(given) if given else None]

    alone, (of_names,) = _resolved(named, find, 1)
    numbers = np.union1d(alone, of_names)
    if len(wrong := numbers[numbers >= firsts[-1]]):
        raise RowIndexError(f"document {wrong[0]}: expected 0 to {firsts[-1] - 1}, the corpus's documents.")
    return numbers


def documents_of_record(corpus: Corpus, record: str) -> Ints:
    """Return the numbers of the documents that come from a record of an input, ascending.

    Args:
      corpus: Corpus with a file of sources.
      record: Line or row in the input, from 1, such as "17"; or with the input's name, the end of it, or its number before:
        "chats.jsonl:17".

    Raises:
      CorpusError: a corpus without a file of sources, or an input that it does not have.
    """
    table = sources_of(corpus)
    if table is None:
        hint = "`grain-sft prepare` writes that next to what it prepares; else ask for --document or --find"
        raise CorpusError(f"record {record!r}: this corpus has no file of the sources of its documents. {hint}.")
    name, _, line = record.rpartition(":")
    if not (line.isascii() and line.isdigit()):
        raise CorpusError(f"record {record!r}: expected LINE, or INPUT:LINE, such as chats.jsonl:17.")
    if (number := _input_named(corpus, table, name)) is None:
        raise CorpusError(f"record {record!r}: no such input. Say which of {_inputs(corpus, table)}: INPUT:LINE.")
    return np.flatnonzero((table[:, 0] == number) & (table[:, 1] == int(line)))


def numbers_in(layout: Layout, documents: Ints) -> Ints:
    """Return the numbers, ascending, of those documents of a layout that hold a token of `documents` of its corpus."""
    found, own = layout.documents, layout.corpus.documents
    if found is None or found is own:
        return documents
    start, length = own.start[documents], own.length[documents]
    first = (found.start + found.length).searchsorted(start, side="right")
    of, number = expand_counts(np.maximum(found.start.searchsorted(start + length, side="left") - first, 0))
    return np.unique(first[of] + number)


def _resolved(named: Named, find: Callable[[str], Sequence[Ints | None]], places: int) -> tuple[Ints, list[Ints]]:
    """Return the numbers among `named`, and for each of some places the documents of the names, each once. `find` returns those
    of a name in each place, None where it is not known."""
    numbers: list[int] = []
    found = [[np.zeros(0, np.int64)] for _ in range(places)]

    def add(named: Named) -> None:
        for each in named:
            if isinstance(each, int) or (each.isascii() and each.isdigit()):
                if int(each) > _HIGHEST:
                    raise RowIndexError(
                        f"document {each}: expected 0 to {_HIGHEST}. Take a number that a trace prints."
                    )
                numbers.append(int(each))
                continue
            given = [(place, of_name) for place, of_name in zip(found, find(each), strict=True) if of_name is not None]
            for place, of_name in given:
                place.append(of_name)
            if given:
                if not any(len(of_name) for _, of_name in given):
                    raise RowIndexError(f"{each}: no document was made of this record. Take it out of the list.")
            elif files.exists(each):
                add(filter(None, (line.strip() for line in files.read_text(each).splitlines())))
            else:
                raise RowIndexError(
                    f"{each!r} is not a document number, a source, SOURCE:NUMBER with a number that the source has, an input, "
                    "INPUT:LINE, or a file of these. Fix it, or give the path of an existing file."
                )

    add(named)
    return np.array(numbers, np.int64), [np.unique(np.concatenate(place)) for place in found]


def _in_layout(layout: Layout, name: str) -> Ints | None:
    source, _, number = name.rpartition(":")
    if name in layout.parts:
        return np.arange(layout.parts[name].num_documents) + layout.first_document(name)
    if source in layout.parts and number.isascii() and number.isdigit():
        inside = int(number) < layout.parts[source].num_documents
        return np.array([layout.first_document(source) + int(number)]) if inside else None
    found = {part: _in_corpus(layout.parts[part].corpus, name) for part in layout.parts}
    given = [
        numbers_in(layout.parts[part], numbers) + layout.first_document(part)
        for part, numbers in found.items()
        if numbers is not None
    ]
    return np.concatenate(given) if given else None


def _in_corpus(corpus: Corpus, name: str) -> Ints | None:
    """Return the documents of an input, or of one of its records; None for a corpus without that input."""
    if (table := sources_of(corpus)) is None:
        return None
    if (number := _input_named(corpus, table, name)) is not None:
        return np.flatnonzero(table[:, 0] == number)
    source, _, line = name.rpartition(":")
    known = source and line.isascii() and line.isdigit() and _input_named(corpus, table, source) is not None
    return documents_of_record(corpus, name) if known else None


def _input_named(corpus: Corpus, table: Ints, name: str) -> int | None:
    """Return the number of the input with a name, the end of a name, or a number; "" is the only input."""
    numbers: list[int] = np.unique(table[:, 0]).tolist()
    names = dict(enumerate(corpus.source_names))
    exact = [number for number in numbers if name in (str(number), names.get(number), "")]
    found = exact or [number for number in numbers if names.get(number, "").endswith(f"/{name}")]
    if len(found) > 1:
        raise CorpusError(f"{name or 'a record'!r}: several inputs fit. Say which of {_inputs(corpus, table)}.")
    return found[0] if found else None


def _inputs(corpus: Corpus, table: Ints) -> str:
    return ", ".join(corpus.source_names) or f"numbers 0 to {int(table[:, 0].max(initial=0))}"
