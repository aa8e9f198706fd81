"""`grain-sft audit-check`: an audit log against the run that a config states."""

from __future__ import annotations

import argparse

from grain_sft.cli.arguments import add_config, at_least, open_config
from grain_sft.progress import elapsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("log", help="audit log, text or JSONL")
    add_config(parser)
    parser.add_argument("--most", type=at_least(1), default=20, help="contradictions that are printed (default: 20)")


def run(options: argparse.Namespace) -> int:
    """Confirm the log (status 0), or print its lines that contradict the config (status 1)."""
    from grain_sft.provenance import check_audit

    pipeline = open_config(options)
    with elapsed("Checking the log"):
        checked = check_audit(options.log, pipeline)
    for line in (*checked.notes, *checked.findings[: options.most]):
        print(f"{options.log}: {line}")
    if len(checked.findings) > options.most:
        print(f"{options.log}: {len(checked.findings) - options.most} more that are not shown; see --most.")
    counts = f"{checked.entries:,} entries, {checked.loads:,} starts, {checked.resumes:,} resumes"
    verdict = "confirmed" if checked.accepted else "CONTRADICTED"
    print(f"{verdict}: {counts}, {len(checked.epochs):,} epochs complete; receipt {checked.receipt}")
    return 0 if checked.accepted else 1
