"""Commands with the names and options of older tools. They prepare corpora as `grain-sft prepare` does."""

import argparse
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from grain_sft.cli.arguments import Parser, values_of
from grain_sft.cli.prepare import add_run_options, run_request
from grain_sft.errors import PrepareError
from grain_sft.prepare import CHAT_TOKENS, TEMPLATES, Dataset, Request, Target, conversation_lines, train_tokenizer
from grain_sft.storage import files

CHAT_FLAGS = {
    "val_frac": ("--val_split", "--val-split"),
    "shard_tokens": ("--tokens_per_shard", "--tokens-per-shard"),
    "system_prompt": ("--system_prompt", "--system-prompt"),
    "on_error": ("--on-error",),
    "special_text": ("--special-text",),
}
"""Options of `prepare-chat-sft` and `prepare-tool-sft`: arguments of `Request`, and the flags of the older tools for them."""
PRIMER_FLAGS = {"val_frac": ("--val-frac",), "max_length": ("--t-max",)}
"""Options of `build-sft-primer`, as in `CHAT_FLAGS`."""
DEFAULTS = {"val_frac": 0.1, "max_length": 1024}
"""Defaults of these options that differ from those of `Request`."""

TOKENIZER_VARIABLE = "GRAIN_SFT_TOKENIZER"
# the usual places of a tokenizer: the path in the environment variable `TOKENIZER_VARIABLE`, then these paths
TOKENIZER_PATHS = ("artifacts/tokenizer/v2/spm.model", "data/tokenizer.model", "tokenizer.model", "tokenizer")
VOCAB_SIZES = (2048, 1024, 512, 300)
"""Vocabulary sizes to try for a new tokenizer. A small text has too few pieces for the larger sizes."""


def build_sft_primer(parser: Parser) -> None:
    """Declare `grain-sft build-sft-primer`."""
    add = parser.add_argument
    add("--primer-jsonl", dest="input", default="data/primer.jsonl", help="JSONL of conversations")
    add("--out-dir", default="data/cache/sft", help="the cache is written to OUT_DIR/primer")
    _add_shared(parser, PRIMER_FLAGS)


def prepare_chat_sft(parser: Parser) -> None:
    """Declare `grain-sft prepare-chat-sft` or `grain-sft prepare-tool-sft`."""
    parser.add_argument("--input", required=True, help="JSONL of conversations")
    parser.add_argument("--output_dir", "--output-dir", required=True, help="folder of the dataset, new or empty")
    _add_shared(parser, CHAT_FLAGS)


prepare_tool_sft = prepare_chat_sft


def _add_shared(parser: Parser, spelled: Mapping[str, tuple[str, ...]]) -> None:
    """Add the options that the three commands share, and the options in `spelled`."""
    parser.add_argument("--tokenizer", help="the model's tokenizer (default: one in a usual place, or a new one)")
    for name in ("seed", *spelled):
        changed: dict[str, Any] = {"default": DEFAULTS[name]} if name in DEFAULTS else {}
        parser.add_declared(Request, (name,), spelled=spelled, **changed)
    add_run_options(parser)


def _run(options: argparse.Namespace, template: str, spelled: Iterable[str]) -> None:
    """Prepare the corpus: a dataset of chats in `output_dir`, or the cache of `build-sft-primer` in `out_dir`/primer."""
    if "output_dir" in options:
        output = files.normalize(options.output_dir)
        # `source` is the name of the corpus in its metadata; a dataset of chats has none
        source, output = "", output.rstrip("/") or output  # the root folder stays "/"
    else:
        source, output = template, files.join(files.normalize(options.out_dir), template)
    Target(output).check_writable()  # before `_tokenizer`, which may train a tokenizer
    request = Request(
        datasets=(Dataset((options.input,)),),
        template=template,
        tokenizer=_tokenizer(options, f"{output}.tokenizer.model"),
        format=TEMPLATES[template].format,
        source=source,
        **values_of(options, ("seed", *spelled)),
    )
    run_request(request, output, options)


run_build_sft_primer = functools.partial(_run, template="primer", spelled=PRIMER_FLAGS)
run_prepare_chat_sft = functools.partial(_run, template="episode", spelled=CHAT_FLAGS)
run_prepare_tool_sft = functools.partial(_run, template="episode_tool", spelled=CHAT_FLAGS)


def _tokenizer(options: argparse.Namespace, trained: str) -> str:
    """Return the path of the user's tokenizer, or of a tokenizer in a usual place.

    Without either, use the tokenizer that an earlier run left at `trained`, or train one there.
    """
    if options.tokenizer is not None:
        return str(options.tokenizer)
    named = files.normalize(os.environ.get(TOKENIZER_VARIABLE, ""))
    if named and not files.exists(named):
        raise PrepareError(f"${TOKENIZER_VARIABLE}: {named} does not exist. Fix the path, or unset the variable.")
    for path in (named, *TOKENIZER_PATHS, trained):
        if path and files.exists(path):
            print(f"tokenizer {path}")
            return path
    on_error = vars(options).get("on_error", "stop")
    lines = list(conversation_lines([options.input], special_tokens=CHAT_TOKENS, on_error=on_error))
    for vocab_size in VOCAB_SIZES:
        try:
            files.write_bytes(trained, train_tokenizer(lines, vocab_size, CHAT_TOKENS))
            break
        except PrepareError:
            if vocab_size == VOCAB_SIZES[-1]:
                raise
    print(f"tokenizer {trained}: trained on {options.input}, with {vocab_size:,} pieces, because no tokenizer was found.")
    print(f"          If your model has a tokenizer, give its path with --tokenizer or ${TOKENIZER_VARIABLE}.")
    return trained
