"""The command line: what the commands print and write, and how they fail."""

import json
import subprocess
import sys

import numpy as np
import pytest

import grain_sft
from grain_sft.cli.main import COMMANDS, main


@pytest.fixture
def mix(tmp_path):
    for name, tokens in (("a/0", 1000), ("a/1", 515), ("b/0", 128)):
        path = tmp_path / "tok" / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.arange(tokens, dtype=np.uint16).tofile(path)
    path = tmp_path / "mix.txt"
    path.write_text("# a mix\nweb,{TOKENIZER}/a/0.npy\nweb,{TOKENIZER}/a/1.npy\n\ncode,{TOKENIZER}/b/0.npy\n")
    return path


def test_index_describes_a_mix_and_writes_its_index(mix, tmp_path, capsys):
    out = tmp_path / "index.json"
    arguments = ["index", str(mix), "--dtype", "uint16", "--tokenizer-name", "tok", "--sequence-length", "128"]
    assert main([*arguments, "-o", str(out), "--eos-token-id", "7"]) == 0
    printed = capsys.readouterr().out
    for said in ("shards       3", "tokens       1,643 uint16", "rows         12 of 128", "web", "code", "92.21%"):
        assert said in printed
    corpus = grain_sft.open_corpus(out)
    assert corpus.fingerprint in printed
    assert (corpus.num_tokens, corpus.eos_token_id, corpus.num_documents) == (1643, 7, 3)


def test_index_writes_maxtexts_index(mix, tmp_path):
    out = tmp_path / "maxtext.json"
    remap = f"{{TOKENIZER}}={tmp_path / 'tok'}"
    arguments = ["index", str(mix), "--dtype", "uint16", "--path-remap", remap, "--maxtext", "-o", str(out)]
    assert main([*arguments, "--sequence-length", "128"]) == 0
    assert json.loads(out.read_text())["total_instances"] == 12


def test_the_package_runs_as_a_module():
    for module in ("grain_sft", "grain_sft.cli.main"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, f"grain_sft {grain_sft.__version__}"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["index", "none.txt"], "none.txt: can't be opened"),
        (["index", "none/*.npy"], "none/*.npy: the glob matches no file"),
    ],
)
def test_a_failure_is_a_sentence_on_stderr_and_status_1(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("grain-sft index: ") and message in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demoo"],
        ["index"],
        ["index", "a", "--dtype", "int8"],
        ["index", "a", "--path-remap", "x"],
        ["index", "a", "--maxtext"],
        ["bench", "--files", "0"],
        ["bench", "--seconds", "x"],
        ["demo", "--steps", "1"],
    ],
)
def test_wrong_arguments_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    assert "options:" in capsys.readouterr().out


@pytest.mark.heavy
def test_bench_reports_every_loader_beside_its_limit(tmp_path, capsys):
    out = tmp_path / "figures.json"
    small = ["--files", "2", "--tokens", "200000", "--seconds", "0.01", "--repeats", "1", "--sequence-length", "1024"]
    scale = ["--order-rows", "300000", "--startup-files", "8"]
    only = ["--only", "windows", "--only", "startup", "--only", "orders"]
    assert main(["bench", *only, *small, *scale, "--output", str(out), "--dir", str(tmp_path / "data")]) == 0
    figures = json.loads(out.read_text())
    assert {"limit: numpy, contiguous rows", "source.read, tokens only"} < set(figures["throughput"])
    assert all(row["mtok_per_s"] > 0 for row in figures["throughput"].values())
    assert "filter on, one thread" in capsys.readouterr().out
    first, again = (row for name, row in figures["orders"].items() if name.startswith("order olmo"))
    assert first["mb"] < 300 and again["mb"] < 300


@pytest.mark.heavy
def test_bench_measures_preparing_beside_bare_sentencepiece(tmp_path, capsys):
    out = tmp_path / "figures.json"
    arguments = ["--only", "prepare", "--conversations", "200", "--output", str(out), "--dir", str(tmp_path)]
    assert main(["bench", *arguments]) == 0
    rows = json.loads(out.read_text())["prepare"]
    speed = rows["200 conversations, speed"]
    assert speed["documents"] == 200 and speed["tokens"] == speed["bare_tokens"] + 4 * 200
    assert "sentencepiece.encode on the same texts" in capsys.readouterr().out


def test_bench_measures_packed_rows_beside_grain(tmp_path, capsys, monkeypatch):
    from grain_sft.bench import packed

    small = [profile._replace(documents=profile.documents // 20) for profile in packed.PROFILES]
    monkeypatch.setattr(packed, "PROFILES", tuple(small))
    out = tmp_path / "figures.json"
    arguments = [
        "--only",
        "packed",
        "--seconds",
        "0.01",
        "--repeats",
        "1",
        "--output",
        str(out),
        "--dir",
        str(tmp_path),
    ]
    assert main(["bench", *arguments]) == 0
    for rows in json.loads(out.read_text())["packed"].values():
        assert rows[packed.LIMIT]["of_limit"] == 1 and rows[packed.GRAIN]["times_grain"] == 1
    assert packed.OURS in capsys.readouterr().out


def test_724_million_rows_are_shuffled_in_the_memory_of_an_import(tmp_path):
    """724,000,000 rows of 8192 tokens in sparse files: the whole process stays below 300 MB."""
    from grain_sft.bench.processes import measure_first_batch

    figures = measure_first_batch(tmp_path)
    assert figures["rows"] == 724_000_000
    assert figures["peak_mb"] < 300
