"""`grain-sft prepare`: conversations in, a corpus out."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from grain_sft.cli import preparing
from grain_sft.cli.types import add_schema_argument, at_least, share
from grain_sft.errors import PrepareError
from grain_sft.prepare import FORMATS, TEMPLATES, Dataset, Request, dry_run
from grain_sft.storage import files

DEFAULT_FORMATS = {"primer": "primer", "openchat": "openchat", "episode": "episodes", "episode_tool": "episodes"}

_AMOUNT = re.compile(r"\d+(\.\d*)?|\.\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT [AMOUNT]",
        help="JSONL, JSON arrays or Parquet, also .gz and .zst; files, globs or directories, local or gs://. After each may "
        "follow how much of it: a factor with a point (0.5, 3.0) or a number of records (5000)",
    )
    parser.add_argument(
        "--template",
        required=True,
        type=_template,
        metavar="TEMPLATE",
        help=f"how a conversation becomes tokens: {', '.join(TEMPLATES)}, or a file with a Jinja chat template",
    )
    parser.add_argument(
        "--tokenizer", required=True, help="a SentencePiece model, tokenizer.json, tiktoken file or directory"
    )
    parser.add_argument("--format", choices=list(FORMATS), help="of the corpus (default: the template's own)")
    parser.add_argument("-o", "--output", required=True, help="a folder that is new or empty; local or gs://")
    add_schema_argument(parser)
    parser.add_argument("--val-frac", type=share, default=0.0, help="share of the records for validation (default: 0)")
    parser.add_argument("--seed", type=at_least(0), default=42, help="of split and shuffle (default: 42)")
    parser.add_argument(
        "--shuffle", action=argparse.BooleanOptionalAction, default=None, help="(default: as the format's own tool)"
    )
    parser.add_argument("--max-length", type=at_least(2), help="tokens; longer documents are cut, and counted")
    parser.add_argument("--keep", choices=("first", "last"), help="tokens of a cut document (default: the template's)")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="at a bad record (default: stop)")
    parser.add_argument(
        "--special-text",
        choices=("error", "encode"),
        default="error",
        help="text that spells a special token: an error (default), or encoded as ordinary text",
    )
    parser.add_argument("--seq-level-weight", action="store_true", help="openchat: a message's weight over its length")
    parser.add_argument("--condition", help="openchat: before every role, where the record has none")
    parser.add_argument("--chat-template", metavar="FILE", help="hf, olmo: a Jinja template instead of the tokenizer's")
    parser.add_argument("--system-prompt", help="for conversations without a system message")
    parser.add_argument("--source", default="", help="the corpus's name in its metadata")
    parser.add_argument(
        "--part-bytes", type=at_least(8), default=1 << 30, help="olmo: of tokens in a part (default: 1 GiB)"
    )
    parser.add_argument(
        "--tokens-per-shard", type=at_least(1), default=50_000_000, help="episodes: (default: 50,000,000)"
    )
    parser.add_argument(
        "--dry-run", type=at_least(1), nargs="?", const=100, metavar="N", help="only show the first N (default: 100)"
    )
    preparing.add_run_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prepare, or try the first records."""
    template, chat_template = options.template, options.chat_template
    if template not in TEMPLATES:
        if chat_template is not None:
            raise PrepareError(f"--template {template} and --chat-template {chat_template}: expected one template.")
        template, chat_template = "hf", template
    request = Request(
        datasets=tuple(datasets_of(options.inputs)),
        template=template,
        tokenizer=options.tokenizer,
        format=options.format or DEFAULT_FORMATS.get(template, "olmo"),
        schema=options.schema,
        seed=options.seed,
        shuffle=options.shuffle,
        val_frac=options.val_frac,
        max_length=options.max_length,
        keep=options.keep,
        on_error=options.on_error,
        special_text=options.special_text,
        seq_level_weight=options.seq_level_weight,
        condition=options.condition,
        chat_template=None if chat_template is None else files.read_text(chat_template),
        system_prompt=options.system_prompt,
        part_bytes=options.part_bytes,
        shard_tokens=options.tokens_per_shard,
        source=options.source,
    )
    if options.dry_run is not None:
        print(dry_run(request, options.dry_run))
        return 0
    return preparing.run_request(request, options.output, options)


def _template(word: str) -> str:
    """A template's name, or the path of a Jinja file."""
    if word in TEMPLATES or word.endswith((".jinja", ".j2", ".txt")) or files.is_file(word):
        return word
    raise argparse.ArgumentTypeError(
        f"{word!r} is neither a template nor a file. Give one of {', '.join(TEMPLATES)}, or a Jinja file."
    )


def datasets_of(words: Sequence[str]) -> list[Dataset]:
    """Inputs, each with the amount that follows it.

    Raises:
      PrepareError: an amount before any input.
    """
    found: list[Dataset] = []
    expects = False
    for word in words:
        if _AMOUNT.fullmatch(word):
            if not expects:
                raise PrepareError(
                    f"{word!r}: an amount follows an input, once. Write ./{word} for a file of that name."
                )
            found[-1] = Dataset(found[-1].paths, word)
        else:
            found.append(Dataset((word,)))
        expects = not _AMOUNT.fullmatch(word)
    return found
