"""PackedLayout: rows of one length that hold several documents."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np

from grain_sft.arguments import as_integer, as_paths, check_type
from grain_sft.corpus import Corpus, DocumentFinder
from grain_sft.deprecated import renamed_attribute
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout, RowSegments
from grain_sft.layout.olmo_plan import OlmoPlan, find_plan, from_boundaries, read_plan
from grain_sft.layout.packing import ALGORITHMS, Boundaries, LongDocuments, PackingOptions, Ties
from grain_sft.layout.pieces import LeftOut, Pieces, join_parts, pieces_of
from grain_sft.layout.plan import COUNTS, load_plan, numpy_for_ties
from grain_sft.registry import is_ours
from grain_sft.storage import files
from grain_sft.types import Ints


class PackedLayout(Layout):
    """Rows that hold several documents, each document as a segment of its own.

    An algorithm chooses the documents of each row from their lengths. With rows of 10 tokens, documents of 6, 7, 3 and 4 tokens
    fill two rows: 7 + 3 and 6 + 4. The choice for all rows is a plan. All epochs have one plan, except with an algorithm that
    packs each epoch anew.

    Advantages: rows have little padding, and a document that fits into a row is not cut. Disadvantage: the plan must be made
    before the first row. A plan of two million documents takes about a second, and is cached.

    Args:
      corpus: Corpus whose documents are packed.
      sequence_length: Number of tokens of a row, padding included.
      algorithm: Algorithm that chooses the documents of a row: "best_fit_decreasing" (as in OLMo-core's
        `NumpyPackedFSLDataset`), "first_fit_decreasing", "balanced" (makes rows of similar cost of attention),
        "shuffled_best_fit" (packs each epoch anew), "multipack" (packs OpenChat's batches, each epoch anew),
        "concat_then_split" (cuts documents; for comparison), or package.module:Name.
      long_documents: Treatment of a document longer than a row: cut to the length of a row ("truncate"), or divided into pieces
        of this length ("fragment").
      source_group_size: Number of consecutive shards whose documents are packed together. An algorithm that packs each epoch
        anew packs all shards together.
      ties: Order of documents of equal length. "stable" is the same on every machine. "numpy" is the order of numpy's sort,
        as in OLMo-core. That order depends on the CPU and on numpy's version. "numpy:avx512" is the order on a CPU with
        AVX-512, "numpy:avx2" on a CPU with AVX2 but without AVX-512, and "numpy:baseline" on any other CPU. This machine's CPU
        must have AVX-512 for "numpy:avx512", and AVX2 for "numpy:avx2".
      max_segments: Maximum number of documents in a row; by default any number.
      boundaries: Ends of documents. "auto" takes the documents of the corpus. "eos" ends a document after each EOS token, as
        OLMo-core does for local files, and leaves out the tokens after the last EOS of a file.
      bos_token_id: Id of the BOS token. With it, an EOS ends a document only if a BOS follows; without it, each EOS does.
      seed: Seed of an algorithm that packs each epoch anew.
      epochs: Number of epochs to pack, for an algorithm that packs each epoch anew. The rows of epoch 1 follow those of
        epoch 0, so a run reads each row once.
      batch_rows: Rows of a global batch, for an algorithm that packs whole batches.
      cache_dir: Folder, or URL in a bucket, where plans are kept; None for the cache folder.

    Attributes:
      plan_folder: Folder, or URL in a bucket, of the plans; None for the cache folder.

    Raises:
      LayoutError: The arguments don't fit together, no row can be packed, or this CPU cannot sort in the order of `ties`.
      CorpusError, CorpusFileError: The documents cannot be found.
    """

    kind = "packed"
    follows_documents = True
    finder: DocumentFinder
    packing: PackingOptions
    recipe = renamed_attribute("PackedLayout.recipe", "packing")

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: Annotated[int, msgspec.Meta(ge=1)],
        *,
        algorithm: Annotated[str, ALGORITHMS] = "best_fit_decreasing",
        long_documents: LongDocuments = "truncate",
        source_group_size: Annotated[int, msgspec.Meta(ge=1)] = 1,
        ties: Ties = "stable",
        max_segments: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        boundaries: Boundaries = "auto",
        bos_token_id: Annotated[int, msgspec.Meta(ge=0)] | None = None,
        seed: Annotated[int, msgspec.Meta(ge=0)] = 0,
        epochs: Annotated[int, msgspec.Meta(ge=1)] = 1,
        batch_rows: Annotated[int, msgspec.Meta(ge=1)] = 1,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        entry = ALGORITHMS[algorithm]
        self.epochs = as_integer("epochs", epochs, 1, LayoutError)
        if not entry.packs_per_epoch and self.epochs > 1:
            others = " or ".join(name for name in ALGORITHMS if ALGORITHMS[name].packs_per_epoch)
            problem = f"epochs={epochs}: algorithm {algorithm} packs every epoch the same"
            raise LayoutError(f"{problem}. Give the epochs to the sampler instead, or choose {others}.")
        self.packing = PackingOptions(
            sequence_length,
            algorithm,
            long_documents=long_documents,
            source_group_size=source_group_size,
            ties=ties,
            max_segments=max_segments,
            boundaries=boundaries,
            bos_token_id=bos_token_id,
            seed=seed,
            batch_rows=batch_rows,
        ).checked()
        if max_segments is not None and not entry.bounds_segments:
            problem = f"algorithm {algorithm} can't limit the documents of a row"
            raise LayoutError(f"max_segments={max_segments}: {problem}. Leave it out.")
        if entry.packs_per_epoch:
            self.packing = dataclasses.replace(self.packing, source_group_size=len(corpus.shards))
        self.corpus = corpus
        self._open(cache_dir, None)

    @classmethod
    def from_olmo_core(
        cls,
        corpus: Corpus,
        sequence_length: int,
        work_dir: str | os.PathLike[str],
        *,
        long_documents: LongDocuments = "truncate",
        source_group_size: int = 1,
        bos_token_id: int | None = None,
        paths: Sequence[str | os.PathLike[str]] | None = None,
        use_array_if_local: bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Return the layout of a plan that OLMo-core 3.0.0 made. The CPU that made the plan may be of any kind.

        Args:
          corpus, sequence_length, long_documents, source_group_size, bos_token_id: The values of OLMo-core's run.
          work_dir: OLMo-core's work directory, which has a folder `dataset-common`.
          paths: Paths of the token files in OLMo-core's run; None for the paths of the corpus.
          use_array_if_local: Value of OLMo-core's option of this name; None if the run did not set the option.
          cache_dir: Folder, or URL in a bucket, where the checked plan is kept; None for the cache folder.

        Raises:
          LayoutError: The plan does not exist, is damaged, or holds other documents.
          CorpusError, CorpusFileError: The documents cannot be found.
          StorageError: The plan cannot be read.
        """
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        listed = [shard.path for shard in corpus.shards] if paths is None else as_paths("paths", paths)
        olmo_paths = [os.fspath(path) for path in listed]
        by_files = from_boundaries(olmo_paths, use_array_if_local)
        options = PackingOptions(
            sequence_length,
            long_documents=long_documents,
            source_group_size=source_group_size,
            boundaries="auto" if by_files else "eos",
            bos_token_id=None if by_files else bos_token_id,  # only a search for EOS tokens uses BOS
        ).checked()
        olmo = find_plan(corpus, options, Path(files.normalize(work_dir)), olmo_paths, use_array_if_local)
        layout = cls.__new__(cls)
        layout.corpus, layout.packing, layout.epochs = corpus, dataclasses.replace(options, plan=olmo.digest), 1
        layout._open(cache_dir, olmo)
        return layout

    def _open(self, cache_dir: str | os.PathLike[str] | None, olmo: OlmoPlan | None) -> None:
        """Set the plan of each epoch, and the attributes that depend on plans.

        A plan that is not cached is read from the files of `olmo`, or computed if `olmo` is None.
        """
        corpus, options = self.corpus, self.packing
        self.finder = corpus.find_documents(options.boundaries, options.bos_token_id)
        self.sequence_length, self._olmo = options.sequence_length, olmo
        self.plan_folder = None if cache_dir is None else files.normalize(cache_dir)
        make = None if olmo is None else functools.partial(read_plan, olmo, corpus, options)
        options_by_epoch = (dataclasses.replace(options, epoch=epoch) for epoch in range(self.epochs))
        self.plans = [load_plan(self.finder, of_epoch, self.plan_folder, make) for of_epoch in options_by_epoch]
        self.highest_token = self.plans[0].highest_token
        # first row of each epoch, and the number of rows: [0, 100, 200] for 2 epochs of 100 rows
        self._begins: Ints = np.cumsum([0, *(len(plan.ends) for plan in self.plans)])
        self._num_rows = int(self._begins[-1])  # stored because each batch calls `__len__`: saves 0.1 us a call
        if not self._num_rows:
            batch = f"{options.batch_rows} rows of {self.sequence_length} tokens"
            problem = f"{self.num_documents} documents don't fill one batch of {batch}"
            raise LayoutError(f"{options.algorithm} leaves no row: {problem}. Give a smaller batch_rows.")

    def __len__(self) -> int:
        return self._num_rows

    @property
    def mean_segments(self) -> float:
        return sum(len(plan.start) for plan in self.plans) / len(self)

    @functools.cached_property
    def statistics(self) -> dict[str, int]:
        """Counts of `Layout.statistics` and of `Plan.counts` in one dict, over all epochs."""
        return super().statistics | {name: sum(plan.counts[name] for plan in self.plans) for name in COUNTS}

    @property
    def num_documents(self) -> int:
        return self.plans[0].counts["documents"]

    def epoch_of(self, rows: Ints) -> tuple[Ints, Ints]:
        epoch = self._begins[1:].searchsorted(rows, side="right")
        return epoch, rows - self._begins[epoch]

    def row_segments(self, row: int) -> RowSegments:
        plan = self.plans[0]
        if len(self.plans) > 1:
            epoch, local = self.epoch_of(np.array(row))
            plan, row = self.plans[int(epoch)], int(local)
        segments = slice(plan.ends.item(row - 1) if row else 0, plan.ends.item(row))
        return plan.start[segments].tolist(), plan.length[segments].tolist()

    def pieces(self, rows: Ints) -> Pieces:
        if len(self.plans) == 1:
            return pieces_of(self.corpus, *self.plans[0].segments(rows))
        epoch, local = self.epoch_of(rows)
        return pieces_of(self.corpus, *join_parts(epoch, lambda number, rows: self.plans[number].segments(local[rows])))

    def left_out(self) -> list[LeftOut]:
        """Return what all epochs cut, drop, split and pad, and the number of tokens of the corpus that are in no document."""
        counts, epochs = self.statistics, f" in {self.epochs} epochs" if self.epochs > 1 else ""
        lines: list[LeftOut] = [
            (f"truncated to {self.sequence_length:,} tokens{epochs}", counts["cut_documents"], counts["cut_tokens"]),
            (f"dropped{epochs}", counts["dropped_documents"], counts["dropped_tokens"]),
            (f"split into several segments{epochs}", self.split_documents, 0),
            (f"padding of rows{epochs}", None, counts["padding"]),
        ]
        # in each epoch, every token of a document is in a row, cut or dropped
        in_documents = (counts["tokens"] + counts["cut_tokens"] + counts["dropped_tokens"]) // self.epochs
        return [*lines, ("in no document", None, self.corpus.num_tokens - in_documents)]

    @property
    def split_documents(self) -> int:
        """Number of documents that are split into several segments, summed over epochs."""
        return sum(int(np.count_nonzero(np.bincount(plan.document) > 1)) for plan in self.plans)

    @functools.cached_property
    def _rows_receipt(self) -> str:
        return self._hash_of([np.diff(plan.ends, prepend=0), plan.start, plan.length] for plan in self.plans)

    def __getstate__(self) -> dict[str, object]:
        set_by_open = ("finder", "plans", "_begins")  # large, and cached on disk: `__setstate__` opens them again
        return {name: value for name, value in vars(self).items() if name not in set_by_open}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open(self.plan_folder, self._olmo)

    def __repr__(self) -> str:
        """Return only what decides the rows. Grain compares this text when it restores an iterator."""
        fields = self.packing.stated()
        del fields["epoch"]
        if self.packing.plan is None:
            del fields["plan"]
        if (sorter := numpy_for_ties(self.packing)) is not None:
            fields["numpy"] = f"{sorter['version']} {sorter['sort']}"
        listed = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        # the code of another package may change, and its rows with it: so state a hash of these rows
        rows = len(self) if is_ours(ALGORITHMS[self.packing.algorithm].pack) else self._rows_receipt
        return f"PackedLayout({listed}, epochs={self.epochs}, rows={rows})"
