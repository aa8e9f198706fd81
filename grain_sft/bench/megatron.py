"""Benchmark of making Megatron's indices, by grain_sft and, if installed, by megatron-core and MaxText.

The index of samples has the document and the token at which each sample begins. The index of a blend has the data set of each
sample. A measured program is `_BEGIN`, then an entry of `_OURS`, `_MEGATRON` or `_MAXTEXT`, then `_END`. Its arguments are the
folder of the input arrays, the tokens of a sample, the number of data sets (0 for the index of samples), and the samples of a
blend.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import run_program
from grain_sft.bench.plans import made_up_lengths
from grain_sft.errors import PipelineError

LENGTH, MEDIAN = 4096, 2_500  # tokens of a sample, and of the median document
DATASETS = (2, 8, 20)  # data sets of each measured blend
MAXTEXT_DIVISOR = 100  # MaxText makes 1/100 of the index, because all of it would take minutes

_BEGIN = """
import hashlib
import numpy as np
sizes, order, length = np.load(sys.argv[1] + "/sizes.npy"), np.load(sys.argv[1] + "/order.npy"), int(sys.argv[2])
datasets, count = int(sys.argv[3]), int(sys.argv[4])
weights = np.random.default_rng(0).random(datasets) + 0.1 if datasets else None
indices = [np.zeros(count, np.int16), np.zeros(count, np.int64)] if datasets else None
def timed(function, *arguments):
    global seconds, cpu
    begin, cpu = time.perf_counter(), time.process_time()
    made = function(*arguments)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return made
"""
_END = """
digest = hashlib.sha256(b"".join(np.ascontiguousarray(each, "<i8").tobytes() for each in indices)).hexdigest()
samples = len(indices[0]) - (not datasets)  # the index of samples has one more row, the end
print(json.dumps({"seconds": seconds, "cpu": cpu, "samples": samples, "digest": digest, **memory()}))
"""
_OURS = {
    "samples": """
from grain_sft.layout import Cut, ends_of, sample_index
ends = timed(ends_of, sizes, order)
indices = [sample_index(ends, Cut(length, 1))]
""",
    "blend": """
from grain_sft.layout import blend, normalized
indices = timed(blend, normalized(weights), count).numbers_of(np.arange(count))
""",
}
_MEGATRON = {
    "samples": """
from megatron.core.datasets import helpers
indices = [timed(helpers.build_sample_idx, sizes, order, length, 1, int(sizes.sum()), True, True)]
""",
    "blend": """
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import normalize
timed(helpers.build_blending_indices, *indices, normalize(weights), datasets, count, False)
""",
}
_MAXTEXT = {
    "samples": f"""
from maxtext.input_pipeline._mmap_index_utils import build_sample_index
indices = [timed(build_sample_index, sizes, order[: len(order) // {MAXTEXT_DIVISOR}], length)]
""",
    "blend": f"""
from maxtext.input_pipeline._megatron_blending import build_blending_indices
count //= {MAXTEXT_DIVISOR}
indices = [each[:count] for each in indices]
timed(build_blending_indices, *indices, weights / weights.sum(), datasets, count)
""",
}
PEERS = {"megatron-core": ("megatron", _MEGATRON), "MaxText": ("maxtext", _MAXTEXT)}
"""Other systems by name: (package, programs)."""


def megatron(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of the seconds that it takes to make the index of samples, and indices of blends.

    Training with grain_sft needs only the results of `ends_of` and `blend`, so only these calls are timed. The whole index is
    made only for the comparison with megatron-core's index.

    Raises:
      PipelineError: The indices of megatron-core and grain_sft differ.
    """
    installed = {name: programs for name, (package, programs) in PEERS.items() if importlib.util.find_spec(package)}
    figures: dict[str, dict[str, Any]] = {}  # by name, such as "blend of 8, MaxText"
    # a document has about 4,100 tokens on average, so this number of documents makes about the same number of samples
    lengths = made_up_lengths(scale.samples, MEDIAN, 1 << 20).astype(np.int32)
    np.save(folder / "sizes.npy", lengths)
    np.save(folder / "order.npy", np.random.RandomState(0).permutation(len(lengths)).astype(np.int32))
    for datasets in (0, *DATASETS):
        kind = "blend" if datasets else "samples"
        title = f"blend of {datasets}" if datasets else "samples"
        for name, programs in {"grain_sft": _OURS, **installed}.items():
            program = _BEGIN + programs[kind] + _END
            row = run_program(program, str(folder), str(LENGTH), str(datasets), str(scale.samples))
            ours = figures.get(f"{title}, grain_sft", row)
            # MaxText makes only a part of the index, so its digest is not compared.
            is_whole = row["samples"] > ours["samples"] // 2
            if is_whole and row["digest"] != ours["digest"]:
                raise PipelineError(f"{name} makes another index ({title}) than grain_sft. Report this, with both versions.")
            row["ns"] = row["seconds"] / max(1, row["samples"]) * 1e9
            figures[f"{title}, {name}"] = row
    columns = {"s": "{seconds:.2f}", "CPU s": "{cpu:.2f}", "ns a sample": "{ns:.1f}", "samples": "{samples:,}"}
    yield Table("megatron", "Megatron's indices", columns, figures)
