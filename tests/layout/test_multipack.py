"""Algorithm `multipack` makes the batches of OpenChat's own sampler (tests/golden/make/make_multipack_golden.py)."""

import hashlib
import sys

import numpy as np
import pytest
from batches import golden_values
from packed_corpora import MULTIPACK_CASES, multipack_lengths, rows_digest

from grain_sft.layout.packing import PackingOptions
from grain_sft.layout.packing.multipack import multipack

GOLDEN = golden_values("multipack_batches.json")["cases"]

SMALL = [case for case in MULTIPACK_CASES if case.documents <= 900]


@pytest.mark.parametrize(
    ("case", "few"),
    [*((case, 384) for case in MULTIPACK_CASES), *((case, 0) for case in SMALL)],
    ids=lambda value: getattr(value, "name", f"loop up to {value} rows"),
)
def test_batches_are_openchats(case, few, monkeypatch):
    """Rows are compared by the lengths of their documents. If no lengths are equal, the documents of rows are compared too.

    Batches of up to `few` rows are filled by a loop, and larger batches by a tree.
    """
    monkeypatch.setattr(sys.modules["grain_sft.layout.packing.multipack"], "_FEW", few)
    lengths, golden = multipack_lengths(case), GOLDEN[case.name]
    digest = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == golden["corpus"], "numpy draws other lengths than it did"
    assert len(golden["epochs"]) == case.epochs
    assert ("documents" in golden["epochs"][0]) == (len(set(lengths.tolist())) == len(lengths) > 3)
    for epoch, expected in enumerate(golden["epochs"]):
        packed = multipack(lengths, PackingOptions(case.capacity, seed=case.seed, epoch=epoch, batch_rows=case.ranks))
        rows = [each.tolist() for each in np.split(packed.document, packed.ends)[:-1]]
        assert len(rows) == expected["batches"] * case.ranks
        batches = [rows[first : first + case.ranks] for first in range(0, len(rows), case.ranks)]
        sizes = [[sorted(lengths[row].tolist()) for row in batch] for batch in batches]
        shown = batches if "documents" in expected else sizes
        assert (shown[0][:2] if batches else []) == expected["first"]
        assert rows_digest(sizes) == expected["lengths"]
        assert "documents" not in expected or rows_digest(batches) == expected["documents"]
