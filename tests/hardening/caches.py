"""Corpora of equal sizes and equal ends, and everything that the package keeps of them in its cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sft_files

from grain_sft import IndexSampler, NpyDataSource, PackedLayout, PaddedLayout, open_corpus
from grain_sft.corpus import content
from grain_sft.corpus import documents as documents_module
from grain_sft.replay.learning_rate import supervised_ratio
from grain_sft.sampling.orders import stored

TOKENS = 10_000
ENDS = 2_500  # tokens at each end that all corpora have in common; 4 KiB of uint16 are 2,048
EOS, BOS = sft_files.EOS, 1
LENGTH = 128
EPISODES = 900  # 16 bytes each in the index, of which the first and the last 256 are among its ends


def keep_everything(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Have caches keep what small and new files, and short orders, are made into."""
    patch.setenv("GRAIN_SFT_CACHE_DIR", str(cache))
    patch.setattr(documents_module, "_KEPT_FROM", 0)
    patch.setattr(content, "_REMEMBERED_FROM", 0)
    patch.setattr(content, "_SETTLED", -1.0)
    patch.setattr(stored, "IN_MEMORY_ROWS", 1)


def write_plain(folder: Path, number: int) -> None:
    """Two files of tokens whose documents end at an EOS, which stand elsewhere in every corpus."""
    folder.mkdir(parents=True)
    common, own = np.random.default_rng(0), np.random.default_rng([1, number])
    for part in range(2):
        tokens = common.integers(3, 50_000, TOKENS)
        tokens[::40] = EOS
        middle = slice(ENDS, TOKENS - ENDS)
        tokens[middle] = own.integers(3, 50_000, TOKENS - 2 * ENDS)
        ends = np.flatnonzero(own.random(TOKENS) < 1 / own.integers(15, 60))
        tokens[ends[(ends >= ENDS) & (ends < TOKENS - ENDS)]] = EOS
        begins = np.flatnonzero(tokens[:-1] == EOS) + 1
        begins = begins[(begins >= ENDS) & (begins < TOKENS - ENDS)]
        tokens[begins[own.random(len(begins)) < 0.7]] = BOS
        tokens[-1] = EOS
        tokens.astype("<u2").tofile(folder / f"{part}.npy")


def write(folder: Path, number: int) -> None:
    """Corpus `number`, in each format; the index and weights of episodes, and the tokens of rows, are its own in the middle."""
    write_plain(folder / "plain", number)
    common, own = np.random.default_rng(2), np.random.default_rng([3, number])
    length = common.integers(2, 30, EPISODES)
    length[300:-300] = own.permutation(length[300:-300])
    ends, total = np.cumsum(length)[:-1], int(length.sum())
    tokens, weights = common.integers(3, 900, total), common.random(total).astype(np.float32)
    weights[2000:-2000] = own.random(total - 4000)
    weights[own.random(total) < 0.3 * (np.abs(np.arange(total) - total // 2) < 2000)] = 0
    docs = list(zip(np.split(tokens, ends), np.split(weights, ends), strict=True))
    sft_files.write_episodes(folder / "episodes", docs)
    rows = common.integers(3, 900, (300, 20))
    rows[100:200] = own.integers(3, 900, (100, 20))
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    sft_files.write_openchat(folder / "openchat", [(row, np.ones(20, np.float32)) for row in rows], **plain)


def layouts_of(folder: Path) -> Iterator[tuple[str, PackedLayout | PaddedLayout]]:
    """Every kind of layout that follows documents, by name."""
    plain = open_corpus(folder / "plain", dtype="uint16", eos_token_id=EOS)
    episodes = open_corpus(folder / "episodes")
    yield "eos", PackedLayout(plain, LENGTH)
    yield "eos, padded", PaddedLayout(plain, LENGTH)
    yield "eos, bos", PackedLayout(plain, LENGTH, bos_token_id=BOS)
    yield "eos, anew", PackedLayout(plain, LENGTH, algorithm="multipack", epochs=2, seed=4)
    yield "files", PackedLayout(episodes, LENGTH, algorithm="first_fit_decreasing")
    yield "files, padded", PaddedLayout(episodes, LENGTH)
    yield "openchat", PaddedLayout(open_corpus(folder / "openchat"), LENGTH)


def used(folder: Path, orders: bool = True) -> dict[str, str]:
    """A hash of all rows of every layout, of the orders, and the share of tokens that take loss."""
    found = {}
    for name, layout in layouts_of(folder):
        arrays = NpyDataSource(layout).read(range(len(layout)))
        digest = hashlib.sha256()
        for array in arrays.values():
            digest.update(np.ascontiguousarray(array).view(np.uint8))
        highest = layout.highest_token if isinstance(layout, PackedLayout) else ""
        found[name] = f"{len(layout)} {highest} {digest.hexdigest()}"
    found["supervised"] = repr(supervised_ratio(open_corpus(folder / "episodes")))
    if orders:
        for epoch in range(2):
            rows = IndexSampler(5_000, global_batch_size=5_000, seed=3, order="olmo").rows(epoch)
            found[f"order {epoch}"] = hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8)).hexdigest()
    return found
