"""The commands on the page of evidence show what it claims.

A claim is a row of a table of the page. Commands of pytest name tests of the default run; short commands of grain-sft run
here, on a small corpus; long ones run behind the marker heavy, and their figures are checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import doc_pages as pages
import numpy as np
import pytest

import grain_sft
from grain_sft.cli.arguments import Parser
from grain_sft.cli.main import COMMANDS, declare, main

ROOT = pages.DOCS.parent
PAGE = pages.read("evidence.md")

LONG = ("bench", "demo", "report")
WITH_MAXTEXT = "pytest -m maxtext tests/integrations"
STANDS_FOR = {"MIX": "mix.txt", "CORPUS": "data/sft/train", "CONFIG": "sft.yaml", "LOG": "logs/audit.log", "K": "3"}
SFT = """
corpus: {path: data/sft/train}
layout: {kind: packed, sequence_length: 128}
sampler: {seed: 7, global_batch_size: 1}
transforms: [shift_targets]
audit: logs/audit
"""


class Claim(NamedTuple):
    """A row of a table: what is claimed, the commands beside it, the figure, and when and where it was measured."""

    text: str
    commands: list[str]
    figure: str
    measured: str


def claims() -> list[Claim]:
    rows = re.findall(r"^\| ([^|\s][^|]*?) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
    return [Claim(text, re.findall(r"`([^`]+)`", shown), *rest) for text, shown, *rest in rows if "`" in shown]


COMMANDS_SHOWN = list(dict.fromkeys(command for claim in claims() for command in claim.commands))
PYTEST = [command for command in COMMANDS_SHOWN if command.startswith("pytest ")]
LONG_COMMANDS = [
    command for command in COMMANDS_SHOWN if command.startswith(tuple(f"grain-sft {name}" for name in LONG))
]
SHORT_COMMANDS = [command for command in COMMANDS_SHOWN if command not in [*PYTEST, *LONG_COMMANDS]]


def arguments(command: str) -> list[str]:
    """Return the arguments of a command of grain-sft, with values for the page's words in capitals."""
    return [STANDS_FOR.get(word, word) for word in shlex.split(command)[1:]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands: chats and a tokenizer, a mix, and a config."""
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with open("chats.jsonl", "w") as file:
        for number in range(120):
            texts = {"user": f"What is {number} and {number % 7}?", "assistant": f"It is {number + number % 7}."}
            turns = [{"role": role, "content": text} for role, text in texts.items()]
            file.write(json.dumps({"messages": turns}) + "\n")
    np.random.default_rng(0).integers(0, 100_278, 5000, np.uint32).tofile("web.npy")
    Path("mix.txt").write_text("web,web.npy\n")
    Path("sft.yaml").write_text(SFT)
    assert main(["train-tokenizer", "chats.jsonl", "--output", "spm.model", "--vocab-size", "300"]) == 0
    prepare = ["prepare", "chats.jsonl", "--template", "primer", "--tokenizer", "spm.model", "--format", "olmo"]
    assert main([*prepare, "--output", "data/sft", "--val-frac", "0.05"]) == 0
    return tmp_path


# --- what its claims name ---


def test_every_claim_names_its_commands():
    assert len(claims()) == PAGE.count("\n| ") - PAGE.count("\n| claim |")
    for claim in claims():
        assert claim.commands and re.search(r"\d", claim.figure), claim.text
        assert claim.measured == "every test run" or re.fullmatch(r"\d{4}-\d\d-\d\d, .+", claim.measured), claim.text
        for command in claim.commands:
            program, *words = shlex.split(command)
            assert program == "pytest" or (program == "grain-sft" and words[0] in COMMANDS), command


def test_the_tests_that_claims_name_are_in_the_default_run(request):
    """Each command finds a test among those that this run collected; else (few files were asked for) in a new collection."""
    selections = [selection(command) for command in PYTEST if command != WITH_MAXTEXT]
    assert len(selections) >= 15
    collected = [item.nodeid for item in request.session.items]
    missing = [each for each in selections if not selects(each, collected)]
    if missing:
        paths = sorted({path for each in missing for path in each.paths})
        command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "-q", *paths]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr
        missing = [each for each in missing if not selects(each, result.stdout.splitlines())]
    assert not missing, f"no test of the default run is collected by {missing}"


def selection(command: str) -> argparse.Namespace:
    """What a command of pytest selects: `paths`, and `k` with words of which one is in a test's name."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("-k", default="")
    given = parser.parse_args(shlex.split(command)[1:])  # any other option might select what no default run has
    assert all((ROOT / path).exists() and path.startswith("tests/") for path in given.paths), command
    return given


def selects(given: argparse.Namespace, node_ids: list[str]) -> bool:
    """Whether, for every path, and for every word, one of `node_ids` is selected."""
    below = [[node for node in node_ids if re.match(rf"{re.escape(path)}(/|::)", node)] for path in given.paths]
    names = [node.partition("::")[2].lower() for nodes in below for node in nodes]
    return all(below) and all(any(word.lower() in name for name in names) for word in given.k.split(" or "))


# --- its commands ---


def test_the_short_commands_run(folder, capsys):
    printed = {}
    for command in SHORT_COMMANDS:
        if "LOG" in command:
            for _ in zip(range(40), grain_sft.load("sft.yaml").iter(), strict=False):
                pass
        capsys.readouterr()
        assert main(arguments(command)) == 0, command
        printed[shlex.split(command)[1]] = capsys.readouterr().out
    assert "best_fit_decreasing" in printed["pack"]
    assert len(printed["trace"].splitlines()) > 6_000  # a document or more in each step
    assert grain_sft.load("sft.yaml").receipt.code in printed["receipt"]
    assert printed["audit-check"].startswith("confirmed: ")
    assert "<html" in (folder / "page.html").read_text()
    assert "sound" in printed["verify"]
    with open("web.npy", "ab") as file:
        file.write(bytes(4))
    with pytest.raises(grain_sft.GrainSftError, match=r"web\.npy"):  # changed since it was indexed
        grain_sft.open_corpus("index.json")


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_long_commands_are_spelled_right(command):
    name, *words = arguments(command)
    parser = Parser()
    declare(name, parser)
    parser.parse_args(words)


@pytest.mark.heavy
@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_a_long_command_shows_what_is_claimed(folder, command):
    """Figures have room for a machine that others use too."""
    name, *words = arguments(command)
    extra = ["--output", "figures.json"] if name == "bench" else []
    program = [sys.executable, "-m", "grain_sft.cli.main", name, *words, *extra]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    if name == "demo":
        assert result.stdout.count("EQUAL: ") == 2
    elif name == "report":
        assert (folder / "report.html").stat().st_size and (folder / "report.json").stat().st_size
    else:
        check_figures(json.loads(Path("figures.json").read_text()))


def check_figures(figures: dict) -> None:
    """Check the figures of the page, where the benchmark measured them."""
    assert figures.keys() & {"throughput", "orders", "plans", "prepare", "recommended"}
    if (speeds := figures.get("throughput")) is not None:
        filtered, peer = speeds["filter on, one thread"], speeds.get("MaxText olmo_grain, filter on")
        assert filtered["of_limit"] > 0.35
        assert peer is None or filtered["mtok_per_s"] > 25 * peer["mtok_per_s"]
    if (orders := figures.get("orders")) is not None:
        assert orders["order shuffle, first batch, 724,000,000 rows"]["peak_mb"] < 1000
        first, again = (orders[f"order olmo, {which} time, 100,000,000 rows"]["seconds"] for which in ("first", "next"))
        assert again < first / 5
    if "prepare" in figures:
        of_bare = [row for row in figures["prepare"].values() if "bare_s" in row]
        assert of_bare
        assert all(row["tokens"] / row["s"] > 0.6 * row["bare_tokens"] / row["bare_s"] for row in of_bare)
    if (plans := figures.get("plans")) is not None:
        ours, peer = plans["PackedLayout, one of all files"], plans.get("OLMo-core InstancePacker, of all files")
        assert ours["seconds"] < 10 and ours["peak_mb"] < 2000
        assert peer is None or ours["seconds"] < peer["seconds"] / 4
    if "recommended" in figures:
        assert figures["stages"] and {"threads", "prefetch", "worker_count"} <= figures["recommended"].keys()


@pytest.mark.heavy
def test_two_million_documents_are_packed_in_some_seconds(folder, capsys, monkeypatch):
    (command,) = (command for command in SHORT_COMMANDS if command.startswith("grain-sft pack"))
    lengths = np.random.default_rng(0).integers(4, 60, 2_000_000)
    tokens = np.full(lengths.sum(), 5, np.uint16)
    tokens[np.cumsum(lengths) - 1] = 1
    tokens.tofile("tokens.npy")
    grain_sft.open_corpus("tokens.npy", dtype="uint16", eos_token_id=1).save("two_million.json")
    monkeypatch.setitem(STANDS_FOR, "CORPUS", "two_million.json")
    assert main(arguments(command)) == 0
    printed = capsys.readouterr().out
    assert "2,000,000 documents" in printed
    seconds = re.findall(r"^best_fit_decreasing .* ([\d.]+)$", printed, flags=re.MULTILINE)
    assert len(seconds) == 1 and float(seconds[0]) < 30


@pytest.mark.heavy
def test_the_claims_about_maxtext_are_shown():
    if importlib.util.find_spec("maxtext") is None:
        pytest.skip("MaxText is not installed here (the extra maxtext)")
    assert WITH_MAXTEXT in PYTEST
    command = [sys.executable, "-m", *WITH_MAXTEXT.split(), "-n0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
