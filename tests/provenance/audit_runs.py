"""Helpers for tests of audit logs. The runs have 125 rows and three epochs of 7 steps."""

import json
from pathlib import Path

from batches import take

from grain_sft.provenance import Checked, check_audit

ENDINGS = (".log", ".jsonl")
ROWS = 125


def entries(path: Path) -> list[dict]:
    """Return the entries of an audit log in format .jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def confirmed(audit: Path, pipeline, *, notes: int = 0) -> Checked:
    """Assert that both files of an audit log agree with the pipeline, and return the result for the second file."""
    for ending in ENDINGS:
        checked = check_audit(f"{audit}{ending}", pipeline)
        assert checked.accepted and len(checked.notes) == notes, (checked.notes, checked.findings[:3])
    return checked


def killed_and_resumed(make) -> None:
    """Take steps 0 to 4, 4 to 10, 7 to 15 and 15 to 20 of a run, as if it were killed three times."""
    for start, stop in ((0, 5), (4, 11), (7, 16), (15, 21)):
        take(make(), start, stop, threads=0)
