"""`grain-sft audit-check`: an audit log against the run that a config states."""

from __future__ import annotations

import argparse

from grain_sft.cli.progress import elapsed
from grain_sft.cli.types import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("log", help="audit log, text or JSONL")
    parser.add_argument("config", help="config of the run, a .yaml or .json file")
    parser.add_argument("--most", type=at_least(1), default=20, help="contradictions that are printed (default: 20)")


def run(options: argparse.Namespace) -> int:
    """Confirm the log (status 0), or say which of its lines say what is not so (status 1)."""
    from grain_sft.config import load
    from grain_sft.provenance.audit_check import check_audit
    from grain_sft.sampling import Host

    with elapsed("Checking the log"):
        pipeline = load(options.config, host=Host(0, 1))
        checked = check_audit(options.log, pipeline)
    for note in checked.notes:
        print(f"{options.log}: {note}")
    for finding in checked.findings[: options.most]:
        print(f"{options.log}: {finding}")
    if len(checked.findings) > options.most:
        print(f"{options.log}: {len(checked.findings) - options.most} more that are not shown; see --most.")
    said = f"{checked.entries:,} entries, {checked.loads:,} starts, {checked.resumes:,} resumes, {len(checked.epochs):,} epochs"
    verdict = "confirmed" if checked.accepted else "CONTRADICTED"
    print(f"{verdict}: {said} complete; receipt {checked.receipt}")
    return 0 if checked.accepted else 1
