"""Write `packed_rows.json` with the original OLMo-core: the rows of its `NumpyPackedFSLDataset` over small corpora.

The corpora are made from seeds by `tests/packed_corpora.py`, which the tests share. The file holds digests of every row
(tokens, label mask, lengths of documents, places of documents in their files), four hexadecimal digits each, one of all
rows together, one of the lengths that every row holds, and some rows' places in full. It holds no code of the original
and is not needed to run the tests.

OLMo-core sorts documents by length with a sort that is not stable, and how that orders equal lengths depends on the CPU
and on the version of numpy. So there are rows for each variant that this CPU can play (AVX-512, AVX2, neither), each made
in a process of its own that numpy starts in without the others' instructions, and for each version of numpy that the
script was run under: values of other versions and variants that the file already holds are kept.

Needed: ai2-olmo-core 3.0.0 (which brings torch; the CPU build is enough). For example::

    pip install ai2-olmo-core==3.0.0 numpy==2.4.6
    python make_packed_golden.py

It also writes the plan files that OLMo-core leaves in its work directory for one small corpus, below `olmo_plan/`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from packed_corpora import (
    BOS,
    EOS,
    PACKED_CASES,
    PAD,
    PLAN_CASE,
    ROW_DIGITS,
    VARIANTS,
    PackedCase,
    digest_of_files,
    row_digest,
    write_case,
)

SHOWN = 2  # rows in full, from the first and from the last


def olmo_dataset(case: PackedCase, tokens: list[Any], masks: list[Any], work_dir: Path) -> Any:
    """OLMo-core's dataset over the files of a case."""
    from olmo_core.data import LongDocStrategy, NumpyPackedFSLDataset

    dataset = NumpyPackedFSLDataset(
        *map(str, tokens),
        sequence_length=case.sequence_length,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS if case.bos else None,
        vocab_size=60_000,
        dtype=np.dtype(case.dtype).type,
        generate_doc_lengths=True,
        label_mask_paths=list(map(str, masks)) or None,
        long_doc_strategy=LongDocStrategy(case.long),
        source_group_size=case.group,
    )
    dataset.work_dir = work_dir
    dataset.prepare()
    return dataset


def plan_places(dataset: Any, case: PackedCase, sizes: list[int]) -> list[list[list[int]]]:
    """[row] -> (file, start, stop) of each document, from the plan that OLMo-core wrote."""
    rows = []
    for first in range(0, len(sizes), case.group):
        paths = dataset.paths[first : first + case.group]
        borders = np.cumsum([0, *sizes[first : first + case.group]])
        indices = np.fromfile(dataset._get_document_indices_path(*paths), np.uint64).reshape(-1, 2).tolist()
        offsets = np.fromfile(dataset._get_instance_offsets_path(*paths), np.uint64).reshape(-1, 2).tolist()
        documents = np.fromfile(dataset._get_docs_by_instance_path(*paths), np.uint64).tolist()
        for begin, end in offsets:
            row = []
            for number in documents[begin:end]:
                start, stop = indices[number]
                file = int(np.searchsorted(borders, start, side="right")) - 1
                row.append([first + file, int(start - borders[file]), int(stop - borders[file])])
            rows.append(row)
    return rows


def rows_of(case: PackedCase) -> dict[str, Any]:
    """What OLMo-core makes of one case."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens, masks = write_case(case, folder)
        dataset = olmo_dataset(case, tokens, masks, folder / "work")
        sizes = [path.stat().st_size // np.dtype(case.dtype).itemsize for path in tokens]
        places = plan_places(dataset, case, sizes)
        assert len(places) == len(dataset)
        digests: list[str] = []
        lengths: list[int] = []
        for number, row in enumerate(places):
            item = dataset[number]
            digests.append(row_digest(item["input_ids"], item["label_mask"], item["doc_lens"], row))
            lengths += [len(row), *(stop - start for _, start, stop in row)]
        shown = sorted({*range(min(SHOWN, len(places))), *range(max(0, len(places) - SHOWN), len(places))})
        return {
            "corpus": digest_of_files([*tokens, *masks]),
            "rows": "".join(digest[:ROW_DIGITS] for digest in digests),
            "all": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
            "lengths": row_digest([], [], [], lengths),
            "shown": {str(number): places[number] for number in shown},
        }


def write_plan(out: Path) -> None:
    """One case's plan files as OLMo-core leaves them. They are named by a hash of the token files' names."""
    case = PLAN_CASE
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens, masks = write_case(case, folder)
        home = Path.cwd()
        os.chdir(folder)  # relative names, so that the names of the plan files don't depend on where this runs
        try:
            olmo_dataset(case, [path.name for path in tokens], [path.name for path in masks], folder / "work")
        finally:
            os.chdir(home)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "work" / "dataset-common", out / "dataset-common")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write packed_rows.json and olmo_plan/.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        print(json.dumps({case.name: rows_of(case) for case in PACKED_CASES}))
        return
    target = arguments.out / "packed_rows.json"
    made = json.loads(target.read_text()) if target.exists() else {"made_by": {}, "variants": {}}
    flags = Path("/proc/cpuinfo").read_text()
    versions = {name: importlib.metadata.version(name) for name in ("ai2-olmo-core", "numpy", "torch")}
    for variant, disabled in VARIANTS.items():
        if (variant == "avx512" and "avx512dq" not in flags) or (variant == "avx2" and "avx2" not in flags):
            continue
        environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled, "OLMO_DATA_PREP_WORKERS": "1"}
        command = [sys.executable, __file__, "--child"]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        found = json.loads(done.stdout.splitlines()[-1])
        key = f"numpy {np.__version__}, {variant}"
        made["made_by"][key] = {**versions, "python": platform.python_version()}
        made["variants"][key] = found
        print(key, sum(len(case["rows"]) // ROW_DIGITS for case in found.values()), "rows")
    cases: dict[str, list[str]] = {}
    for key, found in made["variants"].items():
        cases[key] = [
            f"   {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in found.items()
        ]
    joined = ",\n".join(f"  {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n  }" for key, lines in cases.items())
    made_by = json.dumps(made["made_by"])
    target.write_text(f'{{\n "made_by": {made_by},\n "variants": {{\n{joined}\n }}\n}}\n', encoding="utf-8")
    write_plan(arguments.out / "olmo_plan")
    print(target.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
