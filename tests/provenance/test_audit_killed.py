"""The audit log of a run whose processes are killed."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys

from batches import sections
from sft_files import documents, write_episodes

import grain_sft
from grain_sft import Host
from grain_sft.provenance import check_audit

RUN = """
import json, sys
from pathlib import Path
import grain_sft
folder = Path(sys.argv[1])
pipeline = grain_sft.load({config}, host=grain_sft.Host(0, 1))
state = folder / "checkpoint"
iterator = pipeline.iter()
if state.exists():
    iterator.set_state(json.loads(state.read_text()))
for batch in iterator:
    print(iterator.next_step, flush=True)
    if iterator.next_step % 10 == 0:
        temporary = folder / "checkpoint.tmp"
        temporary.write_text(json.dumps(iterator.get_state()))
        temporary.rename(state)
"""


def test_a_run_killed_and_resumed_three_times_is_confirmed_and_one_changed_line_is_not(tmp_path, own_cache):
    """Real processes, killed by SIGKILL at any moment."""
    data = write_episodes(tmp_path / "chats", documents(170, longest=60))
    config = sections(data, 64, seed=34521, epochs=3) | {"audit": str(tmp_path / "logs" / "audit")}
    script = tmp_path / "run.py"
    script.write_text(RUN.replace("{config}", repr(config)))
    steps = None
    for stop in (7, 23, 44, None):
        process = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if stop is not None and int(line) >= stop:
                process.send_signal(signal.SIGKILL)
                break
            steps = int(line)
        with contextlib.suppress(ValueError):
            process.stdout.read()
        assert process.wait() == (0 if stop is None else -signal.SIGKILL)
    pipeline = grain_sft.load(config, host=Host(0, 1))
    assert steps == len(pipeline) > 50
    for ending in (".log", ".jsonl"):
        path = tmp_path / "logs" / f"audit{ending}"
        checked = check_audit(path, pipeline)
        assert checked.accepted, checked.findings
        assert checked.loads == 4 and checked.resumes == 3 and checked.epochs == {0, 1, 2}
        lines = path.read_text().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            other = re.sub(r"(receipt\W+gs\d-)(\w)", lambda found: found[1] + ("1" if found[2] == "0" else "0"), line)
            path.write_text("".join([*lines[: number - 1], other, *lines[number:]]))
            assert {finding.line for finding in check_audit(path, pipeline).findings} == {number}
