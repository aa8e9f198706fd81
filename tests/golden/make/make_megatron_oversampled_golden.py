"""Write `megatron_oversampled.json`: which blends of `helpers/megatron_corpora.py` megatron-core refuses for lack of samples.

Needed: megatron-core 0.16.1 and torch.
"""

import re
import tempfile
from pathlib import Path

from make_megatron_gpt_golden import dataset_of
from making import options, versions, write_json
from megatron_corpora import oversampled_runs, write_prefixes

if __name__ == "__main__":
    out, found = options("megatron_oversampled.json").out, {}
    for name, run in oversampled_runs().items():
        with tempfile.TemporaryDirectory() as temporary:
            write_prefixes(Path(temporary))
            try:
                found[name] = {"samples": len(dataset_of(Path(temporary), run))}
            except IndexError as error:
                taken, size = re.findall(r"requests (\d+) samples .* excess of its size (\d+)", str(error))[0]
                found[name] = {"taken": int(taken), "size": int(size)}
    made = {**versions("megatron-core", "torch", "numpy"), "cases": found}
    write_json(out / "megatron_oversampled.json", made, compact=("cases",))
