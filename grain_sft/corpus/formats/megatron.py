"""Format megatron: Megatron-LM's indexed datasets. Each is a pair of files, `PREFIX.bin` (tokens) and `PREFIX.idx` (documents).

Each prefix is a shard. A blend is a list of weights and prefixes in turn, such as "0.3 A 0.7 B". A split such as "969,30,1"
divides the sequences of each prefix into subsets. Both are parsed as in these functions of megatron-core 0.16.1:
  - for blends: `get_blend_from_list` (datasets/utils.py);
  - for splits: `parse_and_normalize_split` and `BlendedMegatronDatasetBuilder._build_megatron_dataset_splits`.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Sequence

import numpy as np

from grain_sft.corpus import megatron_index
from grain_sft.corpus.boundaries import BoundaryFile
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.files import check_training, joined_split
from grain_sft.corpus.formats.metadata import DirectoryListing, folders_of_split, is_visible, read_metadata
from grain_sft.corpus.formats.scanning import SUBSETS, ReadOptions, Split, TokenFile, corpus_of, scan_in_threads
from grain_sft.corpus.megatron_index import HEADER_BYTES, IndexHeader
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import describe, files

PREFIX_SUFFIX = ".idx"
"""Suffix of the index of a prefix."""

_TOKENS, _INDEX = ".bin", PREFIX_SUFFIX
_NO_PREFIX = (".npy", ".parquet", ".json", ".csv", ".txt")  # a path with such a suffix is a file of another format
_SPLIT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(,\s*(\d+\.?\d*|\.\d+)\s*){0,2}", re.ASCII)


class Megatron(Format):
    """Format of one prefix, of several prefixes in order, or of a blend of prefixes."""

    expected = "a prefix of .bin and .idx files, either file, a folder of prefixes, or weights and prefixes in turn"
    any_path = lists_paths = takes_lists = True

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        prefixes = self._in_folder(path, listing)
        if prefixes and any(name.endswith(".npy") for name in listing.names(files.parent(prefixes[0]))):
            advice = "Give format='megatron', a prefix or a glob such as '*.npy'."
            raise CorpusError(f"{path}: has .npy files and {prefixes[0]}{_INDEX}. {advice}")
        return path if prefixes or self.detect_list(words_of(path), listing) else None

    def detect_list(self, paths: Sequence[str], listing: DirectoryListing) -> bool:
        """Return whether this is the format of `paths`.

        That is so if they are a blend, if one of them is a prefix or a folder of prefixes, or if each is a file of a prefix.
        """
        if _is_blend(paths):
            return True
        without_suffix = [path for path in paths if path == _stem(path) and not path.endswith(_NO_PREFIX)]
        if without_suffix:
            return any(scan_in_threads(lambda path: self._prefixes(path, listing), without_suffix))
        listing.list_at_once(paths)
        return all(self.owner(path, listing) for path in paths)

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        words = words_of(found)
        if len(words) > 1:  # a blend in one string: `path_remap` has not been applied to its prefixes
            words = [options.remap(word) for word in words]
        return self.read_list(words, options, listing)

    def read_list(self, paths: Sequence[str], options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Open prefixes in order, or a blend of weights and prefixes in turn. All prefixes have one dtype."""
        weights, named = _blend(paths)
        spelled: dict[str, str] = {}  # for each prefix, the first of `paths` that names it
        prefixes: list[str] = []
        found = scan_in_threads(lambda path: self._prefixes(files.absolute(path), listing), named)
        for path, prefixes_of_path in zip(named, found, strict=True):
            # A prefix that is named in several ways, such as A, A.bin and A.idx, is read once. A path that is listed twice is
            # read twice.
            if not weights and spelled.setdefault(_stem(files.absolute(path)), path) != path:
                continue
            if not prefixes_of_path:
                raise CorpusError(f"{path}: neither a prefix of .bin and .idx files nor a folder of them. Give a prefix.")
            if weights and len(prefixes_of_path) > 1:
                raise CorpusError(f"{path}: {len(prefixes_of_path)} prefixes; expected one for each weight. List them.")
            prefixes += prefixes_of_path
        options.check_paths([prefix + suffix for prefix in prefixes for suffix in (_TOKENS, _INDEX)])
        if options.masks is not None:
            raise CorpusError(f"{prefixes[0]}{_TOKENS}: all of its tokens take loss. Leave label_mask_paths out.")
        splits = _splits(prefixes, listing)
        scans = scan_in_threads(lambda prefix: _scan(prefix, options), prefixes, work="Scanning files")
        first, header = scans[0]
        for shard, other in scans:
            if other.stored != header.stored:
                problem = f"{shard.path}: its tokens are {other.stored}, but those of {first.path} are {header.stored}"
                raise CorpusError(f"{problem}. A corpus has one dtype: convert one file with `grain-sft convert`.")
        options.check_dtype(f"{prefixes[0]}{_INDEX}", header.dtype, header.stored.name)
        shards = tuple(shard for shard, _ in scans)
        split = joined_split([shard.path for shard in shards], splits, options)
        # sources.bin lists the documents of the whole prefix, not of a subset
        sources = describe(split.sources) if split.sources and options.split is None else None
        fields = {"sources_file": sources, "weights": weights, "signed": header.stored.kind == "i"}
        return corpus_of(shards, header.dtype, split.metadata, options.eos_token_id, **fields)

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        return TokenFile(path, boundaries=f"{_stem(path)}{_INDEX}", boundaries_kind="megatron", continues=False)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        stem = _stem(path)
        if stem == path:
            return None
        name = files.name_of(stem)
        has_both = len(listing.sidecars(path, f"{name}{_TOKENS}", f"{name}{_INDEX}")) == 2
        return f"{stem}{_TOKENS}" if has_both else None

    def _prefixes(self, path: str, listing: DirectoryListing) -> list[str]:
        """Return [prefix] if `path` is a prefix or ends like one of its files; else the prefixes in the folder `path`."""
        stem = _stem(path)
        return [stem] if stem != path or _is_index(f"{path}{_INDEX}") else self._in_folder(path, listing)

    def _in_folder(self, path: str, listing: DirectoryListing) -> list[str]:
        """Return the sorted prefixes in a folder or, if it has none, in its subfolder train/."""
        for folder in (path, files.join(path, "train")):
            names = listing.names(folder)
            stems = sorted(name.removesuffix(_INDEX) for name in names if name.endswith(_INDEX) and not name.startswith("."))
            prefixes = [files.join(folder, stem) for stem in stems if f"{stem}{_TOKENS}" in names]
            check_training(folder, [f"{prefix}{_TOKENS}" for prefix in prefixes])
            if prefixes:
                return prefixes
        return []


def _splits(prefixes: Sequence[str], listing: DirectoryListing) -> list[Split]:
    """Return a `Split` for each prefix, with the metadata of its folder."""
    listing.list_at_once(prefixes)

    @functools.cache
    def split_of(folder: str) -> Split:
        metadata = read_metadata(folders_of_split(folder), listing)
        # sources.bin does not state which prefix a document is in
        is_only = sum(name.endswith(_INDEX) for name in listing.names(folder)) == 1
        return Split(metadata=metadata, sources=listing.find(folder, "sources.bin") if is_only else "")

    return [dataclasses.replace(split_of(files.parent(prefix)), files=(f"{prefix}{_TOKENS}",)) for prefix in prefixes]


def _scan(prefix: str, options: ReadOptions) -> tuple[Shard, IndexHeader]:
    """Return the shard of a prefix and the header of its index. With `options.split`, the shard holds only the subset."""
    index, tokens = f"{prefix}{_INDEX}", f"{prefix}{_TOKENS}"
    index_stamp = describe(index)
    head = files.read_range(index, 0, HEADER_BYTES, version=index_stamp.version)
    header = megatron_index.parse_header(index, head, index_stamp.size)
    sizes = np.frombuffer(files.read_range(index, HEADER_BYTES, header.pointers_at, version=index_stamp.version), "<i4")
    megatron_index.check_sizes(index, sizes)

    sequences = None if options.split is None else split_range(options.split, options.subset, header.sequences)
    first, stop = sequences or (0, header.sequences)
    # numbers of tokens before the range, in the range, and in the file
    before, num_tokens, total = (int(part.sum(dtype=np.int64)) for part in (sizes[:first], sizes[first:stop], sizes))
    width = header.dtype.itemsize
    stamp = describe(tokens, before * width)
    if stamp.size != total * width:
        problem = f"{tokens}: {stamp.size} bytes, but {index} lists {total} tokens of {width} bytes"
        raise CorpusError(f"{problem}; expected {total * width}. Copy both files again.")
    boundaries = BoundaryFile(**vars(index_stamp), kind="megatron", sequences=sequences)
    return Shard(**vars(stamp), num_tokens=num_tokens, boundaries=boundaries), header


def split_range(split: str, subset: str, count: int, name_prefix: str = "") -> tuple[int, int]:
    """Return the range [first, stop) of a subset of `count` sequences or documents.

    Of 1000 sequences, the split "969,30,1" gives "train" (0, 969) and "valid" (969, 999). `name_prefix` begins the
    names of the options in messages: with "document_", they are `document_split` and `document_subset`.
    """
    expected = f"{name_prefix}split={split!r}: expected up to three numbers, such as '969,30,1'"
    if not _SPLIT.fullmatch(split):
        raise CorpusError(f"{expected}. Fix the split.")
    weights = np.array([*map(float, split.split(",")), 0.0, 0.0][:3])
    if not 0 < sum(weights.tolist()) < math.inf:
        raise CorpusError(f"{expected}, finite and at least one of them above 0. Fix the split.")
    bounds = [0, *itertools.accumulate((weights / weights.sum()).tolist())]
    i = SUBSETS.index(subset)
    if bounds[i + 1] <= bounds[i]:
        raise CorpusError(f"{name_prefix}split={split!r} has nothing for {name_prefix}subset={subset!r}. Open another subset.")
    return round(bounds[i] * float(count)), round(bounds[i + 1] * float(count))


def _blend(paths: Sequence[str]) -> tuple[tuple[float, ...], list[str]]:
    """Return the weights and the prefixes of a blend. If `paths` are not a blend, return () and the paths."""
    words = [path.strip() for path in paths]
    if not _is_blend(words):
        return (), words
    if list(map(_is_number, words)) != [True, False] * (len(words) // 2):
        expected = "expected weights and prefixes in turn, such as '0.3 A 0.7 B', or prefixes alone"
        raise CorpusError(f"{shortened(' '.join(words))!r}: {expected}.")
    weights = tuple(map(float, words[::2]))
    if not (all(0 <= weight < math.inf for weight in weights) and max(weights) > 0):
        raise CorpusError(f"weights {weights} of a blend: expected finite numbers, 0 or more, one above 0. Fix them.")
    return weights, words[1::2]


def _is_blend(words: Sequence[str]) -> bool:
    """Return whether `words` are a blend, such as ["0.3", "A", "0.7", "B"], or a malformed blend, which `_blend` refuses.

    Words with numbers elsewhere than before each prefix are a malformed blend, unless every number is the name of a file.
    """
    are_numbers = list(map(_is_number, words))
    if len(words) < 2 or not any(are_numbers):
        return False
    if are_numbers == [True, False] * (len(words) // 2):
        return True
    return not all(os.path.exists(word) or _is_index(f"{word}{_INDEX}") for word in filter(_is_number, words))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def words_of(text: str) -> list[str]:
    """Return the words of a blend such as "0.3 a 0.7 b"; [text] if `text` is one path."""
    words = text.split()
    if len(words) < 2 or not _is_number(words[0]) or os.path.exists(text) or _is_index(f"{text}{_INDEX}"):
        return [text]
    return words


def _stem(path: str) -> str:
    """Return the prefix of a .bin or .idx file; `path` itself for another file."""
    return path.removesuffix(_TOKENS).removesuffix(_INDEX)


def _is_index(path: str) -> bool:
    """Return whether the index `path` exists. `A.npy.idx` does not count, because `A.npy` is a file of another format."""
    return not path.removesuffix(_INDEX).endswith(_NO_PREFIX) and is_visible(path)
