"""What the commands that prepare corpora share: options, the summary, and where a tokenizer is looked for."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from typing import Any

from grain_sft.cli.progress import progress_bar
from grain_sft.cli.types import at_least
from grain_sft.errors import PrepareError
from grain_sft.prepare import Request, prepare
from grain_sft.prepare.training import CHAT_TOKENS, conversation_lines, train_tokenizer
from grain_sft.storage import files

TOKENIZER_VARIABLE = "GRAIN_SFT_TOKENIZER"
TOKENIZER_PLACES = ("artifacts/tokenizer/v2/spm.model", "data/tokenizer.model", "tokenizer.model", "tokenizer")
TRAINED_VOCAB = 2048


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of how a corpus is made, which change nothing in it."""
    parser.add_argument("--workers", type=at_least(1), help="processes (default: one a core, if there is enough to do)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where the output is of another request")
    parser.add_argument(
        "--runner",
        metavar="NAME",
        help="prepare by an Apache Beam pipeline: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ...; Beam's own "
        "options follow, after all others (--project=... --region=... --temp_location=gs://...). Inputs, tokenizer and "
        "output are where every worker can reach them, and grain_sft is installed there (--sdk_container_image=..., "
        "--requirements_file=...). The corpus is the same. Needs the extra 'beam'",
    )


def run_request(request: Request, output: str, options: argparse.Namespace) -> int:
    """Prepare, showing progress, and print the summary."""
    if options.runner is not None:
        manifest = _run_by_beam(request, output, options)
    else:
        with progress_bar() as progress:
            manifest = prepare(request, output, workers=options.workers, overwrite=options.overwrite, progress=progress)
    print_summary(manifest, output)
    return 0


def _run_by_beam(request: Request, output: str, options: argparse.Namespace) -> dict[str, Any]:
    from grain_sft.prepare import beam

    if options.workers is not None:
        raise PrepareError("--workers: is of a preparation on this machine. Beam's runners have options of their own.")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("apache_beam.runners.dataflow").setLevel(logging.INFO)  # where to see the job, and its state
    arguments = [f"--runner={options.runner}", *options.unknown]
    return beam.prepare(request, output, pipeline_args=arguments, overwrite=options.overwrite)


def print_summary(manifest: Mapping[str, Any], output: str) -> None:
    """What is in a corpus, and what is not."""
    if manifest.get("already"):
        print(f"{output} is complete: nothing to do.")
    for split, counts in manifest["splits"].items():
        share = counts["trainable_tokens"] / max(1, counts["tokens"])
        print(
            f"{split:<6} {counts['documents']:>12,} examples  {counts['tokens']:>14,} tokens  "
            f"{counts['trainable_tokens']:>14,} trainable ({share:.1%})"
        )
        if counts["truncated"]:
            print(
                f"       {counts['truncated']:>12,} cut       {counts['cut_tokens']:>14,} tokens  "
                f"{counts['cut_trainable_tokens']:>14,} trainable lost"
            )
    for reason, count in manifest["dropped"].items():
        print(f"dropped  {count:,}: {reason}")
    if manifest["rejected"]:
        print(f"rejected {manifest['rejected']:,}: see {output.rstrip('/')}.rejected.jsonl")
    if manifest["format"] == "olmo":
        _print_exceptions(manifest)
    print(f"output {output}")
    for split, folder in split_folders(manifest, output).items():
        print(f"  {split:<5} {folder}")


def _print_exceptions(manifest: Mapping[str, Any]) -> None:
    """Print how many documents OLMo-core would not find by their EOS token.

    Only where they are few, such as documents that were cut: a template that ends documents with another token than the
    tokenizer's EOS, or ends each message with it, is no fault of the documents.
    """
    documents = sum(counts["documents"] for counts in manifest["splits"].values())
    for key, what in (("without_final_eos", "don't end with"), ("with_inner_eos", "have, before their end,")):
        count = manifest.get(key) or 0
        if 0 < 2 * count < documents:
            print(
                f"note     {count:,} of {documents:,} documents {what} the EOS token. In local files OLMo-core finds "
                "documents by it, unless use_array_if_local=False is set; this project reads the .csv.gz files."
            )


def split_folders(manifest: Mapping[str, Any], output: str) -> dict[str, str]:
    """Where each split is."""
    splits = list(manifest["splits"])
    if manifest["format"] == "openchat":
        names = {"train": "train", "val": "eval"}
        return {split: files.join(output, f"openchat.{names[split]}.parquet") for split in splits}
    return {split: files.join(output, split) for split in splits}


def find_tokenizer(given: str | None, conversations: str, trained: str) -> str:
    """The tokenizer that was given; else $GRAIN_SFT_TOKENIZER, or one at a usual place; else one trained on the
    conversations, kept at `trained`.

    Raises:
      GrainSftError: the conversations can't be read, or are too few to train on.
    """
    if given is not None:
        return given
    for place in (os.environ.get(TOKENIZER_VARIABLE), *TOKENIZER_PLACES, trained):
        if place and files.exists(place):
            print(f"tokenizer {place}")
            return place
    for vocab_size in (TRAINED_VOCAB, TRAINED_VOCAB // 2, TRAINED_VOCAB // 4, 300):
        try:
            model = train_tokenizer(
                conversation_lines([conversations], special_tokens=CHAT_TOKENS), vocab_size, CHAT_TOKENS
            )
            break
        except PrepareError:
            if vocab_size == 300:
                raise
    files.write_bytes(trained, model)
    print(f"tokenizer {trained}: none was given with --tokenizer or ${TOKENIZER_VARIABLE}, or found; this one of")
    print(f"          {vocab_size:,} pieces was trained on {conversations}. Give your model's own to train that model.")
    return trained
