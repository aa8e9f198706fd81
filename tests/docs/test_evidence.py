"""The commands in the tables of `docs/evidence.md` exist and run. Those that take long are only parsed."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import doc_pages as pages
import numpy as np
import pytest

import grain_sft
from grain_sft.cli.arguments import Parser
from grain_sft.cli.main import COMMANDS, declare

ROOT = pages.DOCS.parent
PAGE = pages.read("evidence.md")

WITH_MAXTEXT = "pytest -m maxtext tests/integrations"
VALUES = {"MIX": "mix.txt", "CORPUS": "data/sft/train", "CONFIG": "sft.yaml", "LOG": "logs/audit.log", "K": "3"}
SFT = """
corpus: {path: data/sft/train}
layout: {kind: packed, sequence_length: 128}
sampler: {seed: 7, global_batch_size: 1}
transforms: [shift_targets]
audit: logs/audit
"""


class Claim(NamedTuple):
    """A row of a table: the text of the claim, its commands, its figure, and when and where the figure was measured."""

    text: str
    commands: list[str]
    figure: str
    measured: str


ROWS = re.findall(r"^\| ([^|\s][^|]*?) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
CLAIMS = [Claim(text, re.findall(r"`([^`]+)`", shown), *rest) for text, shown, *rest in ROWS if "`" in shown]
SHOWN = list(dict.fromkeys(command for claim in CLAIMS for command in claim.commands))
PYTEST = [command for command in SHOWN if command.startswith("pytest ")]
LONG = [command for command in SHOWN if re.match("grain-sft (bench|demo|report)", command)]
SHORT = [command for command in SHOWN if command not in [*PYTEST, *LONG]]
HEAVY = [command for command in PYTEST if command.startswith("pytest -m heavy ")]


def arguments(command: str) -> list[str]:
    """Return the arguments of a command of grain-sft, with values in place of words in capitals, such as CORPUS."""
    return [VALUES.get(word, word) for word in shlex.split(command)[1:]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None, run_command: Any) -> Path:
    """The working directory of the commands. It has chats, a tokenizer, a prepared corpus, a mix file and a config."""
    monkeypatch.chdir(tmp_path)
    with open("chats.jsonl", "w") as file:
        for number in range(120):
            texts = {"user": f"What is {number} and {number % 7}?", "assistant": f"It is {number + number % 7}."}
            turns = [{"role": role, "content": text} for role, text in texts.items()]
            file.write(json.dumps({"messages": turns}) + "\n")
    np.random.default_rng(0).integers(0, 100_278, 5000, np.uint32).tofile("web.npy")
    Path("mix.txt").write_text("web,web.npy\n")
    Path("sft.yaml").write_text(SFT)
    run_command("train-tokenizer", "chats.jsonl", "--output", "spm.model", "--vocab-size", "300")
    prepare = "prepare chats.jsonl --template primer --tokenizer spm.model --format olmo --output data/sft"
    run_command(*prepare.split(), "--val-frac", "0.05")
    return tmp_path


def test_every_claim_names_its_commands():
    assert len(CLAIMS) == PAGE.count("\n| ") - PAGE.count("\n| claim |") and LONG and HEAVY
    for claim in CLAIMS:
        assert claim.commands and re.search(r"\d", claim.figure), claim.text
        assert re.fullmatch(r"every test run|\d{4}-\d\d-\d\d, .+", claim.measured), claim.text
        for command in claim.commands:
            program, *words = shlex.split(command)
            assert program == "pytest" or (program == "grain-sft" and words[0] in COMMANDS), command


def test_the_tests_of_claims_are_in_the_default_run_or_have_the_marker_heavy():
    """The files are parsed for test functions without a marker, because collecting the tests takes 20 s of CPU time."""
    selections = [selection(command) for command in PYTEST if command not in [WITH_MAXTEXT, *HEAVY]]
    assert len(selections) >= 15
    for paths, words in selections:
        by_path = [" ".join(default_tests(ROOT / path)) for path in paths]
        assert all(by_path) and all(word.lower() in "\n".join(by_path) for word in words), (paths, words)
    for command in HEAVY:
        paths, _ = selection(re.sub("-m heavy (-s )?", "", command))
        assert all("mark.heavy" in (ROOT / path).read_text() for path in paths), command


def default_tests(path: Path) -> list[str]:
    """Return the names of the tests in the default run, which have no marker such as `heavy`, in a file or below a folder."""
    marker = r"pytest\.mark\.(heavy|maxtext|pages|parity|processes)"
    found = []
    for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
        text = file.read_text()
        if re.search(rf"^pytestmark = .*{marker}", text, re.MULTILINE):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marked = any(re.fullmatch(marker, ast.unparse(each)) for each in node.decorator_list)
                found += [] if marked else [node.name.lower()]
    return found


def selection(command: str) -> tuple[list[str], list[str]]:
    """Return the paths of a pytest command and the words of its option `-k`. It must have no other option."""
    found = re.fullmatch(r"pytest ((?:tests/\S+ ?)+)(?:-k (.+))?", command)
    assert found and all((ROOT / path).exists() for path in found[1].split()), command
    return found[1].split(), shlex.split(found[2] or "''")[0].split(" or ")


def test_the_short_commands_run(folder, run_command):
    printed = {}
    for command in SHORT:
        if "LOG" in command:
            for _ in zip(range(40), grain_sft.load("sft.yaml").iter(), strict=False):
                pass
        printed[shlex.split(command)[1]] = run_command(*arguments(command)).out
    assert "best_fit_decreasing" in printed["pack"]
    assert len(printed["trace"].splitlines()) > 6_000  # a document or more in each step
    assert grain_sft.load("sft.yaml").receipt.code in printed["receipt"]
    assert printed["audit-check"].startswith("confirmed: ")
    assert "<html" in (folder / "page.html").read_text()
    assert "sound" in printed["verify"]
    with open("web.npy", "ab") as file:
        file.write(bytes(4))
    with pytest.raises(grain_sft.GrainSftError, match=r"web\.npy"):  # web.npy changed since it was indexed
        grain_sft.open_corpus("index.json")


def test_the_arguments_of_long_commands_are_parsed():
    for name, *words in map(arguments, LONG):
        parser = Parser()
        declare(name, parser)
        assert parser.parse_args(words)
