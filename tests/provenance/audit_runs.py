"""Runs with an audit log: 125 rows, 7 steps an epoch, three epochs."""

import json
from pathlib import Path

from batches import take

from grain_sft.provenance import Checked, check_audit

ENDINGS = (".log", ".jsonl")
ROWS = 125


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def confirmed(audit: Path, pipeline, *, notes: int = 0) -> Checked:
    """The result of a check of both files, which must not contradict the pipeline."""
    for ending in ENDINGS:
        checked = check_audit(f"{audit}{ending}", pipeline)
        assert checked.accepted and len(checked.notes) == notes, (checked.notes, checked.findings[:3])
    return checked


def killed_and_resumed(make) -> None:
    """Runs that were killed at steps 5, 11 and 16, resumed from checkpoints before, and came to the end at step 21."""
    for start, stop in ((0, 5), (4, 11), (7, 16), (15, 21)):
        take(make(), start, stop, threads=0)
