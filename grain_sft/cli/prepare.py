"""`grain-sft prepare`: conversations in, a corpus out."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.cli.arguments import add_declared, at_least
from grain_sft.errors import PrepareError
from grain_sft.prepare import FORMATS, SCHEMAS, TEMPLATES, Dataset, Request, check_schema, dry_run, prepare
from grain_sft.progress import progress_bar
from grain_sft.storage import files

DERIVED = (
    *("seed", "shuffle", "val_frac", "max_length", "keep", "on_error", "special_text", "seq_level_weight", "condition"),
    *("system_prompt", "source"),
)
"""Fields of `Request` that are options as they are declared there."""

_AMOUNT = re.compile(r"\d+(\.\d*)?|\.\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    inputs = (
        "JSONL, JSON arrays or Parquet, also .gz and .zst; files, globs or directories, local or gs://. An amount may "
    )
    inputs += "follow each: a factor with a point (0.5, 3.0) or a number of records (5000)"
    parser.add_argument("inputs", nargs="+", metavar="INPUT [AMOUNT]", help=inputs)
    template = f"how a conversation becomes tokens: {', '.join(TEMPLATES)}, package.module:Name, or a "
    template += "file with a Jinja chat template"
    parser.add_argument("--template", required=True, type=_template, metavar="TEMPLATE", help=template)
    tokenizer = "a SentencePiece model, tokenizer.json, tiktoken file or directory"
    parser.add_argument("--tokenizer", required=True, help=tokenizer)
    parser.add_argument("--format", choices=list(FORMATS), help="format of the corpus (default: the template's own)")
    parser.add_argument("-o", "--output", required=True, help="a folder that is new or empty; local or gs://")
    add_schema(parser)
    add_declared(parser, Request, DERIVED)
    parser.add_argument("--chat-template", metavar="FILE", help="hf, olmo: a Jinja template instead of the tokenizer's")
    add_sizes(parser)
    first = "only show the first N (default: 100)"
    parser.add_argument("--dry-run", type=at_least(1), nargs="?", const=100, metavar="N", help=first)
    add_run_options(parser)


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Add `--schema`."""
    schema = (
        f"schema of the records: {', '.join(SCHEMAS)}; after a colon, keys that have other names in the file, as in "
    )
    schema += "prompt_completion:prompt=question,completion=answer (default: auto, by the keys of each record)"
    parser.add_argument("--schema", type=_schema, default="auto", metavar="NAME[:KEY=KEY,...]", help=schema)


def _schema(text: str) -> str:
    try:
        check_schema(text)
    except PrepareError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of files in the formats that have parts."""
    spelled = {"shard_tokens": ("--tokens-per-shard",)}
    add_declared(parser, Request, ("part_bytes", "shard_tokens"), spelled=spelled)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a corpus is made, which change nothing in it."""
    parser.add_argument("--workers", type=at_least(1), help="processes (default: one a core, if there is enough to do)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where the output is of another request")
    parser.add_argument(
        "--runner",
        metavar="NAME",
        help="prepare by an Apache Beam pipeline: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ...; Beam's own "
        "options follow, after all others (--project=... --region=... --temp_location=gs://...). Every worker must reach the "
        "inputs, the tokenizer and the output, and have grain_sft installed (--sdk_container_image=..., "
        "--requirements_file=...). The corpus is the same. Needs the extra 'beam'",
    )


def run(options: argparse.Namespace) -> int:
    """Prepare the corpus, or show the first records."""
    template, chat_template = options.template, options.chat_template
    if template not in TEMPLATES and not _is_imported(template):
        if chat_template is not None:
            raise PrepareError(f"--template {template} and --chat-template {chat_template}: expected one template.")
        template, chat_template = "hf", template
    request = Request(
        datasets=tuple(datasets_of(options.inputs)),
        template=template,
        format=options.format or TEMPLATES[template].format,
        chat_template=None if chat_template is None else files.read_text(chat_template),
        **{name: getattr(options, name) for name in ("tokenizer", "schema", "part_bytes", "shard_tokens", *DERIVED)},
    )
    if options.dry_run is not None:
        print(dry_run(request, options.dry_run))
        return 0
    return run_request(request, options.output, options)


def _template(word: str) -> str:
    if word in TEMPLATES or _is_imported(word) or word.endswith((".jinja", ".j2", ".txt")) or files.is_file(word):
        return word
    listed = ", ".join(TEMPLATES)
    raise argparse.ArgumentTypeError(
        f"{word!r} is neither a template nor a file. Give one of {listed}, package.module:Name, or a Jinja file."
    )


def _is_imported(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", word) is not None


def datasets_of(words: Sequence[str]) -> list[Dataset]:
    """Return the inputs, each with the amount that follows it.

    Raises:
      PrepareError: an amount that follows no input.
    """
    found: list[Dataset] = []
    takes_amount = False
    for word in words:
        takes_amount, expected = _AMOUNT.fullmatch(word) is None, takes_amount
        if takes_amount:
            found.append(Dataset((word,)))
        elif expected:
            found[-1] = Dataset(found[-1].paths, word)
        else:
            raise PrepareError(f"{word!r}: an amount follows an input, once. Write ./{word} for a file of that name.")
    return found


def run_request(request: Request, output: str, options: argparse.Namespace) -> int:
    """Prepare, on this machine or by Beam, and print the summary."""
    if options.runner is None:
        with progress_bar() as progress:
            manifest = prepare(request, output, workers=options.workers, overwrite=options.overwrite, progress=progress)
    elif options.workers is not None:
        raise PrepareError("--workers is of a preparation on this machine. Give the options of Beam's runner instead.")
    else:
        from grain_sft.prepare import beam

        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("apache_beam.runners.dataflow").setLevel(logging.INFO)  # prints the job's page and its state
        arguments = [f"--runner={options.runner}", *options.unknown]
        manifest = beam.prepare(request, output, pipeline_args=arguments, overwrite=options.overwrite)
    print_summary(manifest, output)
    return 0


def print_summary(manifest: Mapping[str, Any], output: str) -> None:
    """Print what a corpus holds, and what was cut, dropped and rejected."""
    if manifest.get("already"):
        print(f"{output} is complete: nothing to do.")
    for split, counts in manifest["splits"].items():
        trainable = counts["trainable_tokens"]
        share = trainable / max(1, counts["tokens"])
        sizes = f"{counts['documents']:>12,} examples  {counts['tokens']:>14,} tokens"
        print(f"{split:<6} {sizes}  {trainable:>14,} trainable ({share:.1%})")
        if counts["truncated"]:
            cut = f"{counts['truncated']:>12,} cut       {counts['cut_tokens']:>14,} tokens"
            print(f"       {cut}  {counts['cut_trainable_tokens']:>14,} trainable lost")
    for reason, count in manifest["dropped"].items():
        print(f"dropped  {count:,}: {reason}")
    if manifest["rejected"]:
        print(f"rejected {manifest['rejected']:,}: see {output.rstrip('/')}.rejected.jsonl")
    format = FORMATS[manifest["format"]]
    documents = sum(counts["documents"] for counts in manifest["splits"].values())
    for key, what in (("without_final_eos", "don't end with"), ("with_inner_eos", "have, before their end,")):
        count = manifest.get(key) or 0
        if format.found_by_eos and 0 < 2 * count < documents:  # where there are more, the template ends them so
            print(
                f"note     {count:,} of {documents:,} documents {what} the EOS token. In local files OLMo-core finds "
                "documents by it, unless use_array_if_local=False is set; this project reads the .csv.gz files."
            )
    print(f"output {output}")
    for split in manifest["splits"]:
        print(f"  {split:<5} {files.join(output, format.split_paths[split])}")
