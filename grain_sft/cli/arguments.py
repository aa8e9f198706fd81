"""What the arguments of commands share: the parser, types, options that several commands have, and checks of outputs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from grain_sft.errors import SamplerError
from grain_sft.options import add_arguments, options_of

if TYPE_CHECKING:
    from grain_sft.corpus import Corpus
    from grain_sft.pipeline import Pipeline
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


def _pair(text: str) -> list[str]:
    if "=" not in text[1:]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FROM=TO.")
    return text.split("=", 1)


def host_of(text: str) -> Host:
    """Parse `h/H`: host h of H."""
    from grain_sft.sampling import Host  # imports Grain

    index, found, count = text.partition("/")
    with contextlib.suppress(ValueError, SamplerError):
        if found:
            return Host(int(index), int(count))
    raise argparse.ArgumentTypeError(f"{text!r}: expected h/H, host h (from 0) of H.")


def add_config(parser: argparse.ArgumentParser, *, host: str | None = None) -> None:
    """Add the argument `config`, and `--host` with the help text `host`."""
    parser.add_argument("config", help="path of a .yaml or .json config")
    if host is not None:
        parser.add_argument("--host", type=host_of, metavar="h/H", help=host)


def open_config(options: argparse.Namespace) -> Pipeline:
    """Return the pipeline of `config` for `--host`, by default for one host that reads all rows."""
    from grain_sft.config import load
    from grain_sft.progress import elapsed
    from grain_sft.sampling import Host

    with elapsed("Opening"):
        return load(options.config, host=getattr(options, "host", None) or Host(0, 1))


def add_declared(
    group: Any,
    declaration: Callable[..., Any],
    names: Sequence[str],
    *,
    spelled: Mapping[str, Sequence[str]] | None = None,
    **changes: Any,
) -> None:
    """Add options of a constructor, as it declares them but for `changes` of an `Option`; `spelled` has other spellings."""
    declared = options_of(declaration)
    add_arguments(group, {name: dataclasses.replace(declared[name], **changes) for name in names}, spelled or {})


def add_corpus_options(group: Any) -> None:
    """Add the options of `open_corpus` that say how its files are read."""
    from grain_sft.corpus import FORMATS, open_corpus

    names = ", ".join(FORMATS)
    group.add_argument("--format", default="auto", help=f"{names}, or package.module:Name (default: auto)")
    add_declared(group, open_corpus, ("dtype", "eos_token_id", "use_loss_mask"))
    name = "name that fills {TOKENIZER} in a mix's paths; a corpus made with another tokenizer, by name or file, is refused"
    group.add_argument("--tokenizer-name", metavar="NAME", help=name)
    group.add_argument("--tokenizer", dest="former_tokenizer", help=argparse.SUPPRESS)
    remap = "replace the prefix FROM, or the placeholder {FROM}, in paths; may be given several times"
    group.add_argument("--path-remap", action="append", type=_pair, default=[], metavar="FROM=TO", help=remap)
    masks = "label masks, one for each token file in order; files or globs (default: those beside the token files)"
    group.add_argument("--label-mask-paths", nargs="+", metavar="FILE", help=masks)


def corpus_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_corpus_options`, as keyword arguments of `open_corpus`."""
    if (former := options.former_tokenizer) is not None:
        print(
            f"warning: --tokenizer {former} is taken as --tokenizer-name {former}. In other commands --tokenizer is a file "
            "or directory that is opened. Write --tokenizer-name.",
            file=sys.stderr,
        )
    return {
        "tokenizer": options.tokenizer_name if former is None else former,
        "path_remap": dict(options.path_remap),
        **{
            name: getattr(options, name)
            for name in ("format", "dtype", "eos_token_id", "label_mask_paths", "use_loss_mask")
        },
    }


def open_paths(paths: Sequence[str], options: argparse.Namespace) -> Corpus:
    """Return the corpus of one or more paths with the options of `add_corpus_options`."""
    from grain_sft.corpus import open_corpus

    return open_corpus(paths[0] if len(paths) == 1 else paths, **corpus_options(options))


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


def write_figures(measure: Callable[[], Mapping[str, Any]], options: argparse.Namespace) -> Mapping[str, Any]:
    """Print and write the figures of `measure` as the options ask; with `--json`, what it prints goes to stderr.

    Raises:
      StorageError: `--output` cannot be written.
    """
    from grain_sft.storage import files

    check_output(options.output)
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        figures = measure()
    text = json.dumps(figures, indent=2) + "\n"
    if options.output:
        with files.atomic_write(options.output) as file:
            file.write(text)
    if options.json:
        sys.stdout.write(text)
    return figures
