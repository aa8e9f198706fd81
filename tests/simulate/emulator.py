"""A corpus in the emulator of Cloud Storage, for tests of simulations."""

import numpy as np

import grain_sft

SHARDS, ROWS, LENGTH = 6, 160, 1024
FOLDER = "gs://bucket/simulated/"


def put_windows(client):
    """Write token files of random tokens, `ROWS` rows each, and an index. Return the URL of the index."""
    for shard in range(SHARDS):
        tokens = np.random.default_rng(shard).integers(1, 1000, ROWS * LENGTH).astype(np.uint32)
        client.pipe_file(f"bucket/simulated/{shard}.npy", tokens.tobytes())
    grain_sft.open_corpus(FOLDER, dtype="uint32").save(f"{FOLDER}index.json")
    return f"{FOLDER}index.json"
