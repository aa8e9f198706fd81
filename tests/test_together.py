"""Processes that start together: what is expensive is done once."""

from __future__ import annotations

import pytest

from grain_sft.bench import Scale
from grain_sft.bench.processes import TOGETHER


@pytest.mark.heavy
def test_eight_processes_cost_little_more_than_one(tmp_path):
    measured = TOGETHER.measure(tmp_path, Scale(together_tokens=200_000_000))
    figures = measured["together"]
    assert figures["made by"] == 1
    alone, shared = figures["cold 1 cpu_s"], figures["cold 8 cpu_s"] - figures["warm 8 cpu_s"]
    # the plan, whoever makes it; not what each does for itself; time is counted in hundredths of a second of each process
    assert shared < 1.2 * alone + 0.08
    assert "by 1 of 8" in list(TOGETHER.lines(measured))[-1]
