"""What the arguments of commands share: the parser, types, options that several commands have, and checks of outputs."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from grain_sft.errors import PrepareError, SamplerError

if TYPE_CHECKING:
    from grain_sft.sampling import Host


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that reports an error in three lines: the error, the required arguments, where help is."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        usage = " ".join(self.format_usage().split())
        required = re.sub(r"\s*\[(?:[^\[\]]|\[[^\[\]]*\])*\]", "", usage)
        self.exit(2, f"{self.prog}: error: {message}\n{required} [options]\n{self.prog} --help lists all options.\n")


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of integers from `least` on."""
    return _number(int, lambda value: value >= least, f"an integer, {least} or more")


def _number(kind: type[Any], accepts: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if accepts(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}.")

    return parse


positive = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
not_negative = _number(float, lambda value: 0 <= value < math.inf, "a number, 0 or more")
share = _number(float, lambda value: 0 <= value < 1, "a share from 0 up to, not including, 1")


def pair(text: str) -> tuple[str, str]:
    """Parse `FROM=TO`."""
    old, found, new = text.partition("=")
    if not found or not old:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FROM=TO.")
    return old, new


def host_of(text: str) -> Host:
    """Parse `h/H`: host h of H."""
    from grain_sft.sampling import Host  # imports Grain

    index, found, count = text.partition("/")
    with contextlib.suppress(ValueError, SamplerError):
        if found:
            return Host(int(index), int(count))
    raise argparse.ArgumentTypeError(f"{text!r}: expected h/H, host h (from 0) of H.")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the argument `config`."""
    parser.add_argument("config", help="path of a .yaml or .json config")


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Add `--schema`."""
    from grain_sft.prepare import SCHEMAS

    parser.add_argument(
        "--schema",
        type=_schema,
        default="auto",
        metavar="NAME[:KEY=KEY,...]",
        help=f"schema of the records: {', '.join(SCHEMAS)}; after a colon, keys that have other names in the file, as in "
        "prompt_completion:prompt=question,completion=answer (default: auto, by the keys of each record)",
    )


def _schema(text: str) -> str:
    from grain_sft.prepare import check_schema

    try:
        check_schema(text)
    except PrepareError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_corpus_options(group: Any) -> None:
    """Add the options of `open_corpus` that say how its files are read."""
    from grain_sft.corpus import open_corpus
    from grain_sft.options import add_arguments as add_options
    from grain_sft.options import options_of

    declared = options_of(open_corpus)
    add_options(group, {name: declared[name] for name in ("dtype", "eos_token_id", "use_loss_mask")})
    group.add_argument(
        "--tokenizer-name",
        metavar="NAME",
        help="name that fills {TOKENIZER} in a mix's paths; a corpus made with another tokenizer, by name or file, is refused",
    )
    group.add_argument("--tokenizer", action=_OldName, dest="tokenizer_name", help=argparse.SUPPRESS)
    group.add_argument(
        "--path-remap",
        action="append",
        type=pair,
        default=[],
        metavar="FROM=TO",
        help="replace the prefix FROM, or the placeholder {FROM}, in paths; may be given several times",
    )
    group.add_argument(
        "--label-mask-paths",
        nargs="+",
        metavar="FILE",
        help="label masks, one for each token file in order; files or globs (default: those beside the token files)",
    )


def add_format(group: Any) -> None:
    """Add `--format`, the format of a corpus that is opened."""
    from grain_sft.corpus import FORMATS

    names = ", ".join(FORMATS)
    group.add_argument("--format", default="auto", help=f"{names}, or package.module:Name (default: auto)")


def corpus_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_corpus_options`, as keyword arguments of `open_corpus`."""
    return {
        "format": getattr(options, "format", "auto"),
        "dtype": options.dtype,
        "eos_token_id": options.eos_token_id,
        "tokenizer": options.tokenizer_name,
        "path_remap": dict(options.path_remap),
        "label_mask_paths": options.label_mask_paths,
        "use_loss_mask": options.use_loss_mask,
    }


class _OldName(argparse.Action):
    """`--tokenizer`, as version 0.1.0 spells `--tokenizer-name`."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: str | Sequence[Any] | None, option: object = None
    ) -> None:
        print(
            f"warning: --tokenizer {values} is taken as --tokenizer-name {values}. In other commands --tokenizer is a file "
            "or directory that is opened. Write --tokenizer-name.",
            file=sys.stderr,
        )
        setattr(namespace, self.dest, values)


def check_output(path: str | None, *, folder: bool = False) -> None:
    """Refuse an output (None: no output) that cannot be written, before the work that fills it.

    Raises:
      StorageError: it cannot be written.
    """
    from grain_sft.storage import files  # takes longer to import than `--help` to print

    if path is not None:
        files.check_writable(files.normalize(path), folder=folder)


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--output` of a command that measures."""
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and everything else on stderr")
    parser.add_argument("-o", "--output", metavar="FILE", help="also write the figures to this file, as JSON")


def figures_output(options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Check that the figures can be written; with `--json`, send what is printed meanwhile to stderr.

    Raises:
      StorageError: `--output` cannot be written.
    """
    check_output(options.output)
    return contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()


def write_figures(figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print and write the figures as the options ask."""
    from grain_sft.storage import files

    text = json.dumps(figures, indent=2) + "\n"
    if options.output:
        with files.atomic_write(options.output) as file:
            file.write(text)
    if options.json:
        sys.stdout.write(text)
