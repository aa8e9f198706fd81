"""Commands that print, compare or check configs: `config`, `receipt`, `diff`, `audit-check` and `verify`."""

import argparse
import json
import time
from typing import Any

from grain_sft.cli.arguments import Parser, at_least, corpus_options, host_of, open_config, values_of
from grain_sft.errors import ConfigError
from grain_sft.options import options_of
from grain_sft.progress import elapsed


def config(parser: Parser) -> None:
    """Declare `grain-sft config`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", nargs="?", metavar="CONFIG", help="config to print, with inherited values")
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of configs, for editors")


def run_config(options: argparse.Namespace) -> None:
    """Run `grain-sft config`."""
    from grain_sft.config import config_schema, read_config

    try:
        _print_json(config_schema() if options.schema else read_config(options.config)[1])
    except TypeError as error:
        fix = "Quote it in the YAML: an unquoted 2024-01-01 is a date"
        raise ConfigError(f"{options.config}: a value has no JSON form ({error}). {fix}.") from error


def receipt(parser: Parser) -> None:
    """Declare `grain-sft receipt`."""
    parser.add_config(host="host h of H; the receipt depends on H only with order maxtext (default: 0/1)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run_receipt(options: argparse.Namespace) -> None:
    """Run `grain-sft receipt`."""
    receipt = open_config(options).receipt
    if options.json:
        _print_json(receipt.as_dict())
        return
    print(receipt.code)
    width = max(10, *map(len, receipt.parts)) + 2
    for name, part in receipt.parts.items():
        print(f"  {name:{width}}{part}")


def diff(parser: Parser) -> None:
    """Declare `grain-sft diff`."""
    parser.add_argument("configs", nargs=2, metavar="CONFIG", help="the two configs")
    steps = "compare steps 0 to N - 1 (default: up to 10,000 steps after the last amendment or change of a schedule)"
    parser.add_argument("--steps", type=at_least(1), metavar="N", help=steps)
    count = "count differing rows and documents in N steps, beginning at the first step that differs"
    parser.add_argument("--count", type=at_least(1), default=100, metavar="N", help=count)


def run_diff(options: argparse.Namespace) -> int:
    """Run `grain-sft diff`. Return status 0 if the batches are equal, else 1."""
    from grain_sft.config import load
    from grain_sft.provenance import difference
    from grain_sft.sampling import Host

    one, other = (load(config, host=Host(0, 1)) for config in options.configs)
    with elapsed("Comparing"):
        steps = None if options.steps is None else range(options.steps)
        found = difference(one, other, steps=steps, count=options.count)
    for reason in found.reasons:
        print(reason)
    if found.first_step is None:
        print(f"steps 0 to {found.compared.stop - 1}: the batches are equal")
        return 0
    print(f"step {found.first_step}: the first that differs")
    counted = f"steps {found.counted.start} to {found.counted.stop - 1}"
    print(f"{counted}: {found.differing_rows:,} of {found.total_rows:,} rows differ")
    if found.documents is not None:
        only = [f"{count:,} only in {config}" for count, config in zip(found.documents, options.configs, strict=True)]
        print(f"{counted}: of the documents, {' and '.join(only)}")
    return 1


def audit_check(parser: Parser) -> None:
    """Declare `grain-sft audit-check`."""
    parser.add_argument("log", help="audit log, text or JSONL")
    parser.add_config()
    parser.add_argument("--most", type=at_least(1), default=20, help="maximum number of contradictions to print")


def run_audit_check(options: argparse.Namespace) -> int:
    """Run `grain-sft audit-check`. Return status 0 if no line of the log contradicts the config, else 1."""
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


def verify(parser: Parser) -> None:
    """Declare `grain-sft verify`."""
    from grain_sft.corpus import open_corpus
    from grain_sft.verify import KINDS

    add = parser.add_argument
    add("where", help="corpus (any path that open_corpus takes), file of a plan (.arrays), or config")
    depth = parser.add_mutually_exclusive_group()
    fast = "check sizes, headers, boundaries and the ends of files, in seconds (the default)"
    depth.add_argument("--fast", action="store_true", help=fast)
    depth.add_argument("--full", action="store_true", help="read everything, in bounded memory")
    add("--as", dest="what", choices=KINDS, help="kind of WHERE (default: inferred from its name and first bytes)")
    add("--vocab-size", type=at_least(1), help="token ids must be below this number (default: the tokenizer's size)")
    add("--corpus", help="with a plan: the corpus whose documents it packs")
    add("--receipt", metavar="CODE", help="with a config: the receipt that it must have")
    add("--host", type=host_of, metavar="h/H", help="with a config (default: 0/1)")
    add("--refuse-duplicates", action="store_true", help="report documents with equal tokens as errors")
    add("--json", action="store_true", help="print as JSON")
    corpus_files = parser.add_argument_group("files of a corpus")
    parser.add_corpus_options(corpus_files)
    parser.add_declared(open_corpus, ("root",), corpus_files)


def run_verify(options: argparse.Namespace) -> int:
    """Run `grain-sft verify`. Return status 0 if the corpus, plan or config is sound, else 1."""
    from grain_sft.corpus import open_corpus
    from grain_sft.verify import verify

    if options.refuse_duplicates and not options.full:
        options.parser.error("--refuse-duplicates needs --full: duplicates are found by reading everything.")
    begin = time.perf_counter()
    declared = options_of(open_corpus)
    opening = corpus_options(options) | {"root": options.root}
    # Keep only what the user gave, because `verify` refuses these options if WHERE is a config. {} is an empty `path_remap`.
    opening = {name: value for name, value in opening.items() if value not in ({}, declared[name].default)}
    names = ("full", "what", "vocab_size", "corpus", "receipt", "host")
    with elapsed("Verifying"):
        report = verify(options.where, options=opening, **values_of(options, names))
    if options.refuse_duplicates:  # turn the notes about duplicates into errors
        for note in [finding for finding in report.findings if finding.check == "duplicates"]:
            report.findings.remove(note)
            report.wrong(note.check, note.where, note.message, note.place)
    seconds = time.perf_counter() - begin
    status = 0 if report.sound else 1
    if options.json:
        _print_json(report.as_dict() | {"seconds": seconds})
        return status
    for finding in report.findings:
        print(f"{'wrong' if finding.wrong else 'note':6}{finding}")
    for check, count in report.left_out.items():
        print(f"{'wrong':6}{check}: {count:,} more like these")
    for name, value in report.figures.items():
        print(f"{name.replace('_', ' '):24}{_shown(value)}")
    depth = "everything was read" if report.full else "sizes, headers, boundaries and ends; --full reads everything"
    print(f"{report.what} {report.where}: {'not ' * status}sound ({depth}; {seconds:.1f} s)")
    return status


def _shown(value: Any) -> str:
    """Return a figure of a `verify` report as text, such as "7,920" or "web 3, code 4"."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
