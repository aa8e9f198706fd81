"""Corpora of preference pairs, written by numpy and not by grain_sft's writers."""

import json

import numpy as np

PAD = 0


def make_pairs(count, seed):
    """Return `count` random pairs. A pair is [prompt, chosen, rejected], lists of token ids, some of them empty."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 40, (count, 3)) * (random.random((count, 3)) > 0.05)
    sizes[sizes.sum(axis=1) == 0, 1] = 1
    return [[random.integers(1, 250, size).tolist() for size in row] for row in sizes]


def write_pairs(folder, pairs, shards=2):
    """Write a corpus in format pairs and return its folder. Prompts take no loss."""
    for number, some in enumerate(np.array_split(np.arange(len(pairs)), shards)):
        home = folder / "train" / f"shard_{number:05d}"
        home.mkdir(parents=True)
        tokens, mask, entries = [], [], []
        for pair in (pairs[index] for index in some):
            entries.append([len(tokens), *map(len, pair)])
            for part, ids in enumerate(pair):
                tokens += ids
                mask += [part > 0] * len(ids)
        np.array(tokens, np.uint32).tofile(home / "tokens.bin")
        np.array(mask, np.uint8).tofile(home / "mask.bin")
        np.array(entries, np.uint64).tofile(home / "pairs.idx")
    metadata = {"eot_token_id": 2, "pad_token_id": PAD, "token_dtype": "uint32"}
    (folder / "dataset_metadata.json").write_text(json.dumps(metadata))
    return folder
