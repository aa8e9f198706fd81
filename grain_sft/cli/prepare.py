"""Commands that write a corpus or a tokenizer: `prepare`, `convert`, `withdraw` and `train-tokenizer`."""

import argparse
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grain_sft import prepare as preparing
from grain_sft.cli.arguments import Parser, at_least, check_output, values_of
from grain_sft.corpus import open_corpus
from grain_sft.errors import PrepareError
from grain_sft.prepare import CHAT_TOKENS, FORMATS, MIN_VOCAB, SCHEMAS, TEMPLATES, TEXT_OPTIONS, Dataset, Request
from grain_sft.progress import elapsed, progress_bar
from grain_sft.storage import files

DERIVED = (
    *("seed", "shuffle", "val_frac", "min_length", "max_length", "long_documents", "keep", "on_error", "special_text"),
    *("seq_level_weight", "condition", "system_prompt", "source"),
)
"""Fields of `Request` that become options."""
SIZES = {"part_bytes": ("--part-bytes",), "shard_tokens": ("--tokens-per-shard",)}
"""More fields of `Request` that become options, with the flags of these options."""

_AMOUNT = re.compile(r"\d+(\.\d*)?|\.\d+")
_CORPUS = "what open_corpus takes: a folder, a prefix of Megatron's files, token files, ..."
_FORMATS = f"{', '.join(FORMATS)}, or package.module:Name"
_FOLDER = "a folder that is new or empty; local or gs://"
_INPUTS = """file, glob, or folder with all files below it, local or gs://. Files are JSONL, JSON arrays, Parquet, Arrow (a
dataset's folder), ArrayRecord, or texts (.txt, .md). JSON and texts may be compressed (.gz, .zst). AMOUNT states how much to
take of the input before it: a factor with a point (0.5, 3.0) or a number of records (5000)"""
_WITHDRAWN = """note   This is another corpus: its documents have new numbers, so its rows, orders, plans and receipts differ.
       Begin a run on it at step 0. To continue a run that has begun, keep {0} and write the amendment `withdraw`
       in the run's config, which leaves all other rows as they are."""
_RUNNER = """prepare with Apache Beam on this runner: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ... Give Beam's
own options after all others (--project=... --region=... --temp_location=gs://...). Every worker must reach the inputs, the
tokenizer and the output, and have grain_sft installed (--sdk_container_image=..., --requirements_file=...). The corpus is the
same as without Beam. Needs the extra 'beam'"""


def prepare(parser: Parser) -> None:
    """Declare `grain-sft prepare`."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT [AMOUNT]", help=_INPUTS)
    template = f"how a conversation becomes tokens: {', '.join(TEMPLATES)}, package.module:Name, or a Jinja file"
    add("--template", required=True, type=_template, metavar="TEMPLATE", help=template)
    parser.add_declared(Request, ("tokenizer",))
    add("--format", metavar="NAME", help=f"format of the corpus: {_FORMATS} (default: the template's own)")
    add("-o", "--output", required=True, help=_FOLDER)
    _add_schema(parser)
    parser.add_declared(Request, DERIVED)
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's, for --template hf or olmo")
    parser.add_declared(Request, TEXT_OPTIONS, parser.add_argument_group("plain documents (--template text)"))
    parser.add_declared(Request, SIZES, spelled=SIZES)
    add("--dry-run", type=at_least(1), nargs="?", const=100, metavar="N", help="only render the first N records (or 100)")
    add_run_options(parser)


def _add_schema(parser: Parser) -> None:
    schema = f"schema of the records: {', '.join(SCHEMAS)}. If keys have other names in the file, name them, as in "
    schema += "prompt_completion:prompt=question,completion=answer (default: auto, by the keys of each record)"
    parser.add_argument("--schema", type=_schema, default="auto", metavar="NAME[:KEY=KEY,...]", help=schema)


def _schema(text: str) -> str:
    """Check the argument of `--schema`, and return it."""
    try:
        preparing.check_schema(text)
    except PrepareError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_run_options(parser: Parser) -> None:
    """Add the options of a run of `prepare` that do not change the bytes of the corpus."""
    add = parser.add_argument
    add("--workers", type=at_least(1), help="number of processes (default: one for each core; fewer for small inputs)")
    add("--overwrite", action="store_true", help="replace an output that was made from other inputs or options")
    add("--runner", metavar="NAME", help=_RUNNER)


def run_prepare(options: argparse.Namespace) -> None:
    """Run `grain-sft prepare`."""
    template, chat_template = options.template, options.chat_template
    if template not in TEMPLATES and not _is_imported(template):  # a Jinja file, which template hf renders
        if chat_template is not None:
            raise PrepareError(f"--template {template} and --chat-template {chat_template}: expected one template.")
        template, chat_template = "hf", template
    request = Request(
        datasets=tuple(datasets_of(options.inputs)),
        template=template,
        format=options.format or TEMPLATES[template].format,
        chat_template=None if chat_template is None else files.read_text(chat_template),
        **values_of(options, ("tokenizer", "schema", *SIZES, *DERIVED, *TEXT_OPTIONS)),
    )
    if options.dry_run is not None:
        print(preparing.dry_run(request, options.dry_run))
    else:
        run_request(request, options.output, options)


def _template(word: str) -> str:
    """Check the argument of `--template`, and return it."""
    if word in TEMPLATES or _is_imported(word) or files.is_remote(word) or files.is_file(word):
        return word
    expected = f"one of {', '.join(TEMPLATES)}, package.module:Name, or a Jinja file"
    raise argparse.ArgumentTypeError(f"{word!r} is neither a template nor a file. Give {expected}.")


def _is_imported(word: str) -> bool:
    """Return whether a word has the form package.module:Name."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", word) is not None


def datasets_of(words: Sequence[str]) -> list[Dataset]:
    """Return the inputs, each with its amount: `a.jsonl 0.5 b.jsonl` are two inputs, and 0.5 is the amount of the first."""
    datasets: list[Dataset] = []
    for index, word in enumerate(words):
        if _AMOUNT.fullmatch(word) is None:
            datasets.append(Dataset((word,)))
        elif index and _AMOUNT.fullmatch(words[index - 1]) is None:
            datasets[-1] = Dataset(datasets[-1].paths, word)
        else:
            raise PrepareError(f"{word!r}: one amount may follow each input. Write ./{word} for a file of that name.")
    return datasets


def run_request(request: Request, output: str, options: argparse.Namespace) -> None:
    """Prepare a corpus, on this machine or by Beam, and print the summary."""
    if options.runner is None:
        with progress_bar() as progress:
            how = values_of(options, ("workers", "overwrite"))
            manifest = preparing.prepare(request, output, **how, progress=progress)
    elif options.workers is not None:
        raise PrepareError("--workers counts processes of this machine. Give the option of Beam's runner instead.")
    else:
        from grain_sft.prepare import beam

        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("apache_beam.runners.dataflow").setLevel(logging.INFO)  # the job's address and state
        arguments = [f"--runner={options.runner}", *options.unknown]
        manifest = beam.prepare(request, output, pipeline_args=arguments, overwrite=options.overwrite)
    print_summary(manifest, output)


def print_summary(manifest: Mapping[str, Any], output: str) -> None:
    """Print the sizes of a corpus, and the numbers of documents that were cut, dropped and rejected."""
    if manifest.get("already"):  # an earlier run has written the same corpus
        print(f"{output} is complete: nothing to do.")
    for split, counts in manifest["splits"].items():
        counts = {**counts, "share": counts["trainable_tokens"] / max(1, counts["tokens"])}
        sizes = "{documents:>12,} examples  {tokens:>14,} tokens  {trainable_tokens:>14,} trainable ({share:.1%})"
        print(f"{split:<6} {sizes.format(**counts)}")
        if counts["truncated"]:
            cut = "{truncated:>12,} cut       {cut_tokens:>14,} tokens  {cut_trainable_tokens:>14,} trainable lost"
            print(f"       {cut.format(**counts)}")
    if text := manifest.get("text"):
        print(f"text   {text['bytes']:>12,} bytes     {text['bytes'] / text['tokens']:>14.3f} bytes a token")
    for reason, count in manifest["dropped"].items():
        print(f"dropped  {count:,}: {reason}")
    if manifest["rejected"]:
        print(f"rejected {manifest['rejected']:,}: see {output.rstrip('/')}.rejected.jsonl")
    format = FORMATS[manifest["format"]]
    documents = sum(counts["documents"] for counts in manifest["splits"].values())
    for key, what in (("without_final_eos", "don't end with"), ("with_inner_eos", "have, before their last token,")):
        count = manifest.get(key) or 0
        # No note if most conversations are like this: then their template is the cause. Texts (`text`) have no template.
        is_unusual = 2 * count < documents
        if format.found_by_eos and count and (is_unusual or text):
            reason = "OLMo-core ends documents of local files at EOS tokens, unless use_array_if_local=False is set"
            note = f"{count:,} of {documents:,} documents {what} the EOS token. {reason}"
            print(f"note     {note}; this project reads their ends from .csv.gz files.")
    print(f"output {output}")
    for split in manifest["splits"]:
        print(f"  {split:<5} {files.join(output, format.split_paths[split])}")


def convert(parser: Parser) -> None:
    """Declare `grain-sft convert`."""
    parser.add_argument("corpus", help=_CORPUS)
    _add_conversion(parser, "format of the output", required=True)


def withdraw(parser: Parser) -> None:
    """Declare `grain-sft withdraw`."""
    named = "documents to leave out: a number, INPUT:LINE, an input, or a file with a list of these, one a line"
    parser.add_argument("corpus", help=_CORPUS)
    parser.add_argument("documents", nargs="+", metavar="DOCUMENT", help=named)
    _add_conversion(parser, "format of the output (default: as the corpus was prepared)", required=False)


def _add_conversion(parser: Parser, format: str, *, required: bool) -> None:
    """Add the options of `convert` and `withdraw`. `format` is the help text of `--format`."""
    add = parser.add_argument
    names = ", ".join(name for name in FORMATS if not FORMATS[name].of_pairs)
    add("-o", "--output", required=True, help=_FOLDER)
    add("--format", required=required, metavar="NAME", help=f"{format}: {names}, or package.module:Name")
    add("--tokenizer", help="tokenizer of the corpus (default: the tokenizer in its folder, if any)")
    parser.add_declared(open_corpus, ("dtype", "eos_token_id"))
    parser.add_declared(Request, SIZES, spelled=SIZES)
    add("--overwrite", action="store_true", help="replace an output that was made from other documents or options")


def run_convert(options: argparse.Namespace, without: Sequence[str] = ()) -> None:
    """Run `grain-sft convert`, or `withdraw`, which leaves out the documents `without`."""
    settings = values_of(options, ("format", "tokenizer", "dtype", "eos_token_id", *SIZES, "overwrite"))
    with progress_bar() as progress:
        manifest = preparing.convert(options.corpus, options.output, **settings, without=without, progress=progress)
    print_summary(manifest, options.output)


def run_withdraw(options: argparse.Namespace) -> None:
    """Run `grain-sft withdraw`."""
    options.format = options.format or preparing.format_of(options.corpus)
    run_convert(options, options.documents)
    print(_WITHDRAWN.format(options.corpus))


def train_tokenizer(parser: Parser) -> None:
    """Declare `grain-sft train-tokenizer`."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files of conversations or texts, as for prepare")
    add("-o", "--output", required=True, help="file to write the model to")
    add("--vocab-size", type=at_least(MIN_VOCAB), default=16_000, help="number of tokens of the model")
    add("--model-type", choices=("bpe", "unigram"), default="bpe", help="algorithm of SentencePiece")
    special = f"texts that are always one token (default: {' '.join(CHAT_TOKENS)})"
    add("--special-tokens", nargs="*", default=list(CHAT_TOKENS), help=special)
    _add_schema(parser)


def run_train_tokenizer(options: argparse.Namespace) -> None:
    """Run `grain-sft train-tokenizer`."""
    check_output(options.output)  # before the inputs are listed, which may take long
    files.check_inputs_stay(options.output, (file for path in options.inputs for file in preparing.expand(path)))
    special = list(filter(None, options.special_tokens))
    with elapsed("Reading the texts") as rename:

        def lines() -> Iterator[str]:
            yield from preparing.conversation_lines(options.inputs, options.schema, special)
            rename("Training")  # all texts are read; only now does SentencePiece train

        model = preparing.train_tokenizer(lines(), options.vocab_size, special, model_type=options.model_type)
    files.write_bytes(options.output, model)
    print(f"pieces  {options.vocab_size:,}, of them special: {' '.join(special) or 'none'}")
    print(f"written {options.output}")
