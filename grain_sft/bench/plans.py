"""Benchmarks of packing (ours and OLMo-core's) and of the command `trace`.

The corpus resembles that of OLMo-3 Think SFT. Document lengths are log-normal, and boundary files have open-instruct's format.
Token files and masks are sparse files, so the speed of the disk does not matter. Each measured program runs in its own process.
"""

import gzip
import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import run_program
from grain_sft.errors import PipelineError
from grain_sft.types import Ints

DOCUMENTS = 2_268_468  # documents of OLMo-3 7B Think SFT, with 22.7 B tokens (OLMo-3's paper, table 17)
MEDIAN = 5_400  # tokens of the median document in benchmark plans
# With documents of at most `LENGTH` tokens, this median gives a mean of about 10,007, as in OLMo-3.
TRACED = 6_877  # tokens of the median document in benchmark trace
LENGTH, BATCH_TOKENS, SEED = 32_768, 1_048_576, 34_521
PART_TOKENS = 1 << 28  # tokens of a file: 1 GiB of uint32
STEPS = (1000, 7000)  # steps of OLMo-3's run, [start, stop); `traces` scales them by `scale.documents / DOCUMENTS`

# rows of the table of `plans`
OURS = "PackedLayout, a plan for each file"
GROUPED = "PackedLayout, one plan for all files"
PACKED = "best_fit_decreasing alone, for all files"
OLMO = "OLMo-core InstancePacker, for all files"

# A program of `plans` is `_ONE_CORE`, then one of the next three texts, then `_AFTER`.
_ONE_CORE = f"""
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import numpy as np
LENGTH = {LENGTH}
"""
_LAYOUT = """
from grain_sft import PackedLayout, open_corpus
begin = time.perf_counter()
corpus = open_corpus(sys.argv[1], format="olmo", dtype="uint32", eos_token_id=100_257)
layout = PackedLayout(corpus, LENGTH, source_group_size=GROUP)
count = len(layout)
"""
_ALGORITHM = """
from grain_sft.layout import ALGORITHMS, PackingOptions
lengths = np.minimum(np.load(sys.argv[1]), LENGTH)
begin = time.perf_counter()
count = len(ALGORITHMS["best_fit_decreasing"](lengths, PackingOptions(LENGTH)).ends)
"""
_OLMO = """
from olmo_core.data.utils import InstancePacker
lengths = np.minimum(np.load(sys.argv[1]), LENGTH)
ends = np.cumsum(lengths)
documents = np.stack([ends - lengths, ends], axis=1).astype(np.uint64)
begin = time.perf_counter()
count = len(InstancePacker(LENGTH).pack_documents(documents)[0])
"""
_AFTER = """
print(json.dumps({"seconds": time.perf_counter() - begin, "rows": count, **memory()}))
"""

# program that runs `grain-sft` with its own arguments
_COMMAND = """
from grain_sft.cli.main import main
status = main()
print(json.dumps(memory()), flush=True)
os._exit(status)  # as `grain-sft` ends: without the shutdown of the interpreter, which takes 0.1 s
"""


def plans(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of the seconds, rows and megabytes of packing on one core.

    A `PackedLayout` is timed from opening the files to a written plan. A packer alone is timed from lengths to rows.

    Raises:
      PipelineError: OLMo-core's packer and ours make different numbers of rows.
    """
    lengths = made_up_lengths(scale.plan_documents)
    make_corpus(folder, lengths)
    data, stored_lengths = str(folder / "data"), str(folder / "lengths.npy")
    np.save(stored_lengths, lengths)
    programs = [
        (OURS, _LAYOUT.replace("GROUP", "1"), data),
        (GROUPED, _LAYOUT.replace("GROUP", "len(corpus.shards)"), data),
        (PACKED, _ALGORITHM, stored_lengths),
    ]
    if importlib.util.find_spec("olmo_core") is not None:
        programs.append((OLMO, _OLMO, stored_lengths))
    figures = {}
    for name, program, argument in programs:
        figures[name] = run_program(_ONE_CORE + program + _AFTER, argument, cache=str(folder / name))
    if OLMO in figures and figures[OLMO]["rows"] != figures[PACKED]["rows"]:
        raise PipelineError(f"OLMo-core packs {figures[OLMO]['rows']} rows, ours {figures[PACKED]['rows']}. Report this.")
    columns = {"s": "{seconds:.2f}", "rows": "{rows:,}", "peak MB": "{peak_mb:.0f}"}
    yield Table("plans", "plans, on one core", columns, figures)


def traces(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of the seconds and the memory of commands. Only the first command makes a plan: its cache is empty."""
    first, last = (max(1, int(step * scale.documents / DOCUMENTS)) for step in STEPS)
    interval = f"{first}:{max(last, first + 1)}"
    config = make_corpus(folder, made_up_lengths(scale.documents, TRACED, LENGTH))
    steps = ("trace", config, "--steps", interval)
    written = (*steps, "--output", str(folder / "lines.csv"))
    commands: dict[str, tuple[str, ...]] = {
        f"cold: plan, order, trace --steps {interval}": written,
        f"warm: trace --steps {interval}": written,
        "warm: the same, --summary": (*steps, "--summary"),
        "warm: the same without counting loss": (*written, "--no-trainable"),
        "warm: trace --document": ("trace", config, "--document", str(scale.documents // 2)),
        "warm: trace --checkpoints": ("trace", config, "--checkpoints"),
        "warm: receipt": ("receipt", config),
    }
    found = {name: run_program(_COMMAND, *words, cache=str(folder / "cache")) for name, words in commands.items()}
    figures = {name: {"seconds": row["process_s"], "gigabytes": row["peak_mb"] / 1e3} for name, row in found.items()}
    columns = {"s": "{seconds:.2f}", "GB": "{gigabytes:.2f}"}
    yield Table("trace", "trace: processes, from start to end", columns, figures)


def make_corpus(folder: Path, lengths: Ints) -> str:
    """Make a corpus in `folder`/data, with documents of these lengths. Return the path of a config for it."""
    data = folder / "data"
    data.mkdir()
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    for number, begin in enumerate(range(0, total, PART_TOKENS)):
        stop = min(begin + PART_TOKENS, total)
        for name, width in (("token_ids", 4), ("labels_mask", 1)):
            with open(data / f"{name}_part_{number:04d}.npy", "wb") as file:
                file.truncate((stop - begin) * width)
        first, last = np.searchsorted(ends, (begin, stop - 1), side="right")  # first and last document in this file
        # where documents begin and end in this file; a document that continues in another file is cut
        borders = np.minimum(np.concatenate([[begin], ends[first : last + 1]]), stop) - begin
        lines = "".join(f"{start},{end}\n" for start, end in itertools.pairwise(borders.tolist()))
        (data / f"token_ids_part_{number:04d}.csv.gz").write_bytes(gzip.compress(lines.encode(), 1, mtime=0))
    config = {
        "corpus": {"path": str(data), "format": "olmo", "dtype": "uint32", "eos_token_id": 100_257},
        "layout": {"kind": "packed", "sequence_length": LENGTH},
        "sampler": {"order": "olmo", "seed": SEED, "global_batch_tokens": BATCH_TOKENS, "epochs": 2},
        "transforms": ["shift_targets"],
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return str(path)


def made_up_lengths(documents: int, median: float = MEDIAN, longest: int | None = None) -> Ints:
    """Return log-normal document lengths in tokens, int64 [documents]. By default, about 4 % are longer than `LENGTH`."""
    normal = np.random.default_rng(0).standard_normal(documents)
    lengths: Ints = np.exp(np.log(median) + normal).astype(np.int64).clip(1, longest)
    return lengths
