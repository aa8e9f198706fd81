"""Damaged files of every kind: a GrainSftError, or what can be read; no other error, no hang, no memory beyond a bound.

GRAIN_SFT_MUTANTS=10000 pytest -n0 -s tests/hardening/test_mutants.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import ROOT

MUTANTS = int(os.environ.get("GRAIN_SFT_MUTANTS", "240"))
HERE = Path(__file__).parent


def test_mutants_of_every_kind_are_refused_with_a_sentence_or_read(tmp_path):
    pytest.importorskip("pyarrow")
    pytest.importorskip("yaml")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "corpus")))
    command = [sys.executable, str(HERE / "mutants.py"), str(tmp_path), "0", str(MUTANTS)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=400 + MUTANTS, env={**os.environ, "PYTHONPATH": paths}
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert not found["wrong"], json.dumps(found["wrong"], indent=1)
    assert sum(found["made"].values()) == MUTANTS and len(found["made"]) == 20
    assert set(found["refused"]) == set(found["made"]), "of each kind some are refused"
