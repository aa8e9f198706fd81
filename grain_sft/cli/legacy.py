"""Commands with the options of older tools: `build-sft-primer`, `prepare-chat-sft` and `prepare-tool-sft`.

They make what `grain-sft prepare` makes of the same conversations.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from grain_sft.cli.arguments import at_least, share
from grain_sft.cli.prepare import add_run_options, run_request
from grain_sft.errors import PrepareError
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, conversation_lines, train_tokenizer
from grain_sft.storage import files

TEMPLATES = {"build-sft-primer": "primer", "prepare-chat-sft": "episode", "prepare-tool-sft": "episode_tool"}

TOKENIZER_VARIABLE = "GRAIN_SFT_TOKENIZER"
TOKENIZER_PATHS = ("artifacts/tokenizer/v2/spm.model", "data/tokenizer.model", "tokenizer.model", "tokenizer")
VOCAB_SIZES = (2048, 1024, 512, 300)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command that `parser.prog` ends with."""
    seed = "seed of the split (default: 42)"
    split = "share of the examples for validation (default: 0.1)"
    parser.add_argument("--seed", type=at_least(0), default=42, help=seed)
    if TEMPLATES[parser.prog.split()[-1]] == "primer":
        parser.add_argument(
            "--primer-jsonl", dest="input", default="data/primer.jsonl", help="(default: data/primer.jsonl)"
        )
        parser.add_argument(
            "--out-dir", default="data/cache/sft", help="the cache goes to OUT_DIR/primer (default: data/cache/sft)"
        )
        parser.add_argument("--val-frac", dest="val_split", type=share, default=0.1, help=split)
        parser.add_argument(
            "--t-max", type=at_least(2), default=1024, help="the model's context: longer examples keep their end"
        )
        parser.add_argument("--tokenizer", help="a SentencePiece model with <|sys|>, <|usr|>, <|asst|> and <|eot|>")
    else:
        parser.add_argument("--input", required=True, help="JSONL of conversations")
        parser.add_argument("--output_dir", "--output-dir", required=True, help="folder of the dataset, new or empty")
        parser.add_argument("--val_split", "--val-split", type=share, default=0.1, help=split)
        parser.add_argument("--tokens_per_shard", "--tokens-per-shard", type=at_least(1), default=50_000_000)
        parser.add_argument("--tokenizer", help="a SentencePiece model, a tokenizer.json, or a directory")
        parser.add_argument("--system_prompt", "--system-prompt", help="for conversations without one")
        parser.add_argument(
            "--on-error", choices=("stop", "skip"), default="stop", help="at a bad record (default: stop)"
        )
        parser.add_argument("--special-text", choices=("error", "encode"), default="error")
    add_run_options(parser)


def run(options: argparse.Namespace) -> int:
    """Prepare the corpus."""
    template = TEMPLATES[options.command]
    if template == "primer":
        output, source = files.join(files.normalize(options.out_dir), template), template
        chosen: dict[str, Any] = {"format": template, "max_length": options.t_max, "source": source}
    else:
        output = options.output_dir.rstrip("/")
        chosen = {
            "format": "episodes",
            "on_error": options.on_error,
            "special_text": options.special_text,
            "system_prompt": options.system_prompt,
            "shard_tokens": options.tokens_per_shard,
        }
    request = Request(
        datasets=(Dataset((options.input,)),),
        template=template,
        tokenizer=_tokenizer(options.tokenizer, options.input, f"{output}.tokenizer.model"),
        seed=options.seed,
        val_frac=options.val_split,
        **chosen,
    )
    return run_request(request, output, options)


def _tokenizer(given: str | None, conversations: str, trained: str) -> str:
    """Return the tokenizer that was given, or the first of these: $GRAIN_SFT_TOKENIZER, one of `TOKENIZER_PATHS`, one that
    was trained on the conversations and is kept at `trained`."""
    if given is not None:
        return given
    for path in (os.environ.get(TOKENIZER_VARIABLE), *TOKENIZER_PATHS, trained):
        if path and files.exists(path):
            print(f"tokenizer {path}")
            return path
    for vocab_size in VOCAB_SIZES:
        try:
            lines = conversation_lines([conversations], special_tokens=CHAT_TOKENS)
            files.write_bytes(trained, train_tokenizer(lines, vocab_size, CHAT_TOKENS))
            break
        except PrepareError:
            if vocab_size == VOCAB_SIZES[-1]:
                raise
    print(f"tokenizer {trained}: none was given with --tokenizer or ${TOKENIZER_VARIABLE}, or found; this one of")
    print(f"          {vocab_size:,} pieces was trained on {conversations}. Give your model's own to train that model.")
    return trained
