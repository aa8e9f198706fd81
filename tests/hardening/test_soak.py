"""A long run at full speed: no row wrong, lost or read twice in an epoch; memory, open files and threads stay what they are.

GRAIN_SFT_SOAK=3600 pytest -n0 -s tests/hardening/test_soak.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from children import ROOT

SECONDS = float(os.environ.get("GRAIN_SFT_SOAK", "2"))
"""An hour: 3600."""

GROWTH = 32  # MB of memory that come and go: what is read ahead, and what is awaiting collection


def test_a_long_run_accounts_for_every_row_in_constant_memory(tmp_path):
    command = [sys.executable, str(Path(__file__).parent / "soak.py"), str(tmp_path), str(SECONDS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=4 * SECONDS + 400, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    print(result.stdout)
    assert [each["layout"] for each in found] == ["WindowLayout", "PackedLayout"]
    for each in found:
        assert each["epochs"] >= 1 and each["wrong_rows"] == 0 and each["lost_or_doubled_rows"] == 0, each
        first, most, last = each["memory_mb"]
        assert most <= first + GROWTH and last <= first + GROWTH, each
        assert max(each["files"]) <= each["files"][0] + 41, each  # 40, and one that is being opened
        assert max(each["threads"]) == each["threads"][0], each
