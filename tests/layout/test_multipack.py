"""Multipack against the batches of OpenChat's own sampler (tests/golden/make/make_multipack_golden.py)."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from packed_corpora import MULTIPACK_CASES, multipack_lengths, rows_digest

from grain_sft import PackedLayout, open_corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.packing import PackingOptions
from grain_sft.layout.packing.multipack import multipack

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "multipack_batches.json").read_text())["cases"]

SMALL = [case for case in MULTIPACK_CASES if case.documents <= 900]


def check(rows, case, lengths, golden):
    """Check that rows, lists of documents, are the batches of an epoch: by the lengths in every row and, where lengths are
    distinct, document by document and in that order."""
    assert len(rows) % case.ranks == 0
    batches = [rows[first : first + case.ranks] for first in range(0, len(rows), case.ranks)]
    sizes = [[sorted(lengths[row].tolist()) for row in batch] for batch in batches]
    shown = batches if "documents" in golden else sizes
    assert (shown[0][:2] if batches else []) == golden["first"]
    assert len(batches) == golden["batches"]
    assert rows_digest(sizes) == golden["lengths"]
    assert "documents" not in golden or rows_digest(batches) == golden["documents"]


@pytest.mark.parametrize(
    ("case", "few"),
    [*((case, 384) for case in MULTIPACK_CASES), *((case, 0) for case in SMALL)],
    ids=lambda value: getattr(value, "name", f"arrays from {value} rows on"),
)
def test_batches_are_openchats(case, few, monkeypatch):
    monkeypatch.setattr(sys.modules["grain_sft.layout.packing.multipack"], "_FEW", few)
    lengths, golden = multipack_lengths(case), GOLDEN[case.name]
    digest = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == golden["corpus"], "numpy draws other lengths than it did"
    assert len(golden["epochs"]) == case.epochs
    assert ("documents" in golden["epochs"][0]) == (len(set(lengths.tolist())) == len(lengths) > 3)
    for epoch, expected in enumerate(golden["epochs"]):
        options = PackingOptions(case.capacity, seed=case.seed, epoch=epoch, batch_rows=case.ranks)
        packed = multipack(lengths, options)
        rows = [each.tolist() for each in np.split(packed.document, packed.ends)[:-1]]
        check(rows, case, lengths, expected)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_layouts_rows_are_openchats_ranks(tmp_path, case):
    """Row r of batch b is row b * ranks + r, and the batches of the next epoch follow."""
    lengths, golden = multipack_lengths(case), GOLDEN[case.name]["epochs"]
    tokens = np.full(int(lengths.sum()), 7, np.uint16)
    tokens[np.cumsum(lengths) - 1] = 1
    tokens.tofile(tmp_path / "a.npy")
    corpus = open_corpus(tmp_path / "a.npy", dtype="uint16", eos_token_id=1)
    settings = {"algorithm": "multipack", "seed": case.seed, "epochs": case.epochs, "batch_rows": case.ranks}
    if not golden[0]["batches"]:
        with pytest.raises(LayoutError, match=r"multipack leaves no row: 3 documents don't fill one batch of 4 rows"):
            PackedLayout(corpus, case.capacity, cache_dir=tmp_path, **settings)
        return
    layout = PackedLayout(corpus, case.capacity, cache_dir=tmp_path, **settings)
    rows = [[span.document for span in layout.spans(row)] for row in range(len(layout))]
    for expected in golden:
        count = expected["batches"] * case.ranks
        check(rows[:count], case, lengths, expected)
        rows = rows[count:]
    assert not rows
