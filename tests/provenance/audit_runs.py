"""Helpers for tests of audit logs. The runs have 125 rows and three epochs of 7 steps."""

import json
from pathlib import Path

from batches import take

from grain_sft.provenance import Checked, check_audit

ENDINGS = (".log", ".jsonl")
ROWS = 125


def entries(path: Path) -> list[dict]:
    """Return the entries of an audit log in format .jsonl."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def confirmed(audit: Path, pipeline, *, notes: int = 0) -> Checked:
    """Check both files of an audit log, assert that they agree with the pipeline, and return the result of the second."""
    for ending in ENDINGS:
        checked = check_audit(f"{audit}{ending}", pipeline)
        assert checked.accepted and len(checked.notes) == notes, (checked.notes, checked.findings[:3])
    return checked


def killed_and_resumed(make) -> None:
    """Take the batches of a run that is killed at steps 5, 11 and 16, resumes at steps 4, 7 and 15, and ends at step 21."""
    for start, stop in ((0, 5), (4, 11), (7, 16), (15, 21)):
        take(make(), start, stop, threads=0)
