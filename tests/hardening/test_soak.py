"""In a long run at full speed, no row is wrong, lost or read twice in an epoch, and memory, files and threads stay constant.

This command runs for an hour: GRAIN_SFT_SOAK=3600 pytest -n0 -s tests/hardening/test_soak.py
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from children import run

import grain_sft
from grain_sft import IndexSampler, NpyDataSource, PackedLayout, Pipeline, WindowLayout

SECONDS = float(os.environ.get("GRAIN_SFT_SOAK", "2"))
GROWTH = 32  # MB by which memory may grow, because batches are read ahead and garbage is collected late
EOS, LENGTH, BATCH = 1, 512, 16
FILES, TOKENS = 64, 1 << 16  # number of files, and of tokens in each: an epoch takes 1 to 2 s
SAMPLES = 200  # number of times that memory, files and threads are measured


def write(folder: Path) -> None:
    for number in range(FILES):
        random = np.random.default_rng(number)
        tokens = random.integers(1000, 1 << 24, TOKENS, np.uint32)
        ends = np.cumsum(random.integers(40, 400, TOKENS // 400))
        tokens[ends[ends < TOKENS] - 1] = tokens[-1] = EOS
        tokens.tofile(folder / f"{number:03d}.npy")


def measure() -> tuple[int, int, int]:
    """Return this process's anonymous memory in bytes, and its numbers of open files and of threads."""
    text = Path("/proc/self/status").read_text()
    anonymous = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))
    return anonymous, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def soak(pipeline: Pipeline, seconds: float) -> dict[str, object]:
    """Read batches for `seconds`, and on to the end of the epoch. Return the counts of rows and the measurements."""
    source = pipeline.source
    tokens = source.read(range(len(source)))["tokens"]
    assert len(np.unique(tokens, axis=0)) == len(source), "two rows are equal"
    times, wrong = np.zeros(len(source), np.int64), 0  # times[row]: number of batches that had the row
    epoch = len(source) // BATCH
    samples, step = [], 0
    begin = time.monotonic()
    sampled = begin - seconds
    batches = pipeline.iter(threads=2)
    while step % epoch or time.monotonic() - begin < seconds:
        inputs, expected = next(batches)["inputs"], pipeline.sampler.rows(step)
        right = (inputs == tokens[expected]).all(axis=1)
        wrong += int(np.count_nonzero(~right))
        np.add.at(times, expected[right], 1)
        step += 1
        if time.monotonic() - sampled >= max(0.2, seconds / SAMPLES):
            sampled = time.monotonic()
            samples.append(measure())
    batches.close()
    warm = samples[len(samples) // 4 :]  # by then all files have been open, and all buffers made
    memory, files, tasks = ([column[0], max(column), column[-1]] for column in zip(*warm, strict=True))
    epochs, rows = step // epoch, step * BATCH
    return {
        "layout": type(source.layout).__name__,
        "epochs": epochs,
        "rows": rows,
        "wrong_rows": wrong,
        "lost_or_doubled_rows": rows - int(times.sum()) + int(np.count_nonzero(times > epochs)),
        "memory_mb": [round(each / 1e6, 1) for each in memory],
        "files": files,
        "threads": tasks,
    }


def main(folder: Path, seconds: float) -> None:
    write(folder)
    corpus = grain_sft.open_corpus(folder, dtype="uint32", eos_token_id=EOS)
    for layout in (WindowLayout(corpus, LENGTH), PackedLayout(corpus, LENGTH, cache_dir=folder / "cache")):
        source = NpyDataSource(layout, max_open_files=40)  # so that files are opened again and again
        sampler = IndexSampler(len(source), global_batch_size=BATCH, seed=7)
        pipeline = Pipeline(source, sampler, [grain_sft.NgramFilter(), grain_sft.ShiftTargets()])
        print(json.dumps(soak(pipeline, seconds / 2)), flush=True)


def test_a_long_run_accounts_for_every_row_in_constant_memory(tmp_path):
    out = run(Path(__file__), tmp_path, SECONDS, timeout=4 * SECONDS + 400)
    print(out)
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["layout"] for each in found] == ["WindowLayout", "PackedLayout"]
    for each in found:
        assert each["epochs"] >= 1 and each["wrong_rows"] == 0 and each["lost_or_doubled_rows"] == 0, each
        first, most, last = each["memory_mb"]
        assert most <= first + GROWTH and last <= first + GROWTH, each
        assert max(each["files"]) <= each["files"][0] + 41, each  # `max_open_files`, and one that is being opened
        assert max(each["threads"]) == each["threads"][0], each


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
