"""Options mean the same in every command; errors, outputs and progress are handled alike."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from grain_sft import progress
from grain_sft.cli.arguments import Parser
from grain_sft.cli.main import COMMANDS, main, module_of
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.training import train_tokenizer
from grain_sft.storage import files


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / ".cache"))
    path = tmp_path / "tok" / "a.npy"
    path.parent.mkdir()
    values = np.arange(600, dtype=np.uint16)
    values[::7] = 0
    values.tofile(path)
    (tmp_path / "mix.txt").write_text("web,{TOKENIZER}/a.npy\n")
    return tmp_path


def parsers() -> dict[str, Parser]:
    found = {}
    for name in COMMANDS:
        found[name] = Parser(prog=name)
        module_of(name).add_arguments(found[name])
    return found


def test_json_is_a_flag_and_output_is_a_path_in_every_command() -> None:
    for name, parser in parsers().items():
        options = {word: action for action in parser._actions for word in action.option_strings}
        if "--json" in options:
            assert options["--json"].nargs == 0, name
        if "--output" in options:
            assert "-o" in options and options["--output"].nargs is None, name


def test_a_tokenizer_is_a_path_and_a_name_has_an_option_of_its_own() -> None:
    for name, parser in parsers().items():
        options = {word: action for action in parser._actions for word in action.option_strings}
        if "--tokenizer-name" in options:
            assert options["--tokenizer"].help is argparse.SUPPRESS, name
        elif "--tokenizer" in options:
            assert "its name" not in (options["--tokenizer"].help or ""), name


@pytest.mark.parametrize("command", [["index"], ["verify"], ["pack", "--sequence-length", "64"]])
def test_the_old_spelling_of_a_tokenizers_name_works_with_a_warning(
    command: list[str], tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, str(tokens / "mix.txt"), "--dtype", "uint16", "--eos-token-id", "0"]
    assert main([*words, "--tokenizer-name", "tok"]) == 0
    named = capsys.readouterr()
    assert "warning" not in named.err
    assert main([*words, "--tokenizer", "tok"]) == 0
    assert "--tokenizer-name tok" in capsys.readouterr().err


def test_json_prints_the_figures_that_output_keeps(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pack", str(tokens / "tok/a.npy"), "--dtype", "uint16", "--eos-token-id", "0", "--sequence-length", "64"]
    assert main([*words, "--json", "-o", str(tokens / "figures.json")]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert figures == json.loads((tokens / "figures.json").read_text())
    assert figures["corpus"]["tokens"] == 600 and "supervised" in printed.err


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_arguments_print_the_error_and_two_lines_of_usage(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--no-such-option"])
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2
    assert len(lines) == 3 and lines[0].startswith(f"grain-sft {command}: error: ")
    assert (
        lines[1].startswith(f"usage: grain-sft {command} ")
        and lines[2] == f"grain-sft {command} --help lists all options."
    )


def test_the_usage_of_an_error_lists_required_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "sft.yaml"])
    usage = capsys.readouterr().err.splitlines()[1]
    assert usage.startswith("usage: grain-sft trace (--steps A:B | ") and usage.endswith(") config [options]")


def test_chats_in_place_of_a_corpus_are_an_error_that_names_prepare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = '{"messages": []}'
    for name, text in (("chats.jsonl", f"{record}\n{record}\n"), ("chats.json", f"[{record}]")):
        (tmp_path / name).write_text(text)
        assert main(["index", str(tmp_path / name)]) == 1
        assert "make a corpus of them with `grain-sft prepare`" in capsys.readouterr().err


def test_an_unknown_option_is_an_error_of_its_command(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["index", str(tokens / "mix.txt"), "--no-such-option"])
    assert capsys.readouterr().err.startswith("grain-sft index: error: unrecognized arguments: --no-such-option\n")


def test_the_older_tools_names_come_last() -> None:
    assert list(COMMANDS)[-3:] == ["build-sft-primer", "prepare-chat-sft", "prepare-tool-sft"]


WRITING: dict[str, list[str]] = {
    "report": ["no-config.yaml", "-o"],
    "trace": ["no-config.yaml", "--steps", "0", "-o"],
    "inspect": ["no-config.yaml", "--step", "0", "--html"],
    "index": ["no-mix.txt", "-o"],
    "pack": ["no-corpus", "--sequence-length", "64", "-o"],
    "bench": ["no-config.yaml", "-o"],
    "train-tokenizer": ["no-chats.jsonl", "-o"],
    "prepare": ["no-chats.jsonl", "--template", "primer", "--tokenizer", "no.model", "-o"],
    "convert": ["no-corpus", "--format", "olmo", "-o"],
}
"""Arguments whose input does not exist, up to the output."""


@pytest.mark.parametrize("command", WRITING)
def test_an_output_that_cannot_be_written_stops_a_command_before_its_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([command, *WRITING[command], "file/below/out"]) == 1
    error = capsys.readouterr().err
    assert "file/below/out: can't be written" in error and "file: it is not a folder" in error
    assert main([command, *WRITING[command], "out/new"]) == 1  # can be written: the input is missing
    assert "can't be written" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["file"]


def test_a_folder_is_not_an_output_file(tmp_path: Path) -> None:
    with pytest.raises(files.StorageError, match="is a folder; expected the name of a file"):
        files.check_writable(str(tmp_path))
    files.check_writable(str(tmp_path), folder=True)


def test_a_read_only_file_system_is_noticed() -> None:
    with pytest.raises(files.StorageError, match="can't be written: /proc"):
        files.check_writable("/proc/out.html")


@pytest.mark.parametrize("terminal", [False, True])
def test_work_without_an_end_shows_how_long_it_has_taken(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.elapsed("Reading") as rename:
        wait_for(lambda: "Reading: " in shown.getvalue())
        rename("Training")
        wait_for(lambda: "Training: " in shown.getvalue())
    assert shown.getvalue().endswith("\r\x1b[K" if terminal else " s\n")


def wait_for(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# train-tokenizer.

WORDS = ["the question and the answer", "one more line of text"] * 20


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_too_little_text_is_a_sentence_with_a_size_that_works(model_type: str) -> None:
    texts = [f"{word} {number}" for number in range(300) for word in WORDS[:2]]
    with pytest.raises(PrepareError, match="the texts are too few for 9,000 pieces") as error:
        train_tokenizer(texts, 9000, model_type=model_type)
    assert "INTERNAL" not in str(error.value)
    size = int(str(error.value).rsplit("--vocab-size ", 1)[1].rstrip("."))
    assert train_tokenizer(texts, size, model_type=model_type)


def test_too_small_a_vocabulary_is_a_sentence_with_a_size_that_works() -> None:
    texts = ["".join(map(chr, range(0x4E00, 0x5000)))] * 5
    with pytest.raises(PrepareError, match="more different characters than 300 pieces can hold") as error:
        train_tokenizer(texts, 300)
    assert "INTERNAL" not in str(error.value)
    assert train_tokenizer(texts, int(str(error.value).split("--vocab-size ")[1].split()[0]))


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_is_a_sentence(texts: list[str]) -> None:
    with pytest.raises(PrepareError, match="hold no text to train on"):
        train_tokenizer(texts, 400)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RecordError, MemoryError])
def test_what_ends_the_texts_early_is_raised_as_it_is(kind: type[BaseException]) -> None:
    def texts():  # type: ignore[no-untyped-def]
        yield from WORDS
        raise kind("here")

    with pytest.raises(kind, match="here"):
        train_tokenizer(texts(), 400)


def test_train_tokenizer_shows_progress(tmp_path: Path) -> None:
    """Through a pipe that never ends, so that the time it takes is ours."""
    program = (
        "import sys, time; from grain_sft import progress; from grain_sft.cli import train_tokenizer; progress.EVERY = 0.01\n"
        "train_tokenizer.conversation_lines = lambda *_: (time.sleep(0.02) or 'some words here' for _ in range(10))\n"
        "from grain_sft.cli.main import main\n"
        "sys.exit(main(['train-tokenizer', 'x', '-o', sys.argv[1], '--vocab-size', '300', '--special-tokens']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.model")], capture_output=True, text=True, timeout=400
    )
    assert "Reading the texts: " in done.stderr
