"""An epoch's tokens and loss masks equal those of OLMo-core's `NumpyPackedFSLDataset` with the same `label_mask_paths`.

Golden values: tests/golden/make_masks_golden.py.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_corpora import BOS, EOS, MASK_CASES, PAD, PackedCase, digest_of_files, epoch_digest, write_case
from packed_layouts import packing_of

import grain_sft
from grain_sft import Corpus, NpyDataSource, PackedLayout, open_corpus

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "masks_epoch.json").read_text())["cases"]
NAMED_BY = (
    *("directory", "directory above", "two globs", "glob of all", "glob of everything", "list"),
    *("list in another order", "mix", "config", "config of a mix", "index", "index of a list"),
    *("MaxText's index", "explicit masks", "masks elsewhere"),
)
"""What may name the parts of a corpus."""


def write_boundaries(case: PackedCase, tokens: list[Path]) -> None:
    """Write `start,end,id,src,loc` of each document, as Dolma's tokenizer does."""
    for path in tokens:
        ids = np.fromfile(path, case.dtype)
        ends = np.flatnonzero(ids == EOS) + 1
        if case.bos:
            ends = np.array([end for end in ends if end == len(ids) or ids[end] == BOS])
        with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
            file.writelines(f"{a},{b},x,y,0\n" for a, b in zip([0, *ends[:-1]], ends, strict=True))


def named(by: str, case: PackedCase, tokens: list[Path], masks: list[Path], folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return `where` and options of open_corpus."""
    sft, options, listed = tokens[0].parent, {"eos_token_id": EOS}, [str(path) for path in tokens]
    parts = f"{sft}/token_ids_part_*"
    if by in ("mix", "config of a mix"):
        (folder / "mix.txt").write_text("".join(f"sft,{path}\n" for path in listed))
        return folder / "mix.txt", options
    if by in ("index", "index of a list"):
        open_corpus(sft if by == "index" else listed, **options).save(folder / "index.json")
        return folder / "index.json", options
    if by == "MaxText's index":
        corpus = open_corpus(listed, use_loss_mask=False)
        corpus.save(folder / "maxtext.json", format="maxtext", sequence_length=case.sequence_length, tokenizer="mine")
        return folder / "maxtext.json", options
    if by == "masks elsewhere":
        (folder / "masks").mkdir()
        moved = [str(shutil.move(mask, folder / "masks" / mask.name)) for mask in masks]
        return listed, options | {"label_mask_paths": moved, "dtype": case.dtype}
    return {
        "directory": (sft, options),
        "directory above": (folder, options),
        "two globs": ([f"{parts}{each}.npy" for each in ("0", "[1-9]")][: len(tokens)], options),
        "glob of all": (f"{sft}/*.npy", options | {"dtype": case.dtype}),
        "glob of everything": (f"{sft}/*", options),
        "list": (listed, options),
        "list in another order": ([*map(str, masks[::-1]), *listed], options),
        "config": ([f"{parts}.npy"], options),
        "explicit masks": (f"{parts}.npy", options | {"label_mask_paths": f"{sft}/labels_mask_part_*.npy"}),
    }[by]


def source_of(by: str, case: PackedCase, where: Any, options: dict[str, Any], boundaries: str) -> NpyDataSource:
    layout = {**packing_of(case), "boundaries": boundaries}
    if boundaries == "auto":
        layout["bos_token_id"] = None
    if by.startswith("config"):
        path = [str(each) for each in where] if isinstance(where, list) else str(where)
        config = {
            "corpus": {"path": path, "pad_token_id": PAD, **options},
            "layout": {"kind": "packed", "sequence_length": case.sequence_length, **layout},
            "sampler": {"seed": 0, "global_batch_size": 1},
        }
        return grain_sft.load(config, host=grain_sft.Host(0, 1)).source
    fields = {**open_corpus(where, **options).__getstate__(), "pad_token_id": PAD}
    return NpyDataSource(PackedLayout(Corpus(**fields), case.sequence_length, **layout))


def marked(case: PackedCase) -> Any:
    return pytest.param(case, marks=[] if case.name == "distinct, five files" else pytest.mark.heavy, id=case.name)


@pytest.mark.parametrize("case", [*map(marked, MASK_CASES)])
@pytest.mark.parametrize("by", NAMED_BY)
@pytest.mark.parametrize("boundaries", ["eos", "auto"])
def test_supervised_positions_are_olmo_cores_whatever_names_the_parts(case, by, boundaries, tmp_path):
    golden, sft = GOLDEN[case.name], tmp_path / "sft"
    sft.mkdir()
    tokens, masks = write_case(case, sft)
    assert digest_of_files([*tokens, *masks]) == golden["corpus"], "numpy draws other corpora than it did"
    if boundaries == "auto":
        write_boundaries(case, tokens)
    source = source_of(by, case, *named(by, case, tokens, masks, tmp_path), boundaries)
    rows = source.read(range(len(source)))
    assert (len(source), int(rows["loss_mask"].sum())) == (golden["rows"], golden["supervised"])
    assert epoch_digest(zip(rows["tokens"], rows["loss_mask"], strict=True)) == golden["epoch"]


def test_the_golden_values_are_of_every_case():
    assert set(GOLDEN) == {case.name for case in MASK_CASES} and len(MASK_CASES) >= 5
