"""`grain-sft verify`: whether a corpus, a plan or a config is sound."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from grain_sft.cli.arguments import add_corpus_options, add_declared, at_least, corpus_options, host_of
from grain_sft.corpus import open_corpus
from grain_sft.progress import elapsed
from grain_sft.verify import KINDS, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("where", help="what open_corpus takes, the file of a plan (.arrays), or a config")
    depth = parser.add_mutually_exclusive_group()
    fast = "sizes, headers, boundaries and the ends of files; seconds (the default)"
    depth.add_argument("--fast", action="store_true", help=fast)
    depth.add_argument("--full", action="store_true", help="read everything, in bounded memory")
    kind = "what it is (default: inferred from its name and first bytes)"
    parser.add_argument("--as", dest="what", choices=KINDS, help=kind)
    parser.add_argument("--vocab-size", type=at_least(1), help="ids are below this (default: the tokenizer's size)")
    parser.add_argument("--corpus", help="with a plan: the corpus that it is of")
    parser.add_argument("--receipt", metavar="CODE", help="with a config: the receipt that it must have")
    parser.add_argument("--host", type=host_of, metavar="h/H", help="with a config (default: 0/1)")
    parser.add_argument("--refuse-duplicates", action="store_true", help="documents with equal tokens are an error too")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    files = parser.add_argument_group("files, of a corpus")
    add_corpus_options(files)
    add_declared(files, open_corpus, ("root",))


def run(options: argparse.Namespace) -> int:
    """Check and print: status 0 if it is sound, 1 if something is wrong."""
    if options.refuse_duplicates and not options.full:
        options.parser.error("--refuse-duplicates needs --full: duplicates are found by reading everything.")
    begin = time.perf_counter()
    given = {name: getattr(options, name) for name in ("full", "what", "vocab_size", "corpus", "receipt", "host")}
    opening = corpus_options(options) | {"root": options.root}
    with elapsed("Verifying"):
        report = verify(options.where, options=opening, **given)
    if options.refuse_duplicates:
        for finding in [each for each in report.findings if each.check == "duplicates"]:
            report.findings.remove(finding)
            report.wrong(finding.check, finding.where, finding.message, finding.place)
    seconds = time.perf_counter() - begin
    if options.json:
        print(json.dumps(report.as_dict() | {"seconds": seconds}, indent=2))
        return 0 if report.sound else 1
    for finding in report.findings:
        print(f"{'wrong' if finding.wrong else 'note':6}{finding}")
    for check, count in report.left_out.items():
        print(f"{'wrong':6}{check}: {count:,} more like these")
    for name, value in report.figures.items():
        print(f"{name.replace('_', ' '):24}{_shown(value)}")
    depth = "everything was read" if report.full else "sizes, headers, boundaries and ends; --full reads everything"
    verdict = "sound" if report.sound else "not sound"
    print(f"{report.what} {report.where}: {verdict} ({depth}; {seconds:.1f} s)")
    return 0 if report.sound else 1


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
