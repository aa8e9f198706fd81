"""Corpora of documents drawn from seeds, for tests of packing and for the scripts that make their golden values."""

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.types import Ints

EOS, BOS, PAD = 1, 2, 0
ROW_DIGITS = 4  # golden files keep this number of hexadecimal digits of each row's digest
SHOWN = 2  # golden files list the places, (file, start, stop), of the first 2 and of the last 2 rows

VARIANTS = {
    "avx512": "",
    "avx2": "X86_V4 AVX512_ICL AVX512_SPR AVX512_SKX",
    "baseline": "X86_V3 X86_V4 AVX2 AVX512_ICL AVX512_SPR AVX512_SKX",
}
"""Values of NPY_DISABLE_CPU_FEATURES with which numpy sorts like a CPU with AVX-512, with AVX2, or with neither."""


class PackedCase(NamedTuple):
    """A corpus of token files, and the options with which it is packed."""

    name: str
    lengths: str  # name of the distribution of document lengths: see `lengths_of`
    seed: int
    sequence_length: int
    documents: int  # number of documents of each file
    files: int = 1
    dtype: str = "uint16"
    tail: int = 0  # tokens after the last EOS, in every second file
    long: str = "truncate"  # documents longer than a row are cut; with "fragment", they are divided
    group: int = 1  # number of files that are packed together
    mask: bool = False  # whether there are label masks
    bos: bool = False  # whether each document begins with a BOS; an EOS ends a document only if a BOS follows

    @property
    def has_ties(self) -> bool:
        return not self.lengths.startswith("distinct")


PACKED_CASES = (
    PackedCase("uniform", "uniform", 0, 256, 300, mask=True),
    PackedCase("uniform, three files", "uniform", 1, 128, 150, 3, tail=5),
    PackedCase("uniform, three files together", "uniform", 2, 128, 150, 3, tail=5, group=3, mask=True),
    PackedCase("uniform, groups of 3 and 2", "uniform", 3, 64, 80, 5, dtype="uint32", group=3, tail=9, mask=True),
    PackedCase("log-normal", "log-normal", 4, 512, 500, mask=True),
    PackedCase("log-normal, fragments", "log-normal", 5, 256, 400, long="fragment", mask=True),
    PackedCase("log-normal, four files", "log-normal", 6, 256, 200, 4, dtype="uint32", tail=40, mask=True),
    PackedCase("log-normal, fragments of groups", "log-normal", 7, 128, 150, 4, long="fragment", group=3, tail=3),
    PackedCase("log-normal, many", "log-normal", 8, 1024, 3000, dtype="uint32"),
    PackedCase("all equal", "equal", 9, 128, 300, mask=True),
    PackedCase("all equal, groups", "equal", 10, 64, 101, 4, group=3, tail=1),
    PackedCase("all equal to the row", "row", 11, 32, 70, 2, mask=True),
    PackedCase("all longer", "longer", 12, 64, 90, mask=True),
    PackedCase("all longer, fragments", "longer", 13, 64, 90, 3, long="fragment", mask=True),
    PackedCase("all longer, fragments of groups", "longer", 14, 32, 60, 3, long="fragment", group=3, tail=33),
    PackedCase("half of them empty", "empty", 15, 64, 300, mask=True),
    PackedCase("half of them empty, groups", "empty", 16, 128, 200, 3, group=3, long="fragment", tail=2),
    PackedCase("nothing but EOS", "nothing", 17, 16, 100, 2, mask=True),
    PackedCase("a row of one token", "empty", 18, 1, 40, 2, long="fragment", mask=True),
    PackedCase("BOS", "uniform", 19, 128, 200, 2, bos=True, mask=True),
    PackedCase("BOS, fragments", "log-normal", 20, 64, 150, 3, long="fragment", bos=True, tail=7, mask=True),
    PackedCase("BOS, groups", "log-normal", 21, 256, 150, 3, group=3, bos=True, tail=70),
    PackedCase("distinct", "distinct", 22, 512, 400, mask=True),
    PackedCase("distinct, five files", "distinct", 23, 512, 100, 5, dtype="uint32", tail=4, mask=True),
    PackedCase("distinct, groups", "distinct", 24, 1024, 250, 4, group=3, tail=11, mask=True),
    PackedCase("distinct, one longer", "distinct, one longer", 25, 256, 200, 3, mask=True),
    PackedCase("distinct, one longer, fragments", "distinct, one longer", 26, 256, 60, 3, group=3, long="fragment"),
    PackedCase("distinct, BOS", "distinct", 27, 512, 300, bos=True, tail=3, mask=True),
)

PLAN_CASE = next(case for case in PACKED_CASES if case.name == "uniform, groups of 3 and 2")
"""The case whose plan files, as OLMo-core wrote them, are in tests/golden/olmo_plan."""


def lengths_of(case: PackedCase, random: np.random.Generator) -> list[Ints]:
    length, shape = case.sequence_length, (case.files, case.documents)
    least = 2 if case.bos else 1
    draw: dict[str, Callable[[], Any]] = {
        "uniform": lambda: random.integers(least, length + length // 4, shape),
        "log-normal": lambda: np.maximum(least, random.lognormal(np.log(length / 6), 1, shape).astype(np.int64)),
        "equal": lambda: np.full(shape, length // 3),
        "row": lambda: np.full(shape, length),
        "longer": lambda: random.integers(length + 1, 4 * length, shape),
        "empty": lambda: np.where(random.random(shape) < 0.5, 1, random.integers(1, 2 * length + 2, shape)),
        "nothing": lambda: np.ones(shape, np.int64),
    }
    if not case.lengths.startswith("distinct"):
        return list(draw[case.lengths]().astype(np.int64))
    drawn = np.empty(shape, np.int64)
    for first in range(0, case.files, case.group):  # lengths are distinct among files that are packed together
        some = drawn[first : first + case.group]
        some[...] = (random.permutation(length - 2)[: some.size] + 2).reshape(some.shape)
        if case.lengths != "distinct":
            some[0, int(random.integers(case.documents))] = length + 1  # its fragments are a whole row and one token
    return list(drawn)


def write_case(case: PackedCase, folder: Path) -> tuple[list[Path], list[Path]]:
    """Write the token files and their label masks, if any, and return their paths."""
    random = np.random.default_rng([case.seed, 4])
    tokens_paths, mask_paths = [], []
    for number, lengths in enumerate(lengths_of(case, random)):
        tokens = random.integers(3, 60_000, int(lengths.sum()) + (case.tail if number % 2 == 0 else 0))
        ends = np.cumsum(lengths)
        if case.bos:  # add EOS tokens that end no document, because no BOS follows
            tokens[random.random(len(tokens)) < 0.05] = EOS
            tokens[ends - lengths] = BOS
            if len(tokens) > ends[-1]:
                tokens[ends[-1]] = BOS
                tokens[-1] = 3
        tokens[ends - 1] = EOS
        tokens_paths.append(folder / f"token_ids_part_{number:04d}.npy")
        tokens.astype(case.dtype).tofile(tokens_paths[-1])
        if case.mask:
            mask_paths.append(folder / f"labels_mask_part_{number:04d}.npy")
            (random.random(len(tokens)) < 0.6).tofile(mask_paths[-1])
    return tokens_paths, mask_paths


def digest_of_files(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def row_digest(tokens: npt.ArrayLike, mask: npt.ArrayLike, lengths: npt.ArrayLike, places: npt.ArrayLike) -> str:
    """Return the digest of one packed row: tokens [L], loss mask [L], `olmo_doc_lengths`, and places as (file, start, stop)."""
    parts = [np.asarray(part).astype("<i8").tobytes() for part in (tokens, mask, lengths, places)]
    return f"{zlib.crc32(b'|'.join(parts)):08x}"


def values_of_rows(digests: list[str], places: list[list[list[int]]]) -> dict[str, Any]:
    """Return the values that golden files have for rows, from each row's `row_digest` and its places, (file, start, stop)."""
    last = len(places)
    lengths = [number for row in places for number in (len(row), *(stop - start for _, start, stop in row))]
    shown = sorted({*range(min(SHOWN, last)), *range(max(0, last - SHOWN), last)})
    return {
        "rows": "".join(digest[:ROW_DIGITS] for digest in digests),
        "all": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
        "lengths": row_digest([], [], [], lengths),
        "shown": {str(number): places[number] for number in shown},
    }


def olmo_doc_lengths(segment_ids: npt.NDArray[Any], tokens: npt.NDArray[Any], bos: bool) -> list[int]:
    """Return OLMo-core's `doc_lens` for a row of these segments, where padding counts as a document of its own.

    With `bos`, only a BOS begins a document: padding, and the last fragment of a long document, belong to the document before.
    """
    borders = np.flatnonzero(np.diff(segment_ids)) + 1
    starts = [0, *(border for border in borders.tolist() if not bos or tokens[border] == BOS)]
    return np.diff([*starts, len(tokens)]).tolist()


class MultipackCase(NamedTuple):
    name: str
    lengths: str
    seed: int
    documents: int
    capacity: int
    ranks: int
    epochs: int = 2


MULTIPACK_CASES = (
    MultipackCase("uniform, 8 rows", "uniform", 0, 800, 1024, 8),
    MultipackCase("uniform, 1 row", "uniform", 1, 200, 512, 1),
    MultipackCase("log-normal, 4 rows", "log-normal", 2, 1500, 2048, 4),
    MultipackCase("log-normal, 16 rows", "log-normal", 3, 2000, 4096, 16),
    MultipackCase("log-normal, 100 rows", "log-normal", 4, 4000, 512, 100),
    MultipackCase("many of one token", "small", 5, 3000, 64, 3),
    MultipackCase("all equal", "equal", 6, 500, 300, 7),
    MultipackCase("all as long as the row", "row", 7, 50, 128, 4),
    MultipackCase("fewer than a batch", "row", 8, 3, 128, 4),
    MultipackCase("distinct, 8 rows", "distinct", 9, 900, 1024, 8),
    MultipackCase("distinct, 2 rows", "distinct", 10, 400, 512, 2, 3),
    MultipackCase("distinct, 70 rows", "distinct", 11, 3000, 4096, 70),
    MultipackCase("distinct, 1 row", "distinct", 12, 60, 64, 1),
    MultipackCase("distinct, 5 rows, long", "distinct, long", 13, 500, 1024, 5),
)


def multipack_lengths(case: MultipackCase) -> Ints:
    random, most, count = np.random.default_rng([case.seed, 5]), case.capacity, case.documents
    draw: dict[str, Callable[[], Any]] = {
        "uniform": lambda: random.integers(1, most + 1, count),
        "log-normal": lambda: np.clip(random.lognormal(np.log(most / 10), 1, count).astype(np.int64), 1, most),
        "small": lambda: random.integers(1, 6, count),
        "equal": lambda: np.full(count, most // 4),
        "row": lambda: np.full(count, most),
        "distinct": lambda: random.permutation(most)[:count] + 1,
        "distinct, long": lambda: most - random.permutation(most - 1)[:count],
    }
    return draw[case.lengths]().astype(np.int64)


def rows_digest(batches: list[list[list[int]]]) -> str:
    return hashlib.sha256(json.dumps(batches, separators=(",", ":")).encode()).hexdigest()[:16]
