"""Documents of a corpus that has boundary files, which list where the documents of each shard begin and end.

A document that continues in the next shard has an entry in the boundary files of both shards. The two entries are joined.
"""

import itertools

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.boundaries import CUTTING_KINDS, BoundaryFile
from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.documents import SOURCE_BYTES, Documents
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError
from grain_sft.storage import MANY_THREADS, ShardReader, hashing, in_threads, read_whole
from grain_sft.types import Ints

Entries = tuple[Ints, Ints]
"""First token and length of each entry of a shard's boundary file: two arrays, int64 [entries].

An entry is a document, or the part of a document that is in this shard.
"""


def read_documents_of_files(corpus: CorpusData) -> tuple[Documents, list[str]]:
    """Return the documents that the boundary files state, and the hash of each file."""
    entries, hashes = _read_entries(corpus)
    # The loop goes from the last shard to the first, because a document may be in more than two shards. The part of a document
    # in shard 4 is joined to its part in shard 3, and then both are joined to its part in shard 2.
    for number, before in reversed(_continued(corpus, entries)):
        start, length = entries[number]
        _, length_before = entries[before]
        length_before[-1] += length[0]
        entries[number] = start[1:], length[1:]
    return _documents(corpus, entries, hashes), hashes


def read_unjoined_documents(corpus: CorpusData, *, by_sequence: bool = False) -> Documents:
    """Return the entries of all boundary files, not joined: a document in two shards stays two entries.

    The documents of Megatron's files are groups of sequences. With `by_sequence`, each sequence is an entry.

    Raises:
      CorpusError: A shard has no boundary file, or a file is damaged.
      CorpusFileError: A file is missing, or not the file that was indexed.
    """
    return _documents(corpus, *_read_entries(corpus, by_sequence=by_sequence))


def _read_entries(corpus: CorpusData, *, by_sequence: bool = False) -> tuple[list[Entries], list[str]]:
    """Return the entries of each shard's boundary file, and the hash of each file. Starts are token offsets in the corpus."""

    def read(shard: Shard, file: BoundaryFile) -> tuple[Entries, str]:
        data = read_whole(file)
        return file.parse(data, shard.num_tokens, by_sequence=by_sequence), hashing.of_bytes(data)

    # on 2 processors, as fast as 2 threads with local files, and 1.4 times as fast as one thread
    results = list(in_threads(read, corpus.shards, boundary_files(corpus), threads=MANY_THREADS))
    first_token = 0
    for shard, ((start, _), _) in zip(corpus.shards, results, strict=True):
        start += first_token
        first_token += shard.num_tokens
    return [entries for entries, _ in results], [file_hash for _, file_hash in results]


def boundary_files(corpus: CorpusData) -> list[BoundaryFile]:
    """Return the boundary file of each shard. Raise a CorpusError if a shard has none."""
    boundaries = []
    for shard in corpus.shards:
        if shard.boundaries is None:
            raise CorpusError(f"{shard.path}: has no boundary file, but other shards have one. Copy its file.")
        boundaries.append(shard.boundaries)
    return boundaries


def _documents(corpus: CorpusData, entries: list[Entries], hashes: list[str]) -> Documents:
    """Return the entries of all shards as documents. `hashes` are those of the boundary files."""
    start = np.concatenate([start for start, _ in entries])
    length = np.concatenate([length for _, length in entries])
    shard_ends = np.cumsum([len(start) for start, _ in entries], dtype=np.int64)
    return Documents(start, length, content=content.content_of_boundaries(corpus, hashes), shard_ends=shard_ends)


def _continued(corpus: CorpusData, entries: list[Entries]) -> list[tuple[int, int]]:
    """Return the pairs (shard, shard before) of shard numbers where the shard's first document began in the shard before.

    "The shard before" is the nearest earlier shard that has entries.

    If `BoundaryFile.continues` is None, the first document of the shard continues unless the shard before ends with an EOS.

    If the corpus has a `sources_file`, the size of that file gives the number of documents. A result with another number is an
    error. If `continues` is None for a shard, three results are tried in this order. The first with the right number counts:
    - If the EOS id is known: documents continue where the shard before does not end with an EOS.
    - All entries that may continue a document do so. So 10 entries, of which 3 may do so, make 7 documents.
    - No entry continues a document. So 10 entries make 10 documents.
    """
    files = boundary_files(corpus)
    touching = _touching(files, entries)
    undecided = [number for number, _ in touching if files[number].continues is None]
    if not undecided and corpus.sources_file is None:
        return touching

    by_eos = None
    if undecided and corpus.eos_token_id is not None:
        pairs = zip(touching, _last_tokens(corpus, [before for _, before in touching]), strict=True)
        by_eos = [pair for pair, token in pairs if files[pair[0]].continues or token != corpus.eos_token_id]
    if corpus.sources_file is None:
        if by_eos is None:
            problem = "can't tell whether its first document began in the shard before"
            raise CorpusError(f"{corpus.shards[undecided[0]].path}: {problem}. Give eos_token_id.")
        return by_eos

    num_entries = sum(len(start) for start, _ in entries)
    num_documents = corpus.sources_file.size // SOURCE_BYTES  # the file has an entry of `SOURCE_BYTES` for each document
    for continued in (by_eos, touching, []) if undecided else (touching,):
        if continued is not None and num_entries - len(continued) == num_documents:
            return continued
    found = f"boundary files hold {num_entries} entries, and {len(touching)} of them may continue a document"
    problem = f"{corpus.sources_file.path}: lists {num_documents} documents, but {found}"
    advice = f", or give the right eos_token_id (found {corpus.eos_token_id})" if undecided else ""
    raise CorpusError(f"{problem}. Copy the files again{advice}.")


def _touching(files: list[BoundaryFile], entries: list[Entries]) -> list[tuple[int, int]]:
    """Return (shard, shard before), as in `_continued`, where the shard's first entry may continue a document.

    It may do so if its boundary file is of a kind that can cut documents, if `continues` is not False, and if no token is
    between this entry and the last entry of the shard before.
    """
    touching = []
    with_entries = [number for number, (start, _) in enumerate(entries) if len(start)]
    for before, number in itertools.pairwise(with_entries):
        (start_before, length_before), (start, _) = entries[before], entries[number]
        may_continue = files[number].kind in CUTTING_KINDS and files[number].continues is not False
        if may_continue and start_before[-1] + length_before[-1] == start[0]:
            touching.append((number, before))
    return touching


def _last_tokens(corpus: CorpusData, shards: list[int]) -> list[int]:
    """Return the last token of each of the shards with the numbers `shards`."""
    ends = np.array([corpus.shards[number].num_tokens - 1 for number in shards], np.int64)
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, max_open_files=1, remote=corpus.remote)
    return reader.values(np.array(shards, np.int64), ends).view(corpus.dtype).reshape(-1).tolist()
