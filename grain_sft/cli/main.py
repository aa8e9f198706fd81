"""Entry point of `grain-sft COMMAND ...`. It imports little before the handler of Ctrl-C is installed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING

from grain_sft.cli.interrupts import INTERRUPTED, Guard

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from grain_sft.cli.arguments import Parser

COMMANDS = {
    "demo": ("bench", "train a small model on Python's own docstrings, kill and resume the training, and compare losses"),
    "prepare": ("prepare", "make a corpus of conversations"),
    "convert": ("prepare", "rewrite a corpus in another format"),
    "withdraw": ("prepare", "rewrite a corpus without some of its documents"),
    "train-tokenizer": ("prepare", "train a SentencePiece model on conversations"),
    "pack": ("pack", "pack documents into rows and compare algorithms"),
    "trace": ("trace", "list the documents of steps, or the steps that read a document"),
    "inspect": ("view", "show a row of a step token by token, on the terminal or as a page"),
    "report": ("view", "write a page with the figures and pictures of a config's run"),
    "config": ("config", "print a config with what it inherits, or the JSON Schema of configs"),
    "receipt": ("config", "print a short hash of everything that decides a run's batches"),
    "diff": ("config", "print the first step at which two configs have different batches, and why"),
    "audit-check": ("config", "check an audit log against the run that a config states"),
    "verify": ("config", "check that a corpus, a plan or a config is sound"),
    "index": ("pack", "scan token files and write an index"),
    "bench": ("bench", "measure the speed of a config, or of made-up corpora, and compare it with the machine's limit"),
    "simulate": ("simulate", "predict the requests, cache contents and waits of a run on many hosts"),
    "build-sft-primer": ("legacy", "make a primer SFT cache of a JSONL file (an older name of prepare)"),
    "prepare-chat-sft": ("legacy", "make an episode-indexed dataset of chats (an older name of prepare)"),
    "prepare-tool-sft": ("legacy", "make an episode-indexed dataset of chats with tools (an older name of prepare)"),
}
"""Module in `grain_sft.cli`, and summary, of each command."""

WITHOUT_JAX = ("trace", "inspect", "report", "receipt", "diff", "verify", "config", "simulate")
"""Commands that do not need JAX, because they do not ask JAX for the host."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Args:
      argv: Arguments after the name of the program. With a list, Ctrl-C ends the command with status 130. With None, the
        arguments are `sys.argv[1:]`, and Ctrl-C ends the whole process.

    Returns:
      Exit status: 0, 1 for a failure, 130 for Ctrl-C. Invalid arguments raise SystemExit(2), as in argparse.
    """
    return _guarded(exits=False) if argv is None else _run(list(argv), own_process=False)


def console() -> None:
    """Entry point of `grain-sft`."""
    sys.exit(_guarded(exits=True))


def declare(command: str, parser: Parser) -> None:
    """Add the arguments of `command` to `parser`, and a default `run`: a function that returns an exit status, None for 0."""
    module, name = importlib.import_module(f"grain_sft.cli.{COMMANDS[command][0]}"), command.replace("-", "_")
    parser.set_defaults(run=getattr(module, f"run_{name}"))
    getattr(module, name)(parser)


def _guarded(*, exits: bool) -> int:
    """Run the command line of this process under a `Guard`, and return its exit status."""
    for stream in ("stdout", "stderr"):
        # If the shell has closed stderr (`2>&-`), the next file to be opened would get descriptor 2, and errors would go
        # into that file.
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if sys.stdout.errors in ("strict", "surrogateescape") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the encoding of stdout lacks
    arguments = sys.argv[1:]
    name = " ".join(["grain-sft", *[word for word in arguments if word in COMMANDS][:1]])
    return Guard(name, exits=exits).run(lambda: _run(arguments, own_process=True))


def _run(arguments: list[str], *, own_process: bool) -> int:
    """Run the command line `arguments`, print its errors, and return the exit status.

    With `own_process`, the process runs only this command, so a command of `WITHOUT_JAX` may hide JAX.
    """
    from grain_sft.errors import GrainSftError

    named = next((word for word in arguments if word in COMMANDS), None)
    with _grain_without_jax() if own_process and named in WITHOUT_JAX else contextlib.nullcontext():
        options = _parsed(arguments, named)
    prefix = f"grain-sft {options.command}:"
    try:
        status: int | None = options.run(options)
        sys.stdout.flush()
        return status or 0
    except GrainSftError as error:
        print(prefix, error, file=sys.stderr)
    except BrokenPipeError:  # the reader of a pipe has ended; the exit flushes stdout again, which must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"\n{prefix} interrupted.", file=sys.stderr)
        return INTERRUPTED
    except OverflowError as error:
        print(prefix, f"a number is too large ({error}). Give a smaller one.", file=sys.stderr)
    except (OSError, MemoryError) as error:
        print(f"{prefix} {type(error).__name__}: {error}", file=sys.stderr)
    return 1


def _parsed(arguments: list[str], named: str | None) -> argparse.Namespace:
    """Return the options in `arguments`. Only the command `named` declares its arguments, because declarations import much.

    Unknown arguments are an error. With `--runner`, the option `unknown` keeps them for Apache Beam instead.
    """
    from grain_sft.cli.arguments import Parser
    from grain_sft.version import __version__

    parser = Parser(prog="grain-sft", description="Input pipeline for language models on JAX and Grain.")
    parser.add_argument("--version", action="version", version=f"grain_sft {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == named:
            subparser.set_defaults(parser=subparser)
            declare(name, subparser)
    options, unknown = parser.parse_known_args(arguments)
    options.unknown = [word for word in unknown if word != "--"]
    if options.unknown and getattr(options, "runner", None) is None:
        options.parser.error(f"unrecognized arguments: {' '.join(options.unknown)}")
    return options


@contextlib.contextmanager
def _grain_without_jax() -> Iterator[None]:
    """Hide JAX from the imports in the context, and import Grain at the end of the context. If JAX is loaded, do nothing.

    Without JAX, Grain's import takes a third of the time. The garbage collector pauses during the imports, and later ignores
    the imported modules. This saves 7 % of the CPU time of `grain-sft receipt`.
    """
    if "jax" in sys.modules:
        yield
        return
    from absl import logging

    gc.disable()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # Grain warns that it can't profile
    sys.modules["jax"] = None  # type: ignore[assignment]  # `import jax` raises an ImportError
    try:
        yield
        importlib.import_module("grain")
    finally:
        del sys.modules["jax"]
        logging.set_verbosity(verbosity)
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    console()
