"""Reader of OLMo-core's plans of packed rows: files that `NumpyPackedFSLDataset` (3.0.0) writes to `WORK_DIR/dataset-common`.

OLMo-core packs each group of source files by itself. A piece is the part of a document that one row holds. The plan of a group
is three files of raw uint64:
  document-indices-L-HASH.npy       (first token, end) of each piece, longest piece first; token 0 is the first token of the
                                    group's first file;
  documents-by-instance-L-HASH.npy  indices of pieces in document-indices, row after row;
  instance-offsets-L-HASH.npy       (first entry, end) of each row in documents-by-instance.
For rows of 10 tokens, documents of 6, 10 and 4 tokens are the pieces (6, 16), (0, 6), (16, 20). Row 0 has piece 0, and row 1
has pieces 1 and 2. So documents-by-instance is 0, 1, 2, and instance-offsets is (0, 1), (1, 3).

L is the sequence length. `_group_hash` returns HASH.
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grain_sft.corpus import Corpus, Documents, Shard, read_unjoined_documents
from grain_sft.errors import LayoutError, StorageError
from grain_sft.layout.packing import PackingOptions
from grain_sft.layout.plan import Columns, check_columns, pieces_to_pack, plan_columns
from grain_sft.storage import files, read_regular
from grain_sft.types import Ints, UInt64s

_WIDTHS = {"document-indices": 16, "instance-offsets": 16, "documents-by-instance": 8}  # number of bytes of an entry

_Group = list[UInt64s]  # flat arrays of the three files, in the order of `_WIDTHS`


@dataclasses.dataclass(frozen=True)
class OlmoPlan:
    """A plan that was found on disk."""

    folder: Path
    hashes: tuple[str, ...]  # HASH of each group, as in the names of its files
    digest: str  # hash of the contents of all files


def find_plan(
    corpus: Corpus, options: PackingOptions, work_dir: Path, paths: Sequence[str], use_array_if_local: bool | None
) -> OlmoPlan:
    """Return the plan that OLMo-core made in `work_dir`. See `PackedLayout.from_olmo_core` for the arguments.

    Raises:
      LayoutError: The plan does not exist, or OLMo-core would misread a token file.
      CorpusFileError, StorageError: The plan or a boundary file cannot be read. HASH depends on the boundary files.
    """
    folder, length, size = work_dir / "dataset-common", options.sequence_length, options.source_group_size
    if len(paths) != len(corpus.shards):
        raise LayoutError(f"paths: {len(paths)}; give one for each of the {len(corpus.shards)} token files.")
    headed = next((shard.path for shard in corpus.shards if shard.data_offset), None)
    if headed is not None:
        raise LayoutError(f"{headed}: has a .npy header, which OLMo-core reads as tokens. Pack it with PackedLayout.")
    hashes = []
    for first in range(0, len(paths), size):
        group, shards = paths[first : first + size], corpus.shards[first : first + size]
        hashes.append(_group_hash(group, shards, options.long_documents, use_array_if_local))
        missing = [path for path in _files_of(folder, length, hashes[-1]) if not path.is_file()]
        if missing:
            sizes = f"{_listed(group)} with {_listed([str(shard.size) for shard in shards])} bytes, sequence_length={length}"
            written = f"{sizes}, long_documents={options.long_documents!r} and source_group_size={size}"
            found = f"OLMo-core 3.0.0 writes it for {written}. The folder has {_plans_in(folder)}"
            fix = "If OLMo-core read the same files under other paths, give these as `paths`."
            raise LayoutError(f"{missing[0]}: no such file. {found}. {fix}")
    return OlmoPlan(folder, tuple(hashes), _digest([_read(folder, length, group_hash) for group_hash in hashes]))


def read_plan(plan: OlmoPlan, corpus: Corpus, options: PackingOptions) -> Columns:
    """Return the columns of a plan, as `make_plan` does.

    Raises:
      LayoutError, StorageError: The files are damaged, belong to other documents, or cannot be read.
    """
    documents = corpus.find_documents(options.boundaries, options.bos_token_id).documents
    size = options.source_group_size
    groups = [_read(plan.folder, options.sequence_length, group_hash) for group_hash in plan.hashes]
    if _digest(groups) != plan.digest:
        raise LayoutError(f"{plan.folder}: the plan changed after it was opened. Make the layout again.")
    columns_of_groups, num_pieces = [], 0
    for number, group in enumerate(groups):
        first, last = corpus.shard_borders[[number * size, min((number + 1) * size, len(corpus.shards))]]
        where = f"{plan.folder}: plan {plan.hashes[number][:12]}"
        start, stop, ends = _rows_of(where, group)
        if (stop > last - first).any():
            problem = f"a document ends at token {stop.max()}, but the files have {last - first} tokens"
            raise LayoutError(f"{where}: {problem}. The plan was made from other files; delete it.")
        columns_of_groups.append((start + first, stop + first, ends + num_pieces))
        num_pieces += len(start)
    start, stop, ends = (np.concatenate(column) for column in zip(*columns_of_groups, strict=True))
    where = f"{plan.folder}: the plan"
    if options.boundaries == "eos" or not all(shard.boundaries for shard in corpus.shards):
        document = _documents_of(where, start, stop, documents, options)
    else:
        # A boundary file lists the parts of documents in its shard, and OLMo-core packs each part as a document. So the pieces
        # are compared with unjoined documents. But the column `document` has the numbers of whole documents.
        _documents_of(where, start, stop, read_unjoined_documents(corpus), options)
        document = np.searchsorted(documents.start, start, side="right") - 1
    columns = plan_columns(documents, document, start, stop - start, ends)
    try:
        check_columns(corpus.num_tokens, options.sequence_length, columns)
    except ValueError as error:
        raise LayoutError(f"{where} is damaged: {error}. Delete it.") from error
    return columns


def from_boundaries(paths: Sequence[str], use_array_if_local: bool | None) -> bool:
    """Return whether OLMo-core found the documents of these files in `.csv.gz` files, and not by EOS.

    OLMo-core looks for EOS only in local files, and not if `use_array_if_local` is False.
    """
    return use_array_if_local is False or any(re.match("[a-z0-9]+://", path.replace("file://", "")) for path in paths)


def _files_of(folder: Path, length: int, group_hash: str) -> list[Path]:
    return [folder / f"{name}-{length}-{group_hash}.npy" for name in _WIDTHS]


def _read(folder: Path, length: int, group_hash: str) -> _Group:
    arrays = []
    for path, width in zip(_files_of(folder, length, group_hash), _WIDTHS.values(), strict=True):
        try:
            data = read_regular(path)
        except OSError as error:
            raise StorageError(f"{path}: can't be read ({error.strerror or error}). Check its permissions.") from error
        if len(data) == 1:  # OLMo-core writes one byte for an empty array
            data = b""
        if len(data) % width:
            raise LayoutError(f"{path}: {len(data)} bytes, not a multiple of {width}: it was cut short. Delete it.")
        arrays.append(np.frombuffer(data, "<u8"))
    return arrays


def _digest(groups: list[_Group]) -> str:
    digest = hashlib.sha256()
    for group in groups:
        for array in group:
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.data)
    return f"sha256:{digest.hexdigest()}"


def _rows_of(where: str, group: _Group) -> tuple[Ints, Ints, Ints]:
    """Return the start and the stop of each piece, row after row, and the number of pieces up to the end of each row."""
    # a number of 2**63 or more becomes negative, and a later check refuses it
    indices, offsets, chosen = (array.astype(np.int64) for array in group)
    start, stop = indices.reshape(-1, 2).T
    begins, ends = offsets.reshape(-1, 2).T
    adjacent = np.array_equal(np.append(begins, len(chosen)), np.append(0, ends))
    if not adjacent or not np.array_equal(np.sort(chosen), np.arange(len(start))):
        raise LayoutError(f"{where} is damaged: expected each of {len(start)} pieces in exactly one row. Delete it.")
    return start[chosen], stop[chosen], ends


def _documents_of(where: str, start: Ints, stop: Ints, documents: Documents, options: PackingOptions) -> Ints:
    """Return, for each piece, the index of its document: int64 [pieces].

    Raises:
      LayoutError: These are not the pieces of `documents`.
    """
    document, first, length = pieces_to_pack(documents, options)
    reason = "It was made from other tokens, or with another EOS, BOS or boundaries. Fix these, or delete the plan."
    number = first.searchsorted(start)  # for each piece of the plan, an index into the pieces to pack
    # `number` is len(first) for a piece that begins after all pieces to pack. So append an entry that equals no piece.
    first, length = np.append(first, np.iinfo(np.int64).max), np.append(length, 0)
    wrong = (first[number] != start) | (length[number] != stop - start)
    if wrong.any():
        at = int(wrong.argmax())
        problem = f"{where} has a piece that begins at token {start[at]} of the corpus and ends before token {stop[at]}"
        raise LayoutError(f"{problem}; expected a document, or the part of a document that fits into a row. {reason}")
    counts = np.bincount(number, minlength=len(document))
    if (counts != 1).any():
        at = document[(counts != 1).argmax()]
        found, expected = (np.count_nonzero(each == at) for each in (document[number], document))
        raise LayoutError(f"{where} has document {at} in {found} pieces; expected {expected} different pieces. {reason}")
    return document[number]


def _group_hash(paths: Sequence[str], shards: Sequence[Shard], long_documents: str, use_array: bool | None) -> str:
    """Return the hash that OLMo-core's `NumpyDatasetBase._get_indices_path` writes into the names of a group's files."""
    parts = [part for path, shard in zip(paths, shards, strict=True) for part in (path, str(shard.size))]
    parts += [long_documents, "uint64"]
    if use_array is not None:
        parts.append(f"use_array_if_local={use_array}")
    for path, shard in zip(paths, shards, strict=True):
        if from_boundaries([path], use_array):
            file = shard.boundaries
            sidecar = file.path if file is not None and file.kind == "csv" else shard.path.replace(".npy", ".csv.gz")
            parts.append(f"metadata={path},sha256={hashlib.sha256(files.read_bytes(sidecar)).hexdigest()}")
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _listed(names: Sequence[str]) -> str:
    """Return at most three names as text, such as "a, b, c, and 5 more,"."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, and {len(names) - 3} more,"


def _plans_in(folder: Path) -> str:
    """Return the sequence lengths of the plans in `folder`, as the end of the sentence "The folder has ..."."""
    if not folder.is_dir():
        return "no plan, because it does not exist"
    lengths = sorted({path.name.split("-")[2] for path in folder.glob("instance-offsets-*.npy")})
    return f"plans of sequence_length {', '.join(lengths)}" if lengths else "no plan"
