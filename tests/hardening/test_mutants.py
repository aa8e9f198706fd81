"""Damaged files of every kind: a GrainSftError, or what can be read; no other error, no hang, no memory beyond a bound.

GRAIN_SFT_MUTANTS=10000 pytest -n0 -s tests/hardening/test_mutants.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from children import run

MUTANTS = int(os.environ.get("GRAIN_SFT_MUTANTS", "240"))


def test_mutants_of_every_kind_are_refused_with_a_sentence_or_read(tmp_path):
    pytest.importorskip("pyarrow")
    pytest.importorskip("yaml")
    out = run(Path(__file__).with_name("mutants.py"), tmp_path, 0, MUTANTS, timeout=400 + MUTANTS)
    found = json.loads(out.splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert not found["wrong"], json.dumps(found["wrong"], indent=1)
    assert sum(found["made"].values()) == MUTANTS and len(found["made"]) == 20
    assert set(found["refused"]) == set(found["made"]), "of each kind some are refused"
