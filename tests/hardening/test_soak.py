"""A long run at full speed: no row wrong, lost or read twice in an epoch; memory, open files and threads stay what they are.

GRAIN_SFT_SOAK=3600 pytest -n0 -s tests/hardening/test_soak.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from children import run

SECONDS = float(os.environ.get("GRAIN_SFT_SOAK", "2"))
"""An hour: 3600."""

GROWTH = 32  # MB of memory that come and go: what is read ahead, and what is awaiting collection


def test_a_long_run_accounts_for_every_row_in_constant_memory(tmp_path):
    out = run(Path(__file__).with_name("soak.py"), tmp_path, SECONDS, timeout=4 * SECONDS + 400)
    print(out)
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["layout"] for each in found] == ["WindowLayout", "PackedLayout"]
    for each in found:
        assert each["epochs"] >= 1 and each["wrong_rows"] == 0 and each["lost_or_doubled_rows"] == 0, each
        first, most, last = each["memory_mb"]
        assert most <= first + GROWTH and last <= first + GROWTH, each
        assert max(each["files"]) <= each["files"][0] + 41, each  # 40, and one that is being opened
        assert max(each["threads"]) == each["threads"][0], each
