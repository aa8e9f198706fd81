"""Write golden files of packed rows with the original OLMo-core, from the corpora of `tests/helpers/packed_corpora.py`.

packed_rows.json: `values_of_rows` of each corpus.
olmo_plan/: the plan files that OLMo-core leaves in its work directory for one corpus.
olmo_packed_steps.json: for each step of two epochs, the rows that `NumpyFSLDataLoader` gives each rank of a run, and a digest
  of every row. No two documents of these corpora have the same length.

OLMo-core's sort of documents by length is not stable: the order of equal lengths depends on the CPU and on the version of
numpy. So packed_rows.json has rows for each variant of the sort that this CPU can run, which a process of its own makes, and
keeps those of other variants and versions.

Needed: ai2-olmo-core 3.0.0 (with torch, CPU build), numpy 2.4.6.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from making import olmo_epoch, olmo_loader, options, versions, write_json

from packed_corpora import BOS, EOS, PACKED_CASES, PAD, PLAN_CASE, VARIANTS  # isort: skip
from packed_corpora import PackedCase, digest_of_files, row_digest, values_of_rows, write_case  # isort: skip

RUNS = (("distinct, groups", 8, 4, 34521), ("distinct, five files", 12, 3, 7), ("distinct, one longer", 6, 2, 34521))
"""Case, rows of a global batch, ranks and seed of each run of olmo_packed_steps.json."""
EPOCHS = 2
Places = list[list[list[int]]]


def olmo_dataset(case: PackedCase, tokens: list[Any], masks: list[Any], work_dir: Path) -> Any:
    from olmo_core.data import LongDocStrategy, NumpyPackedFSLDataset

    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS if case.bos else None, "vocab_size": 60_000}
    packing = {"long_doc_strategy": LongDocStrategy(case.long), "source_group_size": case.group}
    rows = {"sequence_length": case.sequence_length, "dtype": np.dtype(case.dtype).type, "generate_doc_lengths": True}
    mask_paths = list(map(str, masks)) or None
    dataset = NumpyPackedFSLDataset(*map(str, tokens), label_mask_paths=mask_paths, **ids, **packing, **rows)
    dataset.work_dir = work_dir
    dataset.prepare()
    return dataset


@contextlib.contextmanager
def opened(case: PackedCase) -> Iterator[tuple[Any, str, Places]]:
    """Yield OLMo-core's dataset of a case, the digest of its corpus, and the places of each row's documents."""
    with tempfile.TemporaryDirectory() as temp:
        tokens, masks = write_case(case, Path(temp))
        dataset = olmo_dataset(case, tokens, masks, Path(temp) / "work")
        sizes = [path.stat().st_size // np.dtype(case.dtype).itemsize for path in tokens]
        places = places_of(dataset, case, sizes)
        assert len(places) == len(dataset)
        yield dataset, digest_of_files([*tokens, *masks]), places


def places_of(dataset: Any, case: PackedCase, sizes: list[int]) -> Places:
    """Return [row] -> (file, start, stop) of each document, from the plan that OLMo-core wrote."""
    rows = []
    for first in range(0, len(sizes), case.group):
        paths = dataset.paths[first : first + case.group]
        borders = np.cumsum([0, *sizes[first : first + case.group]])
        kinds = (dataset._get_document_indices_path, dataset._get_instance_offsets_path)
        indices, offsets = (np.fromfile(kind(*paths), np.uint64).reshape(-1, 2).tolist() for kind in kinds)
        documents = np.fromfile(dataset._get_docs_by_instance_path(*paths), np.uint64).tolist()
        for begin, end in offsets:
            row = []
            for start, stop in (indices[number] for number in documents[begin:end]):
                file = int(np.searchsorted(borders, start, side="right")) - 1
                row.append([first + file, int(start - borders[file]), int(stop - borders[file])])
            rows.append(row)
    return rows


def digests_of(dataset: Any, places: Places) -> list[str]:
    items = ((dataset[number], row) for number, row in enumerate(places))
    return [row_digest(item["input_ids"], item["label_mask"], item["doc_lens"], row) for item, row in items]


def rows_of(case: PackedCase) -> dict[str, Any]:
    with opened(case) as (dataset, corpus, places):
        return {"corpus": corpus, **values_of_rows(digests_of(dataset, places), places)}


def steps_of(dataset: Any, batch: int, ranks: int, seed: int) -> list[list[list[int]]]:
    """Return [step][rank] -> rows, of all epochs one after the other."""
    by_rank = []
    for rank in range(ranks):
        with tempfile.TemporaryDirectory() as temp:
            loader = olmo_loader(dataset, Path(temp), batch=batch, seed=seed, ranks=ranks, rank=rank)
            batches = [batch for epoch in range(EPOCHS) for batch in olmo_epoch(loader, 1 + epoch)]
        by_rank.append([batch["index"].tolist() for batch in batches])
    return [list(ranks_of_step) for ranks_of_step in zip(*by_rank, strict=True)]


def run_of(name: str, batch: int, ranks: int, seed: int) -> dict[str, Any]:
    with opened(next(case for case in PACKED_CASES if case.name == name)) as (dataset, corpus, places):
        found = {"case": name, "corpus": corpus, "batch": batch, "ranks": ranks, "seed": seed, "epochs": EPOCHS}
        return {**found, "rows": "".join(digests_of(dataset, places)), "steps": steps_of(dataset, batch, ranks, seed)}


def write_plan(out: Path) -> None:
    """Write one case's plan files as OLMo-core leaves them. They are named by a hash of the token files' names."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens, masks = write_case(PLAN_CASE, folder)
        with contextlib.chdir(folder):  # relative names, so that the names of the plan files don't depend on the folder
            olmo_dataset(PLAN_CASE, [path.name for path in tokens], [path.name for path in masks], folder / "work")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "work" / "dataset-common", out / "dataset-common")


def write_variants(target: Path, made: dict[str, Any]) -> None:
    cases = []
    for key, found in made["variants"].items():
        lines = (f"   {json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in found.items())
        cases.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n  }")
    joined, made_by = ",\n".join(cases), json.dumps(made["made_by"])
    target.write_text(f'{{\n "made_by": {made_by},\n "variants": {{\n{joined}\n }}\n}}\n', encoding="utf-8")


def main() -> None:
    if sys.argv[1:] == ["child"]:
        print(json.dumps({case.name: rows_of(case) for case in PACKED_CASES}))
        return
    out = options("the golden files of OLMo-core's packed rows").out
    target, flags = out / "packed_rows.json", Path("/proc/cpuinfo").read_text()
    made = json.loads(target.read_text()) if target.exists() else {"made_by": {}, "variants": {}}
    for variant, disabled in VARIANTS.items():
        if {"avx512": "avx512dq", "avx2": "avx2"}.get(variant, "") not in flags:
            continue
        environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled, "OLMO_DATA_PREP_WORKERS": "1"}
        command = [sys.executable, __file__, "child"]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        key = f"numpy {np.__version__}, {variant}"
        made["made_by"][key] = versions("ai2-olmo-core", "numpy", "torch", "python")
        made["variants"][key] = json.loads(done.stdout.splitlines()[-1])
    write_variants(target, made)
    write_plan(out / "olmo_plan")
    os.environ["OLMO_DATA_PREP_WORKERS"] = "1"
    about = "steps: [step][rank] -> instances; rows: eight digits an instance, row_digest of packed_corpora.py"
    steps: dict[str, Any] = {"made_by": versions("ai2-olmo-core", "numpy", "torch", "python"), "about": about}
    write_json(out / "olmo_packed_steps.json", {**steps, "runs": [run_of(*run) for run in RUNS]}, compact=["runs"])


if __name__ == "__main__":
    main()
