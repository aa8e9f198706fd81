"""Write olmo_stages.json with the original OLMo-core: batches of runs that change their sequence length or batch size.

In `chunks`, the rows of a `NumpyFSLDataset` are parts of longer rows. In `runs`, `SequenceLengthSchedulerCallback` splits rows,
and `BatchSizeSchedulerCallback` changes the number of rows. Token k of the files is k, and the JSON has the first token of each
row of a batch. Needed: ai2-olmo-core 3.0.0 (with torch, CPU build) and numpy 2.4.6, which give the same bytes.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from making import olmo_epoch, olmo_loader, olmo_windows, options, versions, write_json

CHUNKS = [  # tokens of each file, length, length of the longer rows, rows of a batch, seed
    ((100, 37, 250), 8, 32, 4, 34521),
    ((640,), 16, 64, 6, 7),
    ((333, 129, 64, 65), 4, 12, 5, 0),
    ((999, 1001), 10, 100, 3, 1),
]
RUNS = [  # tokens of each file, length, rows, seed, shortest length, steps of its warm-up, {step: rows from there on}
    ((2000, 1037), 64, 4, 34521, 8, 7, {}),
    ((1500,), 32, 2, 7, 4, 9, {4: 4, 12: 8}),
    ((999, 3001, 64), 16, 8, 3, 16, 0, {6: 16, 11: 4}),
    ((4000,), 128, 2, 0, 16, 5, {4: 4}),
]


def write_tokens(folder: Path, sizes: tuple[int, ...]) -> list[Path]:
    """Write files of `sizes` tokens and return their paths. Token k of all files is k."""
    paths = [folder / f"{number}.npy" for number in range(len(sizes))]
    for path, end, size in zip(paths, np.cumsum(sizes).tolist(), sizes, strict=True):
        np.arange(end - size, end, dtype=np.uint32).tofile(path)
    return paths


def dataset_of(paths: list[Path], length: int, longest: int | None = None) -> Any:
    found = olmo_windows(paths, length, np.uint32, max_target_sequence_length=longest)
    found.prepare()
    return found


def chunks(sizes: tuple[int, ...], length: int, longest: int, batch: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temp:
        dataset = dataset_of(write_tokens(Path(temp), sizes), length, longest)
        loader = olmo_loader(dataset, Path(temp), batch=batch, seed=seed)
        loader.chunk_size = longest // length
        epochs = [[each["input_ids"][:, 0].tolist() for each in olmo_epoch(loader, epoch)] for epoch in (1, 2)]
    return {"files": sizes, "L": length, "longest": longest, "rows": batch, "seed": seed, "epochs": epochs}


def run(sizes: tuple[int, ...], length: int, batch: int, seed: int, shortest: int, steps: int, changes: dict[int, int]) -> Any:
    from olmo_core.data.utils import melt_batch
    from olmo_core.train.callbacks import sequence_length_scheduler as scheduler

    found = []
    with tempfile.TemporaryDirectory() as temp:
        loader = olmo_loader(dataset_of(write_tokens(Path(temp), sizes), length), Path(temp), batch=batch, seed=seed)
        loader.reshuffle(epoch=1)
        batches = iter(loader)
        for step in range(1, 17):
            if step - 1 in changes:
                loader.global_batch_size = changes[step - 1] * length
            each = next(batches, None)
            if each is None:
                break
            if step <= steps:
                each = melt_batch(each, scheduler._get_split_sequence_length(shortest, length, step, steps))
            found.append({"L": each["input_ids"].shape[1], "first": each["input_ids"][:, 0].tolist()})
    return {"files": sizes, "L": length, "seed": seed, "steps": found}


if __name__ == "__main__":
    out = options("olmo_stages.json").out
    made = {"made_by": versions("ai2-olmo-core", "numpy", "python"), "chunks": [chunks(*case) for case in CHUNKS]}
    write_json(out / "olmo_stages.json", made | {"runs": [run(*case) for case in RUNS]}, compact=("chunks", "runs"))
