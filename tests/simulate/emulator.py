"""A corpus in the emulator of Cloud Storage, for tests of simulations."""

import numpy as np

import grain_sft

SHARDS, ROWS, LENGTH = 6, 160, 1024
FOLDER = "gs://bucket/simulated/"


def put_windows(client, folder=FOLDER, shards=SHARDS, rows=ROWS, length=LENGTH):
    """Write token files of random tokens, `rows` rows each, and an index. Return the URL of the index."""
    for shard in range(shards):
        tokens = np.random.default_rng(shard).integers(1, 1000, rows * length).astype(np.uint32)
        client.pipe_file(f"{folder.removeprefix('gs://')}{shard}.npy", tokens.tobytes())
    grain_sft.open_corpus(folder, dtype="uint32").save(f"{folder}index.json")
    return f"{folder}index.json"
