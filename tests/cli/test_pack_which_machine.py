"""`grain-sft pack --which-machine`, `--ties numpy:...`, and the receipt of a plan."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from packed_corpora import EOS, PLAN_CASE, write_case
from sft_files import documents, write_episodes

import grain_sft
from grain_sft.cli.main import main
from grain_sft.layout.packing.numpy_sort import numpy_sort
from grain_sft.pipeline import layout_receipt

GOLDEN_PLAN = Path(__file__).parents[1] / "golden" / "olmo_plan"


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    return write_episodes(tmp_path / "chats", documents(900, longest=50))


def pack(*words) -> int:
    return main(["pack", *map(str, words), "--sequence-length", "64"])


def test_a_plan_is_described_with_its_receipt_and_told_its_machine(chats, tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert pack(chats, "--algorithm", "best_fit_decreasing", "--ties", "numpy:baseline", "--output", out) == 0
    layout = grain_sft.PackedLayout(grain_sft.open_corpus(chats), 64, ties="numpy:baseline")
    found = json.loads(out.read_text())["packing"]
    assert found["receipt"] == layout_receipt(layout)
    assert f"receipt       {layout_receipt(layout)}, " in capsys.readouterr().out
    assert pack(chats, "--which-machine", found["plans"][0]["path"], "--output", out) == 0
    printed = capsys.readouterr().out
    assert f"numpy:baseline equal, all {len(layout):,} rows" in printed
    assert f"says of itself: ties='numpy:baseline', numpy {np.__version__}, baseline" in printed
    said = json.loads(out.read_text())["which_machine"]
    equal = {match["ties"]: match["equal"] for match in said["variants"]}
    assert equal["numpy:baseline"] is True and equal["stable"] is False and said["numpy"] == np.__version__
    assert (equal["numpy:avx512"] is None) == (numpy_sort() != "avx512")


def test_a_work_directory_of_olmo_core_with_the_paths_that_it_was_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    tokens, _ = write_case(PLAN_CASE, tmp_path)
    words = [*tokens, "--dtype", PLAN_CASE.dtype, "--eos-token-id", EOS, "--source-group-size", PLAN_CASE.group]
    words += ["--which-machine", GOLDEN_PLAN]
    assert pack(*words) == 1
    assert "if OLMo-core was given other paths" in capsys.readouterr().err.replace("If", "if")
    status = pack(*words, "--olmo-path", f"{tmp_path}{os.sep}=")
    printed = capsys.readouterr().out
    if numpy_sort() == "baseline":
        assert status == 1 and "none          of them made this plan" in printed
    else:
        assert status == 0 and "numpy:avx2     equal" in printed
    assert "stable         row " in printed


@pytest.mark.parametrize("words", [["--compare"], ["--algorithm", "multipack"]])
def test_which_machine_is_asked_alone(chats, words):
    with pytest.raises(SystemExit) as exit:
        pack(chats, "--which-machine", "plan", *words)
    assert exit.value.code == 2
