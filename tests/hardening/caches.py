"""Corpora of equal sizes and equal ends, and everything that the package keeps of them in its cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from grain_sft import IndexSampler, NpyDataSource, PackedLayout, PaddedLayout, open_corpus
from grain_sft.corpus import content, eos_scan
from grain_sft.replay.learning_rate import supervised_ratio
from grain_sft.sampling.orders import stored

TOKENS = 10_000
ENDS = 2_500  # tokens at each end that all corpora have in common; 4 KiB of uint16 are 2,048
EOS, BOS = 1, 2
LENGTH = 128
EPISODES = 900  # 16 bytes each in the index, of which the first and the last 256 are among its ends


def keep_everything(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Have caches keep what small and new files, and short orders, are made into."""
    patch.setenv("GRAIN_SFT_CACHE_DIR", str(cache))
    patch.setattr(eos_scan, "_KEPT_FROM", 0)
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


def write_episodes(folder: Path, number: int) -> None:
    """A corpus whose index and weights differ from those of others in the middle only."""
    place = folder / "train" / "shard_00000"
    place.mkdir(parents=True)
    common, own = np.random.default_rng(2), np.random.default_rng([3, number])
    length = common.integers(2, 30, EPISODES)
    middle = slice(300, EPISODES - 300)
    length[middle] = own.permutation(length[middle])
    weights = common.random(int(length.sum())).astype("<f4")
    weights[2000:-2000] = own.random(len(weights) - 4000)
    weights[own.random(len(weights)) < 0.3 * (np.abs(np.arange(len(weights)) - len(weights) // 2) < 2000)] = 0
    (common.integers(3, 900, int(length.sum()))).astype("<u4").tofile(place / "tokens.bin")
    weights.tofile(place / "mask_weighted.bin")
    np.stack([length.cumsum() - length, length], 1).astype("<u8").tofile(place / "episodes.idx")
    stated = {"token_dtype": "uint32", "eot_token_id": EOS, "pad_token_id": 0}
    (folder / "dataset_metadata.json").write_text(json.dumps(stated))


def write_openchat(folder: Path, number: int) -> None:
    """A Parquet file whose tokens differ from those of others in the middle only."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True)
    common, own = np.random.default_rng(4), np.random.default_rng([5, number])
    rows = [common.integers(3, 900, 20) for _ in range(300)]
    for row in rows[100:200]:
        row[:] = own.integers(3, 900, 20)
    labels = [np.append(row[1:], -100) for row in rows]
    lists, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    columns = {
        "total_length": pa.array([20] * len(rows), pa.int32()),
        "num_seqs": pa.array([1.0] * len(rows), pa.float32()),
        "seqlens": pa.array([[20]] * len(rows), lists),
        "nz_input_ids": pa.array(rows, lists),
        "nz_position_ids": pa.array([np.arange(20)] * len(rows), lists),
        "nz_shifted_label_ids": pa.array(labels, lists),
        "nz_shifted_loss_weights": pa.array([[1.0] * 19 + [0.0]] * len(rows), floats),
    }
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(pa.table(columns), folder / "openchat.train.parquet", **plain)


def write(folder: Path, number: int) -> None:
    """Corpus `number`, in each format."""
    write_plain(folder / "plain", number)
    write_episodes(folder / "episodes", number)
    write_openchat(folder / "openchat", number)


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
