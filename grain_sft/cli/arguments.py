"""Code that the commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec

from grain_sft.errors import ConfigError, RowIndexError, SamplerError, StorageError
from grain_sft.options import add_arguments, options_of, parsed

if TYPE_CHECKING:
    from grain_sft.corpus import Corpus
    from grain_sft.pipeline import Pipeline
    from grain_sft.sampling import Host

_DECLARED = ("dtype", "eos_token_id", "use_loss_mask", "split", "subset")
"""Arguments of `open_corpus` that become options of commands."""

_TOKENIZER_NAME = """name or path of a tokenizer; it fills {TOKENIZER} in a mix's paths, and a corpus that was made with another
tokenizer is refused"""


class Parser(argparse.ArgumentParser):
    """Parser with methods for arguments that commands share."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Help, **settings)

    def add_config(self, *, host: str | None = None) -> None:
        """Add the argument `config` and, if the help text `host` is given, the option `--host`."""
        self.add_argument("config", help="path of a .yaml or .json config")
        if host is not None:
            self.add_argument("--host", type=host_of, metavar="h/H", help=host)

    def add_declared(
        self,
        declaration: Callable[..., Any],
        names: Iterable[str],
        group: Any = None,
        spelled: Mapping[str, Sequence[str]] | None = None,
        **changes: Any,
    ) -> None:
        """Add options for arguments of `declaration`, a class or function, with their types, defaults and help texts.

        Args:
          names: Arguments of `declaration` that become options.
          group: Group of arguments to which the options are added; by default this parser.
          spelled: Flags of options, by the options' names, as in `options.add_arguments`.
          changes: New values of fields of `Option`, such as `help`, for all of these options.
        """
        options = {name: dataclasses.replace(options_of(declaration)[name], **changes) for name in names}
        add_arguments(group or self, options, spelled or {})

    def add_corpus_options(self, group: Any = None) -> None:
        """Add options for the arguments of `open_corpus` to `group`, by default to this parser."""
        from grain_sft.corpus import FORMATS, open_corpus

        add = (group or self).add_argument
        add("--format", default="auto", help=f"{', '.join(FORMATS)}, or package.module:Name")
        self.add_declared(open_corpus, _DECLARED, group)
        one_of = (group or self).add_mutually_exclusive_group().add_argument
        one_of("--tokenizer-name", metavar="NAME", help=_TOKENIZER_NAME)
        # hidden from the help: older versions called --tokenizer-name like this
        one_of("--tokenizer", dest="former_tokenizer", help=argparse.SUPPRESS)
        remap = "replace the prefix FROM, or the placeholder {FROM}, in paths; may be given several times"
        add("--path-remap", action="append", type=_pair, default=[], metavar="FROM=TO", help=remap)
        masks = "label masks, one for each token file in order; files or globs (default: those next to the token files)"
        add("--label-mask-paths", nargs="+", metavar="FILE", help=masks)

    def add_figures(self) -> None:
        self.add_argument("--json", action="store_true", help="print the figures as JSON, and all else on stderr")
        self.add_argument("-o", "--output", metavar="FILE", help="also write the figures to this file, as JSON")

    def add_stage(self, group: Any = None) -> None:
        """Add the option `--stage` to `group`, by default to this parser."""
        stage = "number of the stage in a config with stages (default: 1)"
        (group or self).add_argument("--stage", type=at_least(1), default=1, help=stage)

    def flags_given(self, options: argparse.Namespace, names: Iterable[str]) -> list[str]:
        """Return the flags, such as "--max-workers", of those options of `names` that do not have their default."""
        given = [name for name in names if getattr(options, name) != self.get_default(name)]
        return [f"--{name.replace('_', '-')}" for name in given]

    def error(self, message: str) -> NoReturn:
        """Print the error, the required arguments, and how to get help. Exit with status 2."""
        usage = " ".join(self.format_usage().split())
        # remove optional arguments, such as [--json] and [--format [NAME]]
        required = re.sub(r"\s\[(?:[^\[\]]|\[[^\[\]]*\])*\](?!\S)", "", usage)
        self.exit(2, f"{self.prog}: error: {message}\n{required} [options]\n{self.prog} --help lists all options.\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the default of each option, unless the default is empty or the help text states it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        stated = action.default in (None, False, "", []) or "(default" in (action.help or "")
        return action.help if stated else super()._get_help_string(action)


def at_least(least: int) -> Callable[[str], int]:
    """Return the argparse `type` of an integer argument of at least `least`."""
    return functools.partial(_number, int, Annotated[int, msgspec.Meta(ge=least)])


def _number(kind: type[Any], bounded: Any, text: str) -> Any:
    """Return the number in `text`. `kind` is int or float, and `bounded` the same type with its bounds as an annotation."""
    value = parsed(kind, bounded, text)
    if value >= 1 << 63:  # such as infinity
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number below 2**63.")
    return value


positive = functools.partial(_number, float, Annotated[float, msgspec.Meta(gt=0)])
not_negative = functools.partial(_number, float, Annotated[float, msgspec.Meta(ge=0)])
"""`positive` and `not_negative` are the argparse `type`s of numbers above 0, and of numbers of at least 0."""


def _pair(text: str) -> list[str]:
    """Parse FROM=TO."""
    old, equals, new = text.partition("=")
    if not (old and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: expected FROM=TO.")
    return [old, new]


def host_of(text: str) -> Host:
    """Parse `h/H`: host h of H."""
    from grain_sft.sampling import Host  # imports Grain

    index, slash, count = text.partition("/")
    with contextlib.suppress(ValueError, SamplerError):
        if slash:
            return Host(int(index), int(count))
    raise argparse.ArgumentTypeError(f"{text!r}: expected h/H, host h (from 0) of H.")


def open_config(options: argparse.Namespace, *, outputs: Iterable[str | None] = ()) -> Pipeline:
    """Return the pipeline of `config` and `--host`. Refuse `outputs` that can't be written, or would replace an input."""
    from grain_sft.config import config_files, load, read_config
    from grain_sft.corpus import check_corpus_stays
    from grain_sft.progress import elapsed
    from grain_sft.sampling import Host
    from grain_sft.storage import files

    given = [output for output in outputs if output is not None]
    for output in given:  # before the config, which may take long to open
        check_output(output, inputs=[options.config])
    with elapsed("Opening"):
        pipeline = load(options.config, host=getattr(options, "host", None) or Host(0, 1))
    if given:
        texts = list(_texts(read_config(options.config)[1]))
        # any text in a config may be the path of an input, such as a mix or a saved index
        inputs = [*config_files(options.config), *filter(os.path.isfile, texts)]
        for output in given:
            files.check_inputs_stay(output, inputs)
            for stage in pipeline.stages:
                check_corpus_stays(output, stage.source.layout.corpus, texts)
    return pipeline


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a value of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def steps_of(pipeline: Pipeline, text: str) -> range:
    """Return the steps that `--steps` names: A:B, A: (to the end of the run), :B (from step 0) or A (one step)."""
    first, colon, last = text.partition(":")
    end: int | None
    try:
        if colon:
            begin, end = int(first or 0), int(last) if last else pipeline.sampler.num_steps
        else:
            begin, end = int(text), int(text) + 1
    except ValueError:  # not numbers: -1 leads to the last error below
        begin = end = -1
    if end is None:
        raise RowIndexError(f"--steps {text!r}: the run never ends. Give the end too: A:B.")
    if not last and 0 <= end < begin:  # `text` is A:, so `end` is the end of the run
        raise RowIndexError(f"--steps {text!r}: the run ends after step {end - 1}. Give A of at most {end}.")
    if begin < 0 or end < begin:
        raise RowIndexError(f"--steps {text!r}: expected A:B (steps A to B - 1), such as 5:8, or one step, such as 5.")
    return range(begin, end)


def open_stage(options: argparse.Namespace, *, outputs: Iterable[str | None] = ()) -> Pipeline:
    """Return the pipeline of the stage `--stage`, which counts from 1. Other arguments are as in `open_config`."""
    stages = open_config(options, outputs=outputs).stages
    if options.stage > len(stages):
        raise ConfigError(f"--stage {options.stage}: expected at most {len(stages)}, the last stage of the config.")
    return stages[int(options.stage) - 1]


def values_of(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of options, by name."""
    return {name: getattr(options, name) for name in names}


def corpus_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_corpus_options` as keyword arguments of `open_corpus`."""
    tokenizer = options.tokenizer_name
    if options.former_tokenizer is not None:
        tokenizer = options.former_tokenizer
        meaning = f"--tokenizer {tokenizer} means --tokenizer-name {tokenizer} here"
        reason = "In other commands, --tokenizer is a file or directory that is opened"
        print(f"warning: {meaning}. {reason}. Write --tokenizer-name.", file=sys.stderr)
    names = ("format", "label_mask_paths", *_DECLARED)
    return {"tokenizer": tokenizer, "path_remap": dict(options.path_remap), **values_of(options, names)}


def open_paths(paths: Sequence[str], options: argparse.Namespace) -> Corpus:
    """Return the corpus of one or more paths with the options of `add_corpus_options`."""
    from grain_sft.corpus import open_corpus

    return open_corpus(paths[0] if len(paths) == 1 else paths, **corpus_options(options))


def check_output(path: str | None, *, inputs: Iterable[str] = (), folder: bool = False) -> None:
    """Raise a StorageError if an output can't be written or would replace one of `inputs`."""
    from grain_sft.storage import files  # imported here, because the import takes longer than printing `--help`

    if path is None:
        return
    if not path:
        raise StorageError("the output is an empty name; expected the name of a file or a folder. Give one.")
    files.check_inputs_stay(path, inputs)
    files.check_writable(files.normalize(path), folder=folder)


def write_figures(measure: Callable[[argparse.Namespace], Mapping[str, Any]], options: argparse.Namespace) -> Mapping[str, Any]:
    """Return `measure(options)`, and write it as `--json` and `--output` ask. With `--json`, other text goes to stderr.

    The caller or `measure` checks `--output` with `check_output` before any long work.
    """
    from grain_sft.storage import files

    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        figures = measure(options)
    text = json.dumps(figures, indent=2) + "\n"
    if options.output:
        files.write_bytes(options.output, text.encode())
    if options.json:
        sys.stdout.write(text)
    return figures
