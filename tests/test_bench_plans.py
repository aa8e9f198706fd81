"""The benchmark of plans: what it measures, not how fast that is."""

from __future__ import annotations

import importlib.util
import json

import numpy as np

from grain_sft.bench import plans
from grain_sft.cli.main import main
from grain_sft.layout.packing import ALGORITHMS, PackingOptions


def test_plans_of_one_corpus_are_measured_each_way(tmp_path, capsys):
    words = ["bench", "--only", "plans", "--plan-documents", "20000", "--dir", str(tmp_path / "here"), "--output"]
    assert main([*words, str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["plans"]
    peer = {plans.OLMO} if importlib.util.find_spec("olmo_core") else set()
    assert figures.keys() == {plans.OURS, plans.GROUPED, plans.PACKED} | peer
    lengths = np.minimum(plans.made_up_lengths(20_000), plans.LENGTH)
    rows = len(ALGORITHMS["best_fit_decreasing"](lengths, PackingOptions(plans.LENGTH)).ends)
    assert figures[plans.GROUPED]["rows"] == figures[plans.PACKED]["rows"] == rows <= figures[plans.OURS]["rows"]
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in figures)
    assert not list((tmp_path / "here").iterdir())  # nothing is left behind
