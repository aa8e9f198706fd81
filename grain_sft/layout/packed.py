"""PackedLayout: whole documents in rows of one length, with next to no padding."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length
from grain_sft.corpus import Corpus
from grain_sft.corpus.documents import Documents
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout, LeftOut, hash_of_rows, sources_of
from grain_sft.layout.olmo_plan import OlmoPlan, find_plan, from_boundaries, read_plan
from grain_sft.layout.packing import ALGORITHMS, BY_EPOCH, TIES
from grain_sft.layout.pieces import Ints, Pieces, Runs, ShardOffsets
from grain_sft.layout.plan import Plan, Recipe, load_plan, packed_documents
from grain_sft.storage import files

_LONG_DOCUMENTS = ("truncate", "fragment")


class PackedLayout(Layout):
    """Rows that hold several documents, each a segment of its own.

    Advantages: little padding, and no document is cut that fits into a row. Disadvantages: a plan has to be made, from the
    lengths of all documents (about a second for two million); it is kept in the cache, and mapped by all processes.

    Args:
      corpus: whose documents; see `Corpus.documents`.
      sequence_length: of a row.
      algorithm: "best_fit_decreasing" (OLMo-core's `NumpyPackedFSLDataset`), "first_fit_decreasing",
        "shuffled_best_fit" (anew each epoch), "multipack" (OpenChat's batches, anew each epoch), or
        "concat_then_split" (documents are cut; for comparison).
      long_documents: "truncate" to the first `sequence_length` tokens, or "fragment" into pieces of it.
      source_group_size: consecutive shards whose documents are packed together. With "multipack" and
        "shuffled_best_fit", all are.
      ties: order of documents of equal length: "stable", the same on every machine; "numpy", as OLMo-core's sort gives
        it here and now (it depends on the CPU and on numpy's version); or "numpy:avx512", "numpy:avx2" or
        "numpy:baseline", as it gives it on a CPU with AVX-512, with AVX2, or with neither, under this numpy. A CPU plays
        those that ask for no more than it has.
      max_segments: documents a row at most.
      boundaries: "auto" (the corpus's own), or "eos": from the tokens alone, file by file, as OLMo-core finds them.
      bos_token_id: with it, an EOS ends a document only where it follows.
      seed, epochs: of the algorithms that pack each epoch anew; the rows of all epochs are numbered one after the
        other, and meant to be read in that order.
      batch_rows: rows of a global batch (multipack).
      cache_dir: where plans are kept, a folder or a URL in a bucket; None: the cache folder.

    Raises:
      LayoutError: arguments that don't fit, nothing to pack, or ties of a CPU that can't be played here.
      CorpusError, CorpusFileError: the documents can't be found.

    Attributes:
      documents_content: hash of all content that decides where the documents are; see `Documents.content`.
      tokens_content: hash of every token, where documents are found by EOS alone.
    """

    kind = "packed"
    follows_documents = True
    plans: Sequence[Plan] = ()

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        *,
        algorithm: str = "best_fit_decreasing",
        long_documents: str = "truncate",
        source_group_size: int = 1,
        ties: str = "stable",
        max_segments: int | None = None,
        boundaries: str = "auto",
        bos_token_id: int | None = None,
        seed: int = 0,
        epochs: int = 1,
        batch_rows: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.corpus = corpus
        self.sequence_length = as_sequence_length(sequence_length)
        _choice("algorithm", algorithm, tuple(ALGORITHMS))
        _choice("long_documents", long_documents, _LONG_DOCUMENTS)
        _choice("ties", ties, TIES)
        _choice("boundaries", boundaries, ("auto", "eos"))
        by_epoch = algorithm in BY_EPOCH
        self.epochs = as_integer("epochs", epochs, 1, LayoutError)
        if not by_epoch and self.epochs > 1:
            raise LayoutError(
                f"epochs={epochs}: algorithm {algorithm} packs every epoch the same. Let the sampler count epochs, or choose "
                f"{' or '.join(BY_EPOCH)}."
            )
        if max_segments is not None:
            max_segments = as_integer("max_segments", max_segments, 1, LayoutError)
            if algorithm in ("multipack", "concat_then_split"):
                raise LayoutError(f"max_segments={max_segments}: algorithm {algorithm} does not bound documents a row.")
        group = as_integer("source_group_size", source_group_size, 1, LayoutError)
        self.recipe = Recipe(
            sequence_length=self.sequence_length,
            algorithm=algorithm,
            long_documents=long_documents,
            source_group_size=len(corpus.shards) if by_epoch else group,
            ties=ties,
            max_segments=max_segments,
            boundaries=boundaries,
            bos_token_id=None if bos_token_id is None else as_integer("bos_token_id", bos_token_id, 0, LayoutError),
            seed=as_integer("seed", seed, 0, LayoutError),
            batch_rows=as_integer("batch_rows", batch_rows, 1, LayoutError),
        )
        self._folder = None if cache_dir is None else files.normalize(cache_dir)
        self._olmo: OlmoPlan | None = None
        self._load()

    @classmethod
    def from_olmo_core(
        cls,
        corpus: Corpus,
        sequence_length: int,
        work_dir: str | os.PathLike[str],
        *,
        long_documents: str = "truncate",
        source_group_size: int = 1,
        bos_token_id: int | None = None,
        paths: Sequence[str | os.PathLike[str]] | None = None,
        use_array_if_local: bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> PackedLayout:
        """The rows of a plan that OLMo-core 3.0.0 made, whatever CPU it sorted on.

        Args:
          corpus, sequence_length, long_documents, source_group_size, bos_token_id: as OLMo-core had them.
          work_dir: OLMo-core's, in which `dataset-common` is.
          paths: of the token files as OLMo-core was given them, where these differ from the corpus's.
          use_array_if_local: as OLMo-core was given it.
          cache_dir: where the plan is kept once it was checked; None: the cache folder.

        Raises:
          LayoutError: no such plan, a damaged one, or one of other documents.
          CorpusError, CorpusFileError: the documents can't be found.
          StorageError: the plan can't be read.
        """
        given = [shard.path for shard in corpus.shards] if paths is None else [os.fspath(path) for path in paths]
        layout = cls.__new__(cls)
        layout.corpus = corpus
        layout.sequence_length = as_sequence_length(sequence_length)
        layout.epochs = 1
        recipe = Recipe(
            sequence_length=layout.sequence_length,
            long_documents=_choice("long_documents", long_documents, _LONG_DOCUMENTS),
            source_group_size=as_integer("source_group_size", source_group_size, 1, LayoutError),
            boundaries="auto" if from_boundaries(given, use_array_if_local) else "eos",
            bos_token_id=None if bos_token_id is None else as_integer("bos_token_id", bos_token_id, 0, LayoutError),
        )
        layout._folder = None if cache_dir is None else files.normalize(cache_dir)
        layout._olmo = find_plan(corpus, recipe, Path(work_dir), given, use_array_if_local)
        layout.recipe = dataclasses.replace(recipe, plan=layout._olmo.digest)
        layout._load()
        return layout

    def _load(self) -> None:
        olmo = None if self._olmo is None else functools.partial(read_plan, self._olmo, self.corpus, self.recipe)
        documents = self.recipe.finder(self.corpus)
        self.plans = [
            load_plan(
                self.corpus, dataclasses.replace(self.recipe, epoch=epoch), self._folder, olmo, documents=documents
            )
            for epoch in range(self.epochs)
        ]
        self.documents_content, self.tokens_content = documents.content, documents.tokens
        self._offsets = ShardOffsets(self.corpus)
        self._ends: Ints = np.cumsum([len(plan.ends) for plan in self.plans])
        self._begins: Ints = np.append(0, self._ends)
        self._count = int(self._ends[-1])
        if not self._count:
            raise LayoutError(
                f"{self.recipe.algorithm} leaves no row: {self.plans[0].counts['documents']} documents don't fill one batch "
                f"of {self.recipe.batch_rows} rows of {self.sequence_length} tokens."
            )

    def __len__(self) -> int:
        return self._count

    @property
    def packing(self) -> Recipe:  # type: ignore[override]
        """Options of the packing."""
        return self.recipe

    @property
    def highest_token(self) -> int | None:
        """Of the corpus, where the plans know it."""
        known = [plan.highest_token for plan in self.plans]
        return None if None in known else max(known)  # type: ignore[type-var]

    @property
    def mean_segments(self) -> float:
        """Segments a row, on average."""
        return float(sum(int(plan.ends[-1]) for plan in self.plans if len(plan.ends))) / len(self)

    @functools.cached_property
    def statistics(self) -> dict[str, int]:
        """Counts of all epochs together: rows, tokens held, padding, documents dropped and cut, segments a row."""
        found = dict.fromkeys(("rows", "tokens", "padding", "segments", "max_segments"), 0)
        for plan in self.plans:
            rows, tokens = len(plan.ends), int(plan.length.sum(dtype=np.int64))
            segments = np.diff(plan.ends, prepend=0)
            found["rows"] += rows
            found["tokens"] += tokens
            found["padding"] += rows * self.sequence_length - tokens
            found["segments"] += int(plan.ends[-1]) if rows else 0
            found["max_segments"] = max(found["max_segments"], int(segments.max(initial=0)))
            for name, count in plan.counts.items():
                found[name] = found.get(name, 0) + count
        return found

    @functools.cached_property
    def documents(self) -> Documents:
        """Documents that are packed: the corpus's own, or those found by the options `boundaries` and `bos_token_id`."""
        if self.recipe.boundaries == "auto" and self.recipe.bos_token_id is None:
            return self.corpus.documents
        return packed_documents(self.corpus, self.recipe.boundaries, self.recipe.bos_token_id)

    @property
    def num_documents(self) -> int:
        """Number of `documents`, without finding them."""
        return self.plans[0].counts["documents"]

    @functools.cached_property
    def sources(self) -> Ints | None:
        """Input and line of each of `documents`. A document that is not one of the corpus's own has those of the one that its
        first token is in, or that ends before it."""
        sources = sources_of(self.corpus)
        if sources is None or (self.recipe.boundaries == "auto" and self.recipe.bos_token_id is None):
            return sources
        found, own = self.documents.start, self.corpus.documents.start
        assert self.corpus.sources is not None
        return self.corpus.sources[np.maximum(own.searchsorted(found, side="right") - 1, 0)]

    def epoch_of(self, rows: Ints) -> tuple[Ints, Ints]:
        epoch = self._ends.searchsorted(rows, side="right")
        return epoch, rows - self._begins[epoch]

    def runs(self, row: int) -> Runs:
        """What a row is read from."""
        plan, segments = self._segments_of(row)
        return self._offsets.runs(plan.start[segments].tolist(), plan.length[segments].tolist())

    def pieces(self, rows: Ints) -> Pieces:
        if len(self.plans) == 1 or not len(rows):
            return self._offsets.pieces(*self._segments(self.plans[0], rows))
        epoch, local = self.epoch_of(rows)
        columns: list[tuple[Ints, ...]] = []
        for number in np.unique(epoch).tolist():
            here = np.flatnonzero(epoch == number)
            row, *rest = self._segments(self.plans[number], local[here])
            columns.append((here[row], *rest))
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return self._offsets.pieces(*(column[order] for column in joined))

    @staticmethod
    def _segments(plan: Plan, rows: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """(row, column, start, length, segment, document) of every segment of `rows`, which count from 0 in this plan."""
        ends = plan.ends[rows]
        begins = plan.ends[rows - 1]
        begins[rows == 0] = 0
        counts = ends - begins
        row = np.arange(len(rows)).repeat(counts)
        firsts = counts.cumsum() - counts
        within = np.arange(len(row)) - firsts[row]
        piece = begins[row] + within
        length = plan.length[piece].astype(np.int64)
        before = length.cumsum() - length
        return row, before - before[firsts][row], plan.start[piece], length, within + 1, plan.document[piece]

    def _segments_of(self, row: int) -> tuple[Plan, slice]:
        """The plan that a row is of, and its segments there."""
        plan = self.plans[0]
        if len(self.plans) > 1:
            epoch, local = self.epoch_of(np.array(row))
            plan, row = self.plans[int(epoch)], int(local)
        return plan, slice(plan.ends.item(row - 1) if row else 0, plan.ends.item(row))

    def __getstate__(self) -> dict[str, object]:
        return {
            name: vars(self)[name] for name in ("corpus", "sequence_length", "recipe", "epochs", "_folder", "_olmo")
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._load()

    def rows_of_documents(self, documents: Ints) -> Ints:
        self._check_documents(documents)
        found = []
        for plan, before in zip(self.plans, self._begins, strict=False):
            pieces = np.flatnonzero(np.isin(plan.document, documents))
            found.append(plan.ends.searchsorted(pieces, side="right") + before)
        return np.unique(np.concatenate(found))

    def left_out(self) -> list[LeftOut]:
        found, length = self.statistics, self.sequence_length
        epochs = f" in {self.epochs} epochs" if self.epochs > 1 else ""
        lines: list[LeftOut] = [
            (f"truncated to {length:,} tokens{epochs}", found["cut_documents"], found["cut_tokens"]),
            (f"dropped{epochs}", found["dropped_documents"], found["dropped_tokens"]),
            (f"split into several segments{epochs}", self.split_documents, 0),
            (f"padding of rows{epochs}", None, found["padding"]),
        ]
        if self.recipe.boundaries == "auto":
            lines.append(("in no document", None, self.corpus.num_tokens - int(self.corpus.documents.length.sum())))
        return lines

    @property
    def split_documents(self) -> int:
        """Documents of which rows hold several pieces, counted over all epochs."""
        return sum(int(np.count_nonzero(np.bincount(plan.document) > 1)) for plan in self.plans)

    def _tokens_hash(self) -> str | None:
        return self.tokens_content

    def _rows_receipt(self) -> str:
        columns = ([np.diff(plan.ends, prepend=0), plan.start, plan.length] for plan in self.plans)
        return hash_of_rows(self, self.kind, columns)

    def __repr__(self) -> str:
        """What decides the rows and nothing else: Grain compares this when it restores an iterator."""
        fields = {name: value for name, value in vars(self.recipe).items() if name != "epoch"}
        if self.recipe.plan is None:
            del fields["plan"]
        made_by = self.recipe.made_by
        if made_by is not None:
            fields["numpy"] = f"{made_by['version']} {made_by['sort']}"
        listed = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return f"PackedLayout({listed}, epochs={self.epochs}, rows={len(self)})"


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise LayoutError(f"{name}={value!r}: expected one of {', '.join(choices)}.")
    return value
