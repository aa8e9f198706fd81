"""`grain-sft audit-check`: what it prints, and its status."""

import json
import re

import pytest
from sft_files import documents, write_episodes

import grain_sft
from grain_sft import Host
from grain_sft.cli.main import main


@pytest.fixture
def config(tmp_path):
    stated = {
        "corpus": {"path": str(write_episodes(tmp_path / "chats", documents(60)))},
        "layout": {"kind": "padded", "sequence_length": 64},
        "sampler": {"order": "maxtext", "seed": 7, "global_batch_size": 4, "epochs": 2},
        "audit": str(tmp_path / "audit"),
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(stated))
    return path


@pytest.fixture
def audit(config, tmp_path):
    """The log of a run of two hosts that was stopped and resumed once."""
    for start, stop in ((0, 20), (16, 30)):
        iterator = grain_sft.load(config, host=Host(0, 2)).iter(start_step=start, threads=0)
        for _ in range(start, stop):
            next(iterator)
    return tmp_path / "audit"


@pytest.mark.parametrize("ending", [".log", ".jsonl"])
def test_a_log_is_confirmed_and_one_with_a_line_changed_is_not(config, audit, ending, capsys):
    path = audit.with_suffix(ending)
    assert main(["audit-check", str(path), str(config)]) == 0
    receipt = grain_sft.load(config, host=Host(0, 2)).receipt.code
    counts = "7 entries, 2 starts, 1 resumes, 2 epochs complete"
    assert capsys.readouterr().out == f"confirmed: {counts}; receipt {receipt}\n"
    path.write_text(re.sub('(since_step=|p": )16(?=, "step"| |$)', r"\g<1>15", path.read_text(), flags=re.MULTILINE))
    assert main(["audit-check", str(path), str(config)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{path}: line 7: since_step=15; expected 16."
    assert printed[1].startswith("CONTRADICTED: 7 entries")


def test_the_log_of_another_run_is_contradicted_shortly(config, audit, capsys):
    stated = json.loads(config.read_text())
    config.write_text(json.dumps(stated | {"sampler": {**stated["sampler"], "seed": 8}}))
    path = audit.with_suffix(".log")
    path.write_text(path.read_text() * 5)
    assert main(["audit-check", str(path), str(config)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 22 and "more that are not shown" in printed[20]
    assert "sampler differs: here" in "\n".join(printed)
