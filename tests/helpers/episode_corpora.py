"""Episode-indexed datasets. Their tokens are not random, so they are the same with every version of numpy."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

EOT = 2
EPISODES_PER_SHARD = 15


class OrderCase(NamedTuple):
    episodes: int
    batch_size: int
    epoch_seed: int
    batches: int


ORDER_CASES = [OrderCase(504, 8, 42, 130), OrderCase(504, 8, 1337, 130), OrderCase(37, 6, 0, 20), OrderCase(5, 8, 3301, 6)]

GPT_CONFIG = {
    "batch_size": 6,
    "block_size": 16,
    "use_loss_mask": True,
    "batch_sampling_mode": "epoch",
    "epoch_seed": 42,
    "epoch_shuffle": True,
    "epoch_drop_last": False,
    "pad_token_id": None,
    "episode_min_tokens": 3,
}
"""Config of the trainer MyPT that all runs of the golden file episode_batches.json share. `CHANGES` has each run's changes."""

CHANGES: dict[str, dict[str, object]] = {
    "a mask": {},
    "a mask, rows in order": {"epoch_shuffle": False},
    "a mask, another pad id": {"pad_token_id": 777, "block_size": 24},
    "weights": {"epoch_seed": 7},
    "no mask": {"use_loss_mask": False},
    "short rows": {"block_size": 4, "batch_size": 5},
}


LENGTHS = [1 + number * 7 % 31 for number in range(40)]
"""Number of tokens of each episode. One of them is 17: a whole row of 16, and the token after it."""


def write_dataset(root: Path, *, weighted: bool = False) -> Path:
    """Write episodes in shards. Five tokens before each episode belong to none. Episodes of two or more tokens all differ."""
    for first in range(0, len(LENGTHS), EPISODES_PER_SHARD):
        folder = root / "train" / f"shard_{first // EPISODES_PER_SHARD:05d}"
        folder.mkdir(parents=True)
        tokens, mask, pairs, at = [], [], [], 0
        for number, length in enumerate(LENGTHS[first : first + EPISODES_PER_SHARD], first):
            place = np.arange(length)
            tokens += [np.full(5, 9), np.append(100 * (number + 1) + place[:-1], EOT)]
            mask += [np.ones(5), (number + place) % 4 / 2 if weighted else (number + place) % 3 > 0]
            pairs.append((at + 5, length))
            at += 5 + length
        np.concatenate(tokens).astype("<u4").tofile(folder / "tokens.bin")
        joined = np.concatenate(mask)
        (joined > 0).astype("u1").tofile(folder / "mask.bin")
        if weighted:
            joined.astype("<f4").tofile(folder / "mask_weighted.bin")
        np.array(pairs, "<u8").tofile(folder / "episodes.idx")
    (root / "dataset_metadata.json").write_text(json.dumps({"token_dtype": "uint32", "eot_token_id": EOT}))
    return root


def write_numbered(root: Path, count: int) -> Path:
    """Write `count` episodes of two tokens: the number of the episode, and EOT."""
    folder = root / "train"
    folder.mkdir(parents=True)
    numbers = np.arange(count)
    np.stack([numbers, np.full(count, EOT)], 1).astype("<u4").tofile(folder / "tokens.bin")
    np.ones(2 * count, "u1").tofile(folder / "mask.bin")
    np.stack([2 * numbers, np.full(count, 2)], 1).astype("<u8").tofile(folder / "episodes.idx")
    return root
