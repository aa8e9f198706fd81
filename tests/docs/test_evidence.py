"""The commands on the page of evidence show what it claims.

A claim is a row of a table of the page. Commands of pytest name tests of the default run; short commands of grain-sft run
here, on a small corpus; long ones run behind the marker heavy, and their figures are checked.
"""

from __future__ import annotations

import argparse
import importlib
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
from grain_sft.cli.main import COMMANDS, main

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


def commands(program: str) -> list[str]:
    """The commands of the tables that begin with `program`, each once."""
    named = [command for claim in claims() for command in claim.commands]
    return list(dict.fromkeys(command for command in named if command.startswith(f"{program} ")))


SHORT_COMMANDS = [command for command in commands("grain-sft") if shlex.split(command)[1] not in LONG]
LONG_COMMANDS = [command for command in commands("grain-sft") if shlex.split(command)[1] in LONG]


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
            turns = [
                {"role": "user", "content": f"What is {number} and {number % 7}?"},
                {"role": "assistant", "content": f"It is {number + number % 7}."},
            ]
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
    collected = [item.nodeid for item in request.session.items]
    selections = [Selection.of(command) for command in commands("pytest") if command != WITH_MAXTEXT]
    assert len(selections) >= 15
    missing = [selection for selection in selections if not selection.names_one_of(collected)]
    if missing:
        paths = sorted({path for selection in missing for path in selection.paths})
        command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "-q", *paths]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr
        collected = result.stdout.splitlines()
        missing = [selection for selection in missing if not selection.names_one_of(collected)]
    assert not missing, f"no test of the default run is collected by {missing}"


class Selection(NamedTuple):
    """What a command of pytest selects: tests below each of `paths` with one of `words` in the names that -k looks at."""

    paths: list[str]
    words: list[str]

    @classmethod
    def of(cls, command: str) -> Selection:
        parser = argparse.ArgumentParser(exit_on_error=False)
        parser.add_argument("paths", nargs="+")
        parser.add_argument("-k", default="")
        given = parser.parse_args(shlex.split(command)[1:])  # any other option might select what no default run has
        assert all((ROOT / path).exists() and path.startswith("tests/") for path in given.paths), command
        return cls(given.paths, re.split(" or ", given.k))

    def names_one_of(self, node_ids: list[str]) -> bool:
        """Whether, for every path, and for every word, one of `node_ids` is selected."""
        below = [[node for node in node_ids if re.match(rf"{re.escape(path)}(/|::)", node)] for path in self.paths]
        names = [node.partition("::")[2].lower() for nodes in below for node in nodes]
        return all(below) and all(any(word.lower() in name for name in names) for word in self.words)


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
    parser = argparse.ArgumentParser()
    importlib.import_module(f"grain_sft.cli.{name}").add_arguments(parser)
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
        look_at(json.loads(Path("figures.json").read_text()))


def look_at(figures: dict) -> None:
    """Check the figures of the page, where the benchmark measured them."""
    if "throughput" in figures:
        speeds = figures["throughput"]
        filtered = speeds["filter on, one thread"]
        assert filtered["of_limit"] > 0.35
        if (peer := speeds.get("MaxText olmo_grain, filter on")) is not None:
            assert filtered["mtok_per_s"] > 25 * peer["mtok_per_s"]
    if "orders" in figures:
        orders = figures["orders"]
        assert orders["order shuffle, first batch, 724,000,000 rows"]["peak_mb"] < 1000
        first, again = (orders[f"order olmo, {which} time, 100,000,000 rows"]["seconds"] for which in ("first", "next"))
        assert again < first / 5
    if "prepare" in figures:
        of_bare = [row for row in figures["prepare"].values() if "bare_s" in row]
        assert of_bare
        for row in of_bare:
            assert row["tokens"] / row["s"] > 0.6 * row["bare_tokens"] / row["bare_s"]
    if "plans" in figures:
        ours = figures["plans"]["PackedLayout, one of all files"]
        assert ours["seconds"] < 10 and ours["peak_mb"] < 2000
        if (peer := figures["plans"].get("OLMo-core InstancePacker, of all files")) is not None:
            assert ours["seconds"] < peer["seconds"] / 4
    if "recommended" in figures:
        assert figures["stages"] and {"threads", "prefetch", "worker_count"} <= figures["recommended"].keys()
    assert figures.keys() & {"throughput", "orders", "plans", "prepare", "recommended"}


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
    assert WITH_MAXTEXT in commands("pytest")
    command = [sys.executable, "-m", *WITH_MAXTEXT.split(), "-n0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
