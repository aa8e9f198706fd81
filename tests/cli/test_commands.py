"""All commands handle options, errors, outputs and progress in the same way. `index` describes a mix and writes its index."""

import argparse
import datetime
import io
import json
import shlex
import subprocess
import sys
import time
import types
from unittest.mock import Mock

import numpy as np
import pytest
from batches import sections, write_config
from python_runs import run_python

import grain_sft
from grain_sft import progress
from grain_sft.cli.arguments import Parser
from grain_sft.cli.main import COMMANDS, declare, main
from grain_sft.config import config_schema
from grain_sft.storage import files

ARRAYS = ("--dtype", "uint16", "--eos-token-id", "7")


@pytest.fixture
def mix(tmp_path, write_tokens):
    for name, tokens in (("a/0", 1000), ("a/1", 515), ("b/0", 128)):
        write_tokens(f"tok/{name}.npy", np.arange(tokens), "uint16")
    path = tmp_path / "mix.txt"
    path.write_text("# a mix\nweb,{TOKENIZER}/a/0.npy\nweb,{TOKENIZER}/a/1.npy\n\ncode,{TOKENIZER}/b/0.npy\n")
    return path


@pytest.fixture
def config(mix):
    corpus = {"dtype": "uint16", "path_remap": {"{TOKENIZER}": "tok"}}
    return write_config(mix.with_name("çağr.yaml"), sections(mix, 8, layout="windows", corpus=corpus))


def test_index_describes_a_mix_and_writes_its_index_and_maxtexts(mix, tmp_path, run_command):
    out = tmp_path / "index.json"
    arguments = ["index", mix, *ARRAYS, "--tokenizer-name", "tok", "--sequence-length", "128", "-o", out]
    printed = run_command(*arguments).out
    for expected in ("tokens        1,643 uint16", "rows          12 of 128", "web", "code", "92.21%"):
        assert expected in printed
    corpus = grain_sft.open_corpus(out)
    assert corpus.fingerprint in printed
    assert (corpus.num_tokens, corpus.eos_token_id, corpus.num_documents) == (1643, 7, 3)
    remap = f"{{TOKENIZER}}={tmp_path / 'tok'}"
    run_command("index", mix, "--path-remap", remap, "--maxtext", "-o", out, "--dtype", "uint16", "--sequence-length", "128")
    assert json.loads(out.read_text())["total_instances"] == 12


def test_the_package_runs_as_a_module():
    for module in ("grain_sft", "grain_sft.cli.main"):
        assert run_python("-m", module, "--version").stdout.strip() == f"grain_sft {grain_sft.__version__}"


def test_options_of_one_name_mean_the_same_in_every_command():
    for name in COMMANDS:
        parser = Parser(prog=name)
        declare(name, parser)
        options = {word: action for action in parser._actions for word in action.option_strings}
        assert "--json" not in options or options["--json"].nargs == 0, name
        assert name not in ("convert", "withdraw") or "pairs" not in options["--format"].help, name
        assert "--output" not in options or ("-o" in options and options["--output"].nargs is None), name
        if "--tokenizer-name" in options:
            assert options["--tokenizer"].help is argparse.SUPPRESS, name
        elif "--tokenizer" in options:
            assert "its name" not in (options["--tokenizer"].help or ""), name


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_texts_of_all_commands_have_one_form(command, run_command):
    assert "options:" in run_command(command, "--help").out
    parser = Parser(prog=command)
    declare(command, parser)
    for action in parser._actions:
        text = parser._get_formatter()._expand_help(action) if action.help else ""
        is_capitalised = text[:1].isupper() and not text[1:2].isupper()
        ends_in_period = text.endswith(".") and not text.endswith("...")
        assert not (is_capitalised or ends_in_period or "(default: (" in text), text


@pytest.mark.parametrize("command", [["index"], ["verify"], ["pack", "--sequence-length", "64"]])
def test_the_former_option_for_the_name_of_a_tokenizer_works_with_a_warning(command, mix, run_command):
    words = [*command, mix, *ARRAYS]
    assert "warning" not in run_command(*words, "--tokenizer-name", "tok").err
    assert "--tokenizer-name tok" in run_command(*words, "--tokenizer", "tok").err


def test_json_prints_the_figures_that_output_writes(mix, tmp_path, run_command):
    words = ["pack", tmp_path / "tok/a/0.npy", *ARRAYS, "--sequence-length", "64"]
    printed = run_command(*words, "--json", "-o", tmp_path / "figures.json")
    figures = json.loads(printed.out)
    assert figures == json.loads((tmp_path / "figures.json").read_text())
    assert figures["corpus"]["tokens"] == 1000 and "supervised" in printed.err


def test_a_config_with_a_date_is_not_printed_as_json_but_the_schema_is(tmp_path, run_command):
    path = tmp_path / "run.yaml"
    transforms = [{"my_pkg:MyMap": {"since": datetime.date(2024, 1, 1)}}]
    write_config(path, sections("a.npy", 8, layout="windows") | {"transforms": transforms})
    assert "date is not JSON serializable" in run_command("config", path, status=1).err
    assert json.loads(run_command("config", "--schema").out) == json.loads(json.dumps(config_schema()))


def test_wrong_arguments_give_status_2_and_print_the_error_and_two_lines_of_usage(run_command):
    wrong = ["", "demoo", "index", "index a --dtype int8", "index a --path-remap x", "index a --maxtext"]
    wrong += ["index a --tokenizer b --tokenizer-name c", "bench --files 0", "bench --seconds x", "bench --seconds inf"]
    wrong += ["demo --steps 1", f"demo --steps {1 << 63}", "demo --seed -1"]
    for line in (*wrong, *(f"{command} --no-such-option" for command in COMMANDS)):
        arguments = line.split()
        first, usage, help_line = run_command(*arguments, status=2).err.splitlines()
        program = " ".join(["grain-sft", *[word for word in arguments[:1] if word in COMMANDS]])
        assert help_line == f"{program} --help lists all options.", line
        assert first.startswith(f"{program}: error: ") and usage.startswith(f"usage: {program} "), line


def test_a_failure_prints_a_sentence_to_stderr_and_gives_status_1(run_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, message in (("none.txt", "no such file"), ("none/*.npy", "the glob matches no file")):
        assert run_command("index", name, status=1).err.startswith(f"grain-sft index: {name}: {message}")
    record = '{"messages": []}'
    for name, text in (("chats.jsonl", f"{record}\n{record}\n"), ("chats.json", f"[{record}]")):
        (tmp_path / name).write_text(text)
        assert "Make a corpus of chats or texts with `grain-sft prepare`" in run_command("index", name, status=1).err


def test_an_output_that_cannot_be_written_stops_a_command_before_its_work(tmp_path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for command in (  # their inputs do not exist; the loop appends an output
        "report no-config.yaml -o",
        "trace no-config.yaml --steps 0 -o",
        "bench no-config.yaml -o",
        "inspect no-config.yaml --step 0 --html",
        "index no-mix.txt -o",
        "train-tokenizer no-chats.jsonl -o",
        "pack no-corpus --sequence-length 64 -o",
        "convert no-corpus --format olmo -o",
        "withdraw no-corpus 1 --format olmo -o",
        "prepare no-chats.jsonl --template primer --tokenizer no.model -o",
    ):
        error = run_command(*command.split(), "file/below/out", status=1).err
        assert "file/below/out: can't be written" in error, command
        assert "file: it is not a folder" in error, command
        error = run_command(*command.split(), "out/new", status=1).err  # a good output, but no input
        assert "can't be written" not in error, command
        assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["file"], command
    assert "the output is an empty name" in run_command("inspect", "no-config.yaml", "--step", "0", "--html", "", status=1).err


@pytest.mark.parametrize("terminal", [False, True])
def test_work_of_unknown_length_shows_how_long_it_has_taken(terminal, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    deadline = time.monotonic() + 300
    with progress.elapsed("Reading") as rename:
        for name in ("Reading", "Training"):
            rename(name)
            while f"{name}: " not in shown.getvalue():
                assert time.monotonic() < deadline
                time.sleep(0.005)
    assert shown.getvalue().endswith("\r\x1b[K" if terminal else " s\n")


def test_progress_that_goes_back_shows_no_negative_time_and_a_missing_stderr_stops_no_work(monkeypatch):
    shown = Mock(**{"isatty.return_value": False})
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "EVERY", 1e-9)
    with progress.progress_bar() as show:
        for done in (10, 20, 0, 10):
            show("Work", done, 40)
        assert shown.write.called and "-" not in str(shown.write.call_args_list)
        shown.write.side_effect = BrokenPipeError
        show("Work", 20, 40)
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.with_progress("ab", 2, "Work")) == ["a", "b"]


@pytest.mark.parametrize("closed", [1, 2])
def test_a_command_works_with_a_closed_standard_stream(closed, mix, tmp_path):
    out = tmp_path / "index.json"
    arguments = ["index", str(mix), *ARRAYS, "--tokenizer-name", "tok", "-o", str(out)]
    command = shlex.join([sys.executable, "-m", "grain_sft.cli.main", *arguments])
    done = subprocess.run(["sh", "-c", f"exec {command} {closed}>&-"], capture_output=True, text=True)
    assert done.returncode == 0 and out.exists(), done


def test_a_command_that_needs_no_jax_keeps_a_jax_that_is_already_imported(monkeypatch):
    imported = types.ModuleType("jax")
    monkeypatch.setitem(sys.modules, "jax", imported)
    monkeypatch.setattr(sys, "argv", ["grain-sft", "trace", "--help"])
    monkeypatch.setattr("grain_sft.cli.main.Guard.run", lambda self, command: command())
    with pytest.raises(SystemExit):
        main()
    assert sys.modules["jax"] is imported


def test_no_output_replaces_a_file_that_the_command_reads(tmp_path, config, mix, run_command):
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text("a text\n" * 90)
    (tmp_path / "link").symlink_to(tmp_path)
    middle = tmp_path / "middle.yaml"
    for path, inherited in ((middle, config), (tmp_path / "run.json", middle)):
        path.write_text(json.dumps({"inherits": inherited.name}))
    commands = [f"train-tokenizer {text.parent} --vocab-size 300 -o {text}"]
    commands += [f"index {mix} --dtype uint16 --tokenizer-name tok -o {mix}"]
    for output in (tmp_path / "tok/a/0.npy", tmp_path / "link/tok/a/0.npy", path, middle, config, mix):
        commands += [f"trace {path} --steps 0 -o {output}", f"inspect {path} --step 0 --html {output}"]
        commands += [f"report {path} --seconds 0 -o {output}", f"bench {path} --seconds 0.1 -o {output}"]
        commands += [f"simulate {path} --hosts 1 --steps 0:1 --processes 0 -o {output}"]
    for command in commands:
        assert "is an input, which the output" in run_command(*command.split(), status=1).err, command
    for name in ("corpus.json", "rows.json"):
        (tmp_path / "tok/a" / name).write_text("[]")
        error = run_command("trace", path, "--steps", "0", "-o", tmp_path / "link/tok/a" / name, status=1).err
        assert f"{tmp_path}/tok/a/{name}: exists in the folder of the corpus" in error


def test_a_command_probes_each_output_once(tmp_path, config, calls_of):
    """In a bucket, a probe is a file that is written and removed."""
    probes = calls_of(files, "check_writable")
    commands = ["trace {} --steps 0 -o", "inspect {} --step 0 --html", "bench {} --seconds 0.1 --max-workers 0 -o"]
    commands += ["simulate {} --hosts 1 --steps 0:1 --processes 0 -o", "report {} --seconds 0 -o"]
    for number, command in enumerate(commands):
        output = str(tmp_path / f"{number}.html")
        main([*command.format(config).split(), output])
        assert [path for path, *_ in probes].count(output) == 1, (command, probes)


def test_a_path_that_the_terminal_cannot_show_is_printed_with_escapes(tmp_path, config):
    done = run_python("-m", "grain_sft", "verify", config.name, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert not done.stderr and r"config \xe7a\u011fr.yaml: sound" in done.stdout
