"""Benchmarks of whole processes: start-up, orders of many rows, and `prepare` compared with SentencePiece alone."""

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import run_program
from grain_sft.bench.texts import texts
from grain_sft.corpus import open_corpus
from grain_sft.demo import docstrings
from grain_sft.errors import StorageError
from grain_sft.prepare import CHAT_TOKENS, train_tokenizer
from grain_sft.storage import write_bytes

IMPORT_GRAIN = "import grain"
SHUFFLE_ROWS, SHUFFLE_FILES = 724_000_000, 950  # rows of 8192 tokens in the OLMo-3 pretraining mix

VOCAB_SIZE = 8000  # pieces of the SentencePiece model that `preparing` trains
CHARACTERS = 330  # mean length of a message, about 100 tokens
_PREPARE = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import sentencepiece
from grain_sft.prepare import Dataset, Request, prepare
conversations, model, out = sys.argv[1:4]
bare = {}
if sys.argv[4] == "bare":
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    with open(conversations, "rb") as file:
        texts = [message["content"] for line in file for message in json.loads(line)["messages"]]
    begin = time.perf_counter()
    tokens = sum(map(len, processor.encode(texts, num_threads=1)))
    bare = {"bare_tokens": tokens, "bare_s": time.perf_counter() - begin}
    del texts
request = Request((Dataset((conversations,)),), "primer", model, "olmo")
before = memory()["peak_mb"]
begin = time.perf_counter()
manifest = prepare(request, out, workers=1)
seconds = time.perf_counter() - begin
counts = manifest["splits"]["train"]
print(json.dumps({**bare, "documents": counts["documents"], "tokens": counts["tokens"], "s": seconds,
                  "mb_before": before, "peak_mb": memory()["peak_mb"]}))
"""
_PIPELINE = """
from grain_sft import IndexSampler, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
begin = time.perf_counter()
source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 8192))
sampler = IndexSampler(len(source), global_batch_size=8, seed=0)
pipeline = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])
"""
_FIRST_BATCH = """
assert next(pipeline.iter(start_step=3))["inputs"].shape == (8, 8192)
print("{}")
"""
_NUMPY = """
import numpy as np
begin = time.perf_counter()
rows = np.arange(int(sys.argv[1]), dtype=np.uint32)
np.random.Generator(np.random.PCG64(1)).shuffle(rows)
print(json.dumps({"seconds": time.perf_counter() - begin, **memory()}))
"""
_EXACT = """
from grain_sft import IndexSampler
begin = time.perf_counter()
sampler = IndexSampler(int(sys.argv[1]), global_batch_size=512, seed=0, order="olmo")
sampler.rows(0)
seconds = time.perf_counter() - begin
for step in range(0, sampler.steps_per_epoch, max(1, sampler.steps_per_epoch // 1000)):
    sampler.rows(step)
print(json.dumps({"seconds": seconds, **memory()}))
"""
_SHUFFLE = """
import statistics
next(pipeline.iter())
seconds = time.perf_counter() - begin
def cost(first):
    times = []
    for step in range(first, first + 200):
        begin = time.perf_counter()
        pipeline[step]
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3
early, late = cost(0), cost(10_000_000)
print(json.dumps({"rows": len(source), "seconds": seconds, "step_0_ms": early, "step_10m_ms": late, **memory()}))
"""


def startup(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield the median seconds of processes that make one batch, and of a process that only imports grain. The processes run
    in turn, and the first turn is not counted."""
    programs = {IMPORT_GRAIN: ('import grain; print("{}")', "")}
    for count in scale.startup_files:
        index = folder / f"startup-{count}.json"
        if not index.exists():
            tokens = folder / f"startup-{count}"
            tokens.mkdir(exist_ok=True)
            for number in range(count):
                np.arange(8192, dtype=np.uint32).tofile(tokens / f"{number:04d}.npy")
            open_corpus(tokens, dtype="uint32").save(index)
        programs[f"first batch of a saved index, {count} files"] = (_PIPELINE + _FIRST_BATCH, str(index))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(scale.repeats + 1):
        for name, program in programs.items():
            times[name].append(run_program(*program)["process_s"])
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    rows = {name: {"s": median, "more_s": median - medians[IMPORT_GRAIN]} for name, median in medians.items()}
    yield Table("startup", "start-up", {"s": "{s:.2f}", "on top of import grain": "{more_s:.2f}"}, rows)


def orders(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield the seconds to the first batch, the time of a step and the memory, for orders of many rows."""
    rows, name = str(scale.order_rows), f"{scale.order_rows:,} rows"
    columns = {"s": "{seconds:.2f}", "MB resident": "{mb:.0f}", "MB at most": "{peak_mb:.0f}"}
    columns |= {"ms a step": "{step_0_ms:.3f}", "at 10,000,000": "{step_10m_ms:.3f}"}
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        figures = {
            f"numpy's own shuffle, {name}": run_program(_NUMPY, rows, cache=cache),
            f"order olmo, first time, {name}": run_program(_EXACT, rows, cache=cache),
            f"order olmo, next time, {name}": run_program(_EXACT, rows, cache=cache),
            f"order shuffle, first batch, {SHUFFLE_ROWS:,} rows": measure_first_batch(Path(cache)),
        }
    yield Table("orders", "orders", columns, figures)


def measure_first_batch(folder: Path) -> dict[str, Any]:
    """Return the seconds, step times and memory of a process that shuffles 724 M rows: 24 TB of sparse files in `folder`."""
    tokens = folder / "sparse"
    tokens.mkdir()
    rows = [SHUFFLE_ROWS // SHUFFLE_FILES + (number < SHUFFLE_ROWS % SHUFFLE_FILES) for number in range(SHUFFLE_FILES)]
    try:
        for number, count in enumerate(rows):
            with (tokens / f"{number:04d}.npy").open("wb") as file:
                file.truncate(count * 8192 * 4)
    except OSError as error:
        message = f"{tokens}: the file system takes no sparse files ({error.strerror}). Give --dir."
        raise StorageError(message) from error
    index = folder / "sparse.json"
    open_corpus(tokens, dtype="uint32").save(index)
    return run_program(_PIPELINE + _SHUFFLE, str(index), cache=str(folder))


def preparing(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield the speed and memory of `prepare` for a tenth of the chats and for all, and the speed of SentencePiece alone; then
    those of plain documents."""
    rows: dict[str, dict[str, Any]] = {}
    count = scale.conversations
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        here = Path(temporary)
        text = "\n".join(entry.text for entry in docstrings())
        model = str(here / "spm.model")
        write_bytes(model, train_tokenizer(filter(None, text.splitlines()), VOCAB_SIZE, CHAT_TOKENS))
        for size, kind in ((max(1, count // 10), "memory"), (count, "memory"), (count, "speed")):
            path = here / f"{size}.jsonl"
            _write(path, text, size)
            arguments = (str(path), model, str(here / f"{kind}-{size}"), "bare" if kind == "speed" else "alone")
            row = rows[f"{size:,} conversations, {kind}"] = run_program(_PREPARE, *arguments)
            row["mtok_per_s"] = row["tokens"] / row["s"] / 1e6
            if kind == "speed":
                bare = row["bare_tokens"] / row["bare_s"] / 1e6
                row["of_bare"], rows["sentencepiece.encode on the same texts"] = (
                    row["mtok_per_s"] / bare,
                    {"mtok_per_s": bare},
                )
    columns = {"Mtok/s": "{mtok_per_s:.2f}", "of bare": "{of_bare:.2f}", "MB before": "{mb_before:.0f}"}
    columns["MB at most"] = "{peak_mb:.0f}"
    yield Table("prepare", "preparing chats, one core", columns, rows)
    yield from texts(folder, scale)


def _write(path: Path, text: str, count: int) -> None:
    """Write conversations of two messages, cut from `text` at random."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for role in ("user", "assistant"):
                start, length = draw.randrange(len(text)), draw.randrange(CHARACTERS // 2, CHARACTERS * 3 // 2)
                messages.append({"role": role, "content": text[start : start + length].replace("<|", "< |")})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
