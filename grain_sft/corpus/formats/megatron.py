"""Format megatron: the indexed datasets of Megatron-LM, `PREFIX.bin` (tokens) and `PREFIX.idx` (see `megatron_index`).

Each prefix is a shard. Blends and splits are those of megatron-core 0.16.1: `get_blend_from_list` (datasets/utils.py),
`parse_and_normalize_split` and `BlendedMegatronDatasetBuilder._build_megatron_dataset_splits`.
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
from grain_sft.corpus.formats.files import joined_split
from grain_sft.corpus.formats.metadata import DirectoryListing, folders_of_split, read_metadata
from grain_sft.corpus.formats.scanning import SUBSETS, ReadOptions, Split, TokenFile, corpus_of, in_threads
from grain_sft.corpus.megatron_index import HEADER_BYTES, IndexHeader
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError, CorpusFileError, RemoteTimeoutError, shortened
from grain_sft.storage import describe, files

PREFIX_SUFFIX = ".idx"
"""Suffix of the file that exists for every prefix."""

_TOKENS, _INDEX = ".bin", PREFIX_SUFFIX
_OTHERS = (".npy", ".parquet", ".json", ".csv", ".txt")  # suffixes that no prefix has
_BLOCK = 1 << 24  # sequences whose sizes are read at once
_SPLIT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(,\s*(\d+\.?\d*|\.\d+)\s*){0,2}", re.ASCII)


class Megatron(Format):
    """Format of one or several prefixes, in order."""

    expected = "a prefix of .bin and .idx files, one of these, a folder of them, or weights and prefixes in turn"
    any_path = lists_paths = takes_lists = True

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        found = self._in_folder(path, listing)
        if found and any(name.endswith(".npy") for name in listing.names(files.parent(found[0]))):
            raise CorpusError(
                f"{path}: holds .npy files and Megatron's {found[0]}{_INDEX}. Give format='megatron', a prefix, or a glob such "
                "as '*.npy'."
            )
        return path if found or self.detect_list(words_of(path), listing) else None

    def detect_list(self, paths: Sequence[str], listing: DirectoryListing) -> bool:
        named = [path for path in paths if path == _stem(path) and not path.endswith(_OTHERS)]
        if _is_blend(paths) or any(_is_index(f"{path}{_INDEX}") or self._in_folder(path, listing) for path in named):
            return True
        return bool(paths) and not named and all(_is_index(f"{_stem(path)}{_INDEX}") for path in paths)

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        words = words_of(found)
        return self.read_list(words if len(words) == 1 else [options.remap(word) for word in words], options, listing)

    def read_list(self, paths: Sequence[str], options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Open prefixes in order, or a blend of weights and prefixes in turn. All have one dtype."""
        if not paths:
            raise CorpusError("an empty list of prefixes: a corpus has at least one.")
        weights, named = _blend(paths)
        # a glob lists A.idx, too: leave out what a listed A.bin stands for
        listed = set(named)
        named = [path for path in named if weights or f"{_stem(path)}{_TOKENS}" not in listed or path.endswith(_TOKENS)]
        found = [self._prefixes(files.absolute(path), listing) for path in named]
        for path, prefixes in zip(named, found, strict=True):
            if weights and len(prefixes) > 1:
                raise CorpusError(f"{path}: holds {len(prefixes)} prefixes; expected one for each weight. Name them.")
        prefixes = [prefix for some in found for prefix in some]
        options.check_paths([prefix + suffix for prefix in prefixes for suffix in (_TOKENS, _INDEX)])
        if options.masks is not None:
            raise CorpusError(f"{prefixes[0]}{_TOKENS}: label_mask_paths: all of its tokens take loss. Leave it out.")
        splits = _splits(prefixes, listing)
        scans = in_threads(lambda prefix: _scan(prefix, options), prefixes, work="Scanning files")
        first, header = scans[0]
        for shard, other in scans:
            if other.stored != header.stored:
                raise CorpusError(
                    f"{shard.path}: its tokens are {other.stored}, but those of {first.path} are {header.stored}. All files "
                    "of a corpus have one dtype: convert one of them with `grain-sft convert`."
                )
        options.check_dtype(f"{prefixes[0]}{_INDEX}", header.dtype, header.stored)
        shards = tuple(shard for shard, _ in scans)
        split = joined_split([shard.path for shard in shards], splits, options)
        sources = describe(split.sources) if split.sources and options.split is None else None
        fields = {"sources_file": sources, "weights": weights, "signed": header.signed}
        return corpus_of(shards, header.dtype, split.metadata, options.eos_token_id, **fields)

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        return TokenFile(path, boundaries=f"{_stem(path)}{_INDEX}", boundaries_kind="megatron", continues=False)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        stem = _stem(path)
        pair = [files.name_of(stem) + suffix for suffix in (_TOKENS, _INDEX)]
        return f"{stem}{_TOKENS}" if stem != path and len(listing.sidecars(path, *pair)) == len(pair) else None

    def _prefixes(self, path: str, listing: DirectoryListing) -> list[str]:
        """Return the prefix of a path, or the prefixes in a folder."""
        stem = _stem(path)
        if stem != path or _is_index(f"{path}{_INDEX}"):
            return [stem]
        found = self._in_folder(path, listing)
        if not found:
            raise CorpusError(
                f"{path}: neither {files.name_of(path)}{_INDEX} nor a folder of .bin and .idx files. Give a prefix."
            )
        return found

    def _in_folder(self, path: str, listing: DirectoryListing) -> list[str]:
        """Return the prefixes in a folder, or in its train/, sorted; [] where there are none."""
        for folder in (path, files.join(path, "train")):
            names = listing.names(folder)
            stems = sorted(name.removesuffix(_INDEX) for name in names if name.endswith(_INDEX))
            found = [files.join(folder, stem) for stem in stems if f"{stem}{_TOKENS}" in names]
            if found:
                return found
        return []


def _splits(prefixes: Sequence[str], listing: DirectoryListing) -> list[Split]:
    """Return, for each prefix, a split of its one file, with the metadata of its folder. Only a folder with a single prefix has
    sources, since its sources.bin can't tell prefixes apart."""

    @functools.cache
    def split_of(folder: str) -> Split:
        is_only = sum(name.endswith(_INDEX) for name in listing.names(folder)) == 1
        metadata = read_metadata(folders_of_split(folder), listing)
        return Split(metadata=metadata, sources=listing.find(folder, "sources.bin") if is_only else "")

    return [dataclasses.replace(split_of(files.parent(prefix)), files=(f"{prefix}{_TOKENS}",)) for prefix in prefixes]


def _scan(prefix: str, options: ReadOptions) -> tuple[Shard, IndexHeader]:
    """Check the sizes of a prefix's files and return its shard. With a split, the shard has the sequences of the subset."""
    index, tokens = f"{prefix}{_INDEX}", f"{prefix}{_TOKENS}"
    stamp = describe(index)
    head = files.read_range(index, 0, HEADER_BYTES, version=stamp.version)
    header = megatron_index.parse_header(index, head, stamp.size)
    kept = None if options.split is None else split_range(options.split, options.subset, header.sequences)
    bounds = kept or (0, header.sequences)
    ends = np.zeros(3, np.int64)  # tokens before the range, before its end, and before the end of the file
    for first in range(0, header.sequences, _BLOCK):
        last = min(first + _BLOCK, header.sequences)
        data = files.read_range(index, HEADER_BYTES + 4 * first, HEADER_BYTES + 4 * last, version=stamp.version)
        sizes = np.frombuffer(data, "<i4")
        megatron_index.check_sizes(index, sizes, first)
        ends += [sizes[: max(end - first, 0)].sum(dtype=np.int64) for end in (*bounds, header.sequences)]
    before, stop, total = ends.tolist()
    width = header.dtype.itemsize
    found = describe(tokens, before * width)
    if found.size != total * width:
        raise CorpusError(
            f"{tokens}: {found.size} bytes, but {index} lists {total} tokens of {width} bytes; expected {total * width}. A "
            "file was cut short, or is of another corpus. Copy both again."
        )
    boundaries = BoundaryFile(**vars(stamp), kind="megatron", sequences=kept)
    return Shard(**vars(found), num_tokens=stop - before, boundaries=boundaries), header


def split_range(split: str, subset: str, count: int) -> tuple[int, int]:
    """Return the range of `count` sequences or documents that is a subset of a split, such as "969,30,1"."""
    stated = f"split={split!r}: expected up to three numbers, such as '969,30,1'"
    if not _SPLIT.fullmatch(split):
        raise CorpusError(f"{stated}. Fix it.")
    numbers = np.array([*map(float, split.split(",")), 0.0, 0.0][:3])
    if not 0 < sum(numbers.tolist()) < math.inf:
        raise CorpusError(f"{stated}, finite and at least one of them above 0. Fix it.")
    shares = (numbers / numbers.sum()).tolist()
    bounds = [0, *itertools.accumulate(shares)]
    at = SUBSETS.index(subset)
    if bounds[at + 1] <= bounds[at]:
        raise CorpusError(f"split={split!r} has nothing for subset={subset!r}. Open another subset.")
    first, stop = (round(bound * float(count)) for bound in bounds[at : at + 2])
    return first, stop


def _blend(paths: Sequence[str]) -> tuple[tuple[float, ...], list[str]]:
    """Return the weights, or (), and the prefixes of a list. Unlike Megatron's `get_blend_from_list`, a misplaced weight is an
    error instead of a prefix."""
    words = [path.strip() for path in paths]
    if not _is_blend(words):
        return (), words
    if list(map(_is_number, words)) != [True, False] * (len(words) // 2):
        raise CorpusError(
            f"{shortened(' '.join(words))!r}: expected weights and prefixes in turn, such as '0.3 A 0.7 B'. Give each prefix "
            "its weight before it, or prefixes alone."
        )
    weights = tuple(map(float, words[::2]))
    if not (all(0 <= weight < math.inf for weight in weights) and max(weights) > 0):
        raise CorpusError(f"weights {weights} of a blend: expected finite numbers, 0 or more, one above 0. Fix them.")
    return weights, words[1::2]


def _is_blend(words: Sequence[str]) -> bool:
    """Return whether the words are a blend. A number that is also a path is a weight only if weights and prefixes alternate."""
    numbers = list(map(_is_number, words))
    if len(words) < 2 or not any(numbers):
        return False
    named = [word for word, is_number in zip(words, numbers, strict=True) if is_number]
    in_turn = numbers == [True, False] * (len(words) // 2)
    return in_turn or not all(os.path.exists(word) or _is_index(f"{word}{_INDEX}") for word in named)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def words_of(text: str) -> list[str]:
    """Return the weights and prefixes of a blend in one string; [text] if it is not a blend."""
    words = text.split()
    is_path = len(words) < 2 or not _is_number(words[0]) or os.path.exists(text) or _is_index(f"{text}{_INDEX}")
    return [text] if is_path else words


def _stem(path: str) -> str:
    return path.removesuffix(_TOKENS).removesuffix(_INDEX)


def _is_index(path: str) -> bool:
    """Return whether the index of a prefix exists. Its content is checked when it is read."""
    if path.removesuffix(_INDEX).endswith(_OTHERS):
        return False
    try:
        return files.exists(path)
    except RemoteTimeoutError:
        raise
    except CorpusFileError:
        return False
