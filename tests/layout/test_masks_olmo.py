"""An epoch's tokens and loss masks equal those of OLMo-core's `NumpyPackedFSLDataset` with the same `label_mask_paths`.

Golden values: tests/golden/make_packed_golden.py. Other names of the same parts: tests/corpus/test_sidecars.py.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from packed_corpora import BOS, EOS, MASK_CASES, PackedCase, digest_of_files, epoch_digest, write_case
from packed_layouts import open_case, packing_of

from grain_sft import NpyDataSource, PackedLayout

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "masks_epoch.json").read_text())["cases"]


def write_boundaries(case: PackedCase, tokens: list[Path]) -> None:
    """Write `start,end,id,src,loc` of each document, as Dolma's tokenizer does."""
    for path in tokens:
        ids = np.fromfile(path, case.dtype)
        ends = np.flatnonzero(ids == EOS) + 1
        if case.bos:
            ends = np.array([end for end in ends if end == len(ids) or ids[end] == BOS])
        with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
            file.writelines(f"{a},{b},x,y,0\n" for a, b in zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("case", MASK_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("boundaries", ["eos", "auto"])
def test_supervised_positions_are_olmo_cores(case, boundaries, tmp_path):
    golden, (tokens, masks) = GOLDEN[case.name], write_case(case, tmp_path)
    assert digest_of_files([*tokens, *masks]) == golden["corpus"], "numpy draws other corpora than it did"
    options = packing_of(case)
    if boundaries == "auto":
        write_boundaries(case, tokens)
        options["bos_token_id"] = None
    corpus, cache = open_case(case, tmp_path, (tokens, masks)), tmp_path / "cache"
    source = NpyDataSource(
        PackedLayout(corpus, case.sequence_length, boundaries=boundaries, cache_dir=cache, **options)
    )
    rows = source.read(range(len(source)))
    assert (len(source), int(rows["loss_mask"].sum())) == (golden["rows"], golden["supervised"])
    assert epoch_digest(zip(rows["tokens"], rows["loss_mask"], strict=True)) == golden["epoch"]


def test_the_golden_values_are_of_every_case():
    assert set(GOLDEN) == {case.name for case in MASK_CASES} and len(MASK_CASES) >= 5
