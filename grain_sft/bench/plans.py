"""Plans of many documents: ours, and what OLMo-core's packer takes for the same documents where it is installed; each in a
process of its own, on one core.

There are about as many documents as in OLMo-3 Think SFT, of log-normal lengths; their tokens are holes of sparse files, in
parts of 1 GiB with the boundaries that open-instruct writes beside them.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.bench import own_process
from grain_sft.bench.trace import LENGTH, make_corpus
from grain_sft.errors import PipelineError

MEDIAN = 5_400  # tokens

OURS = "PackedLayout, a plan for each file"
GROUPED = "PackedLayout, one of all files"
PACKED = "best_fit_decreasing alone, of all files"
OLMO = "OLMo-core InstancePacker, of all files"

_ONE_CORE = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
"""

_LAYOUT = (
    _ONE_CORE
    + """
from grain_sft import PackedLayout, open_corpus
begin = time.perf_counter()
corpus = open_corpus(sys.argv[1], format="olmo", dtype="uint32", eos_token_id=100_257)
layout = PackedLayout(corpus, LENGTH, source_group_size=GROUP)
print(json.dumps({"seconds": time.perf_counter() - begin, "rows": len(layout), **memory()}))
"""
)

_ALGORITHM = (
    _ONE_CORE
    + """
from grain_sft.layout.packing import ALGORITHMS, PackOptions
lengths = np.minimum(np.load(sys.argv[1]), LENGTH)
begin = time.perf_counter()
rows = ALGORITHMS["best_fit_decreasing"](lengths, LENGTH, PackOptions())
print(json.dumps({"seconds": time.perf_counter() - begin, "rows": len(rows.ends), **memory()}))
"""
)

_OLMO = (
    _ONE_CORE
    + """
from olmo_core.data.utils import InstancePacker
lengths = np.minimum(np.load(sys.argv[1]), LENGTH)
ends = np.cumsum(lengths)
documents = np.stack([ends - lengths, ends], axis=1).astype(np.uint64)
begin = time.perf_counter()
rows, _, _ = InstancePacker(LENGTH).pack_documents(documents)
print(json.dumps({"seconds": time.perf_counter() - begin, "rows": len(rows), **memory()}))
"""
)


def measure(folder: Path, documents: int) -> dict[str, dict[str, Any]]:
    """Seconds, rows and megabytes of each, by name: of layouts from the files to a plan that is written, of packers from
    lengths to rows.

    Raises:
      PipelineError: OLMo-core makes another number of rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        lengths = made_up_lengths(documents)
        make_corpus(place, lengths)
        np.save(place / "lengths.npy", lengths)
        data, stored = str(place / "data"), str(place / "lengths.npy")
        programs = {
            OURS: (_LAYOUT.replace("GROUP", "1"), data),
            GROUPED: (_LAYOUT.replace("GROUP", "len(corpus.shards)"), data),
            PACKED: (_ALGORITHM, stored),
        }
        if importlib.util.find_spec("olmo_core") is not None:
            programs[OLMO] = (_OLMO, stored)
        figures = {}
        for number, (name, (program, argument)) in enumerate(programs.items()):
            cache = str(place / f"cache-{number}")
            figures[name] = own_process.run(program.replace("LENGTH", str(LENGTH)), argument, cache)
    if OLMO in figures and figures[OLMO]["rows"] != figures[PACKED]["rows"]:
        raise PipelineError(f"OLMo-core packs {figures[OLMO]['rows']} rows, and we {figures[PACKED]['rows']}.")
    return figures


def report(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Print a table; returns it."""
    print(f"\n{'plans, on one core':44}{'s':>9}{'rows':>12}{'MB at most':>13}")
    for name, row in figures.items():
        print(f"{name:44}{row['seconds']:9.2f}{row['rows']:12,}{row['peak_mb']:13.0f}")
    return figures


def made_up_lengths(documents: int) -> npt.NDArray[np.int64]:
    """Log-normal; a few in a hundred are longer than a row."""
    normal = np.random.default_rng(0).standard_normal(documents)
    lengths: npt.NDArray[np.int64] = np.exp(np.log(MEDIAN) + normal).astype(np.int64).clip(1)
    return lengths
