"""Search for documents by name.

A name is that of a document, a source of a mixture, an input, a record of an input, or a file of such names. The name of a
document is its number. An input is a file that the corpus was prepared from. A record is one line or one row of an input.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError, RowIndexError, shortened
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import expand_counts
from grain_sft.layout.run_documents import RunDocuments
from grain_sft.layout.traits import sources_of
from grain_sft.storage import files
from grain_sft.types import Ints

Named = Iterable[int | str]

_HIGHEST = np.iinfo(np.int64).max


class ListFile(str):
    """Path of a file of names. A source or an input called `name` takes precedence over the file."""

    name: str
    """Text that the user wrote, such as "chats.jsonl", before it became a path."""


def documents_named_in(layouts: Sequence[Layout], named: Named) -> list[Ints]:
    """Return the named documents of each stage, as numbers in the layout of the stage: int64 [n] each, ascending.

    Args:
      layouts: Layout of each stage.
      named: Names of documents. A name is one of
        17: number of a document in the run (`RunDocuments`), as a trace prints it;
        code:17: document 17 of the source `code` of a mixture;
        chats.jsonl:17: documents made of line 17 of an input that the corpus was prepared from (see `documents_of_record`);
        code, or chats.jsonl: all documents of a source or of an input;
        list.txt: path of a file that has such names, one a line.

    A document that a name finds in one stage is returned for every stage that reads it. In a run of one layout,
    numbers that are too high are returned, too: the check would count the documents, which may read all tokens.

    Raises:
      RowIndexError: A name is none of these, no document of the run was made of a named record, or stages read different files
        as a named source.
      CorpusError, CorpusFileError: Documents or files cannot be read, or a name fits several inputs.
    """
    run = RunDocuments(layouts)
    numbers = run_documents_named(run, named, refuse_replaced=True)
    return [run.within(layout, numbers) for layout in layouts]


def run_documents_named(run: RunDocuments, named: Named, *, refuse_replaced: bool = False) -> Ints:
    """Return the numbers of the named documents in a run, int64 [n], ascending. See `documents_named_in`.

    A `replace` amendment gives a source other files from some stage on. The source's name then means the documents of the old
    and the new files. With `refuse_replaced`, such a name is refused.
    """
    inputs = [{name: _Inputs(part.corpus) for name, part in layout.parts.items()} for layout in run.layouts]

    def find(name: str) -> Ints | None:
        if refuse_replaced:
            _check_source(name, run.layouts)
        found = [_in_layout(layout, of_parts, name) for layout, of_parts in zip(run.layouts, inputs, strict=True)]
        return _joined(run.of(layout, own) for layout, own in zip(run.layouts, found, strict=True) if own is not None)

    numbers, of_names = _resolved(named, find)
    # each layout's numbers; those of the first layout may include numbers that are too high (see `within`)
    existing = [run.of(layout, run.within(layout, numbers)) for layout in run.layouts]
    missing = np.setdiff1d(numbers, np.concatenate(existing))
    if len(missing):
        raise RowIndexError(f"document {missing[0]}: no stage of the run has it. Give a number that a trace prints.")
    return np.union1d(numbers, of_names)


def corpus_documents_named(corpora: Sequence[Corpus], named: Named) -> Ints:
    """Return the numbers of the named documents in several corpora, int64 [n], ascending.

    The numbers count through all corpora: if the first corpus has 100 documents, document 0 of the second is number 100.

    Args:
      corpora: Corpora, such as the splits of a corpus.
      named: Names of documents, as in `documents_named_in`, without sources of a mixture.

    Raises:
      RowIndexError: A number is too high, a name is not one of these, or no document was made of a named record.
      CorpusError, CorpusFileError: As in `documents_named_in`.
    """
    inputs = list(map(_Inputs, corpora))
    firsts = np.cumsum([0, *(len(corpus.documents) for corpus in corpora)]).tolist()

    def find(name: str) -> Ints | None:
        found = [of_corpus.documents_of(name) for of_corpus in inputs]
        # not strict, because the last of `firsts` is the number of all documents
        return _joined(own + first for own, first in zip(found, firsts, strict=False) if own is not None)

    numbers, of_names = _resolved(named, find)
    numbers = np.union1d(numbers, of_names)
    if len(wrong := numbers[numbers >= firsts[-1]]):
        raise RowIndexError(f"document {wrong[0]}: expected 0 to {firsts[-1] - 1}, the corpus's documents.")
    return numbers


def documents_of_record(corpus: Corpus, record: str) -> Ints:
    """Return the numbers of the documents that were made of a record of an input, ascending.

    Args:
      corpus: Corpus with a file of sources.
      record: Line or row of an input, counted from 1, such as "chats.jsonl:17", or "17" for a corpus of one input. The input is
        given by its name, the end of its name, or its number.

    Raises:
      CorpusError: The corpus has no file of sources, or lacks the input.
    """
    return _Inputs(corpus).documents_of_record(record)


def numbers_in(layout: Layout, documents: Ints) -> Ints:
    """Return, ascending, the numbers of the layout's documents that share a token with `documents` of its corpus.

    With `PackedLayout(boundaries="eos")`, documents of the layout may end elsewhere than those of the corpus.
    """
    of_layout, of_corpus = layout.documents, layout.corpus.documents
    if of_layout is None or of_layout is of_corpus:
        return documents
    documents = documents[of_corpus.length[documents] > 0]
    start, length = of_corpus.start[documents], of_corpus.length[documents]
    # the first document of the layout that ends after `start`, and the first that begins at `start + length` or later
    first = (of_layout.start + of_layout.length).searchsorted(start, side="right")
    after_last = of_layout.start.searchsorted(start + length, side="left")
    document, number = expand_counts(np.maximum(after_last - first, 0))
    return np.unique(first[document] + number)


def _resolved(named: Named, find: Callable[[str], Ints | None]) -> tuple[Ints, Ints]:
    """Return the names that are numbers, and the documents that the other names find: int64 [n] each."""
    numbers: list[int] = []
    of_names = [np.zeros(0, np.int64)]

    def add(named: Named, files_read: tuple[str, ...] = ()) -> None:
        """Add the documents of `named`. `files_read` are the nested files that `named` was read from, outermost first.

        A name that is one of `files_read` is refused. Otherwise this function would call itself without end.
        """
        for item in named:
            if not isinstance(item, str) or _is_number(item):
                number = int(item) if isinstance(item, str) else item
                numbers.append(as_integer("document", number, 0, RowIndexError, _HIGHEST))
                continue
            name = item.name if isinstance(item, ListFile) else item
            # an empty name is an error, but `find("")` may find the only source or input
            documents = find(name) if name else None
            if documents is not None:
                if not len(documents):
                    raise RowIndexError(f"{item}: no document was made of this record. Remove it from the list.")
                of_names.append(documents)
            elif item and item not in files_read and files.exists(item):
                add(filter(None, map(str.strip, files.read_text(item).splitlines())), (*files_read, item))
            else:
                expected = "a document number, a source, SOURCE:NUMBER of a document of a source, an input"
                problem = f"{shortened(item, 200)!r} is not {expected}, INPUT:LINE, or a file of these"
                raise RowIndexError(f"{problem}. Fix it, or give the path of an existing file.")

    add([named] if isinstance(named, int | str) else named)
    return np.array(numbers, np.int64), np.concatenate(of_names)


def _check_source(name: str, layouts: Sequence[Layout]) -> None:
    """Refuse the name of a source, or SOURCE:NUMBER, if an amendment `replace` gives the source other files in some stages."""
    for source in filter(None, (name, name.rpartition(":")[0])):
        if len({layout.parts[source].corpus.ranges for layout in layouts if source in layout.parts}) > 1:
            raise RowIndexError(f"withdraw {name!r}: stages read different files as {source!r}. Give the documents' numbers.")


def _is_number(text: str) -> bool:
    # int64 has at most 19 digits; Python's `int` refuses texts of more than 4,300
    return text.isascii() and text.isdigit() and len(text) < 20


def _joined(arrays: Iterable[Ints]) -> Ints | None:
    """Return the arrays joined; None, which means that nothing has the name, if there are no arrays."""
    listed = list(arrays)
    return np.concatenate(listed) if listed else None


def _in_layout(layout: Layout, inputs: "Mapping[str, _Inputs]", name: str) -> Ints | None:
    """Return the numbers of the documents that `name` finds in `layout`; None if the layout lacks the name."""
    source, _, number = name.rpartition(":")
    if name in layout.parts:
        return np.arange(layout.parts[name].num_documents) + layout.first_document(name)
    if source and source in layout.parts and _is_number(number):
        inside = int(number) < layout.parts[source].num_documents
        return np.array([layout.first_document(source) + int(number)]) if inside else None
    return _joined(
        numbers_in(layout.parts[part], numbers) + layout.first_document(part)
        for part, of_part in inputs.items()
        if (numbers := of_part.documents_of(name)) is not None
    )


class _Inputs:
    """Inputs that a corpus was prepared from."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    @functools.cached_property
    def _table(self) -> Ints | None:
        """int64 [documents, 2], input of each document, and its line or row; None for a corpus without a file of sources."""
        return sources_of(self._corpus)

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """Numbers of the inputs that have documents, ascending."""
        return [] if self._table is None else np.unique(self._table[:, 0]).tolist()

    def documents_of(self, name: str) -> Ints | None:
        """Return the documents of an input, or of one of its records; None for a corpus without that input."""
        if self._table is None:
            return None
        if (number := self._number_of(name)) is not None:
            return np.flatnonzero(self._table[:, 0] == number)
        source, _, line = name.rpartition(":")
        is_record = source and _is_number(line) and self._number_of(source) is not None
        return self.documents_of_record(name) if is_record else None

    def documents_of_record(self, record: str) -> Ints:
        """See the function `documents_of_record`."""
        if self._table is None:
            hint = "`grain-sft prepare` writes such a file. For this corpus, give --document or --find"
            raise CorpusError(f"record {record!r}: this corpus has no file of the sources of its documents. {hint}.")
        name, _, line = record.rpartition(":")
        if not _is_number(line):
            raise CorpusError(f"record {record!r}: expected LINE, or INPUT:LINE, such as chats.jsonl:17.")
        if (number := self._number_of(name)) is None:
            raise CorpusError(f"record {record!r}: no such input. Give INPUT:LINE with one of these inputs: {self._listed}.")
        inputs, lines = self._table.T
        return np.flatnonzero((inputs == number) & (lines == int(line)))

    def _number_of(self, name: str) -> int | None:
        """Return the number of an input; None if no input fits."""
        names = dict(enumerate(self._corpus.source_names))
        # `name` is the number or the name of an input, "" for the only input, or else the end of an input's path
        exact = [number for number in self._numbers if name in (str(number), names.get(number), "")]
        matches = exact or [number for number in self._numbers if names.get(number, "").endswith(f"/{name}")]
        if len(matches) > 1:
            asked = repr(name) if name else "this line"
            raise CorpusError(f"{asked}: several inputs fit. Say which of {self._listed}.")
        return matches[0] if matches else None

    @property
    def _listed(self) -> str:
        return ", ".join(self._corpus.source_names) or f"numbers 0 to {max(self._numbers, default=0)}"
