"""`grain-sft trace`: every format holds the same lines and the receipt of the run."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from batches import load, sections, write_config
from pyarrow import parquet
from python_runs import run_python
from sft_files import documents, write_olmo

from grain_sft import Host
from grain_sft.provenance import checkpoint_table, find_document, summarize, trace

COLUMNS = ["step", "epoch", "row", "host", "instance", "segment", "shard", "file", "start", "stop", "document"]
COLUMNS += ["source", "record", "trainable"]


@pytest.fixture
def config(tmp_path):
    write_olmo(tmp_path / "sft", documents(60), sources=True)
    stated = sections("sft", 32, corpus={"dtype": "uint16", "eos_token_id": 2}, seed=3, epochs=2)
    return str(write_config(tmp_path / "run.json", stated))


@pytest.fixture
def pipeline(config):
    return load(config)


def lines_of(found):
    """Return the lines of a trace, as dicts with the column names of the command."""
    columns = {name: column.tolist() for name, column in found.columns().items()}
    columns["file"] = [found.paths[shard] for shard in columns["shard"]]
    columns["source"] = list(map(str, columns["source"]))  # sources are numbers, because the corpus does not name them
    return [{name: columns[name][at] for name in COLUMNS} for at in range(len(columns["step"]))]


@pytest.fixture
def run(run_command):
    return lambda *arguments: run_command("trace", *arguments).out


def read_csv(text):
    head, *lines = text.splitlines()
    texts, rows = ("file", "source"), csv.DictReader(lines)
    return head, [{name: each if name in texts else int(each) for name, each in row.items()} for row in rows]


def test_json_lines_csv_and_parquet_hold_the_trace(config, pipeline, tmp_path, run):
    expected = lines_of(trace(pipeline, range(2, 9)))
    head, *lines = map(json.loads, run(config, "--steps", "2:9", "--format", "jsonl").splitlines())
    assert head == {**pipeline.receipt.as_dict(), "about": "steps 2:9"} and lines == expected
    first, lines = read_csv(run(config, "--steps", "2:9", "--format", "csv"))
    assert first == f"# {pipeline.receipt.code} steps 2:9" and lines == expected
    run(config, "--steps", "2:9", "--output", tmp_path / "out" / "trace.csv")  # the name gives the format
    assert read_csv((tmp_path / "out" / "trace.csv").read_text())[1] == expected
    run(config, "--between", "step2", "step9", "--output", tmp_path / "trace.parquet")
    table = parquet.read_table(tmp_path / "trace.parquet")
    assert table.to_pylist() == expected
    assert json.loads(table.schema.metadata[b"grain_sft"])["receipt"] == pipeline.receipt.code


def test_the_default_format_is_an_aligned_table_with_file_names_instead_of_paths(config, pipeline, run):
    found = trace(pipeline, range(2, 4))
    head, names, *lines = run(config, "--steps", "2:4").splitlines()
    assert head == f"# {pipeline.receipt.code} steps 2:4"
    assert names.split() == COLUMNS
    assert len(lines) == len(found) and len({line.index(".npy") for line in lines}) == 1  # aligned
    assert lines[0].split()[:5] == [str(column[0]) for column in list(found.columns().values())[:5]]
    assert "token_ids_part_" in lines[0] and "/" not in lines[0]
    assert len(run(config, "--steps", "5").splitlines()) > 2
    everything = [run(config, "--steps", text, "--format", "csv") for text in (":", "0:", f":{len(pipeline)}")]
    assert len({text.partition("\n")[2] for text in everything}) == 1


def test_a_trace_can_be_limited_to_one_host_and_leave_out_counts_of_trainable_tokens(config, pipeline, run):
    head, lines = read_csv(run(config, "--steps", "2:9", "--host", "1/2", "--format", "csv", "--no-trainable"))
    found = trace(pipeline, range(2, 9), host=Host(1, 2), trainable=False)
    assert head.endswith("steps 2:9, host 1/2")
    assert [line["instance"] for line in lines] == found.instance.tolist()
    assert "trainable" not in lines[0]


def test_the_lines_of_documents_are_those_of_find_document(config, pipeline, run):
    head, lines = read_csv(run(config, "--document", 7, "--document", 30, "--format", "csv"))
    assert lines == lines_of(find_document(pipeline, [7, 30])) and "2 documents, seen" in head
    twice = run(config, "--document", 7, "--document", 7, "--format", "csv")
    assert " document 7: seen " in twice and read_csv(twice)[1] == lines_of(find_document(pipeline, 7))
    first = lines_of(find_document(pipeline, 7, epochs=1))
    assert read_csv(run(config, "--document", 7, "--epochs", 1, "--format", "csv"))[1] == first


def test_summaries_and_checkpoints_are_those_of_the_functions(config, pipeline, tmp_path, run):
    found = summarize(trace(pipeline, range(len(pipeline))))
    _, *lines = map(json.loads, run(config, "--steps", ":", "--summary", "--format", "jsonl").splitlines())
    assert [list(line.values()) for line in lines] == [list(line) for line in zip(*found.values(), strict=True)]
    table = run(config, "--steps", ":", "--summary").splitlines()
    assert table[-1].split()[0] == "all" and table[-1].split()[3] == f"{sum(found['tokens']):,}"
    expected = checkpoint_table(pipeline, 5)
    _, *lines = map(json.loads, run(config, "--checkpoints", 5, "--format", "jsonl").splitlines())
    assert [line.pop("checkpoint") for line in lines] == [f"step{step}" for step in expected["step"]]
    assert [list(line.values()) for line in lines] == [list(line) for line in zip(*expected.values(), strict=True)]
    assert run(config, "--checkpoints").splitlines()[-1].split()[0] == f"step{len(pipeline)}"


def test_documents_in_windows_are_found_and_a_summary_does_not_count_them(tmp_path, run):
    (np.arange(640) % 16).astype("<u2").tofile(tmp_path / "\udcff.npy")  # a name that is not UTF-8
    corpus = {"path": str(tmp_path / "\udcff.npy"), "dtype": "uint16", "eos_token_id": 5}
    path = write_config(tmp_path / "windows.json", sections(None, 64, corpus=corpus, layout="windows", order="shuffle"))
    assert "document 0, 1: 2 documents, seen in " in run(path, "--document", 0, "--document", 1, "--epochs", 1)
    assert run(path, "--steps", "0:2", "--summary").splitlines()[-1].split()[1] == "-"
    run(path, "--steps", "0:2", "--output", tmp_path / "trace.csv")
    assert r"/\udcff.npy," in (tmp_path / "trace.csv").read_text()


def test_a_question_that_cannot_be_answered_is_an_error(config, run_command):
    for arguments, words in (
        *((f"--steps {steps}", "expected A:B") for steps in ("5:3", "x")),
        ("--steps 0:10000", "expected steps from 0 to"),
        ("--steps 10000:", "--steps '10000:': the run ends after step"),
        ("--between step5 latest", "a name such as step7000"),
        ("--document 60", "expected 0 to 59"),
        ("--steps 1:2 --format parquet", "--output"),
        ("--steps 1:2 --host 0/3", "3 hosts"),
    ):
        assert words in run_command("trace", config, *arguments.split(), status=1).err, arguments


def test_a_trace_answers_one_question_and_refuses_options_that_do_not_apply_to_it(config, run_command):
    usage = "--steps A:B | --between NAME NAME | --document [SOURCE:]N | --record ID | --find TEXT | --checkpoints [N]"
    for arguments, unused in (
        ("--checkpoints --host 0/2 --summary --no-trainable", "--host, --summary, --no-trainable"),
        ("--steps 1:2 --epochs 1", "--epochs"),
        ("--document 3 --tokenizer x", "--tokenizer"),
    ):
        error = run_command("trace", config, *arguments.split(), status=2).err
        assert f"{arguments.split()[0]} does not use {unused}. Leave it out." in error, arguments
        assert f"usage: grain-sft trace ({usage}) config [options]\n" in error, arguments
    run_command("trace", config, status=2)
    run_command("trace", config, "--steps", "1:2", "--document", "3", status=2)


def test_a_trace_that_fails_leaves_no_file(config, tmp_path, run_command):
    (tmp_path / "sft" / "labels_mask_part_0003.npy").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    for name in ("trace.csv", "trace.jsonl"):
        run_command("trace", config, "--steps", ":", "--output", tmp_path / name, status=1)
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "cache"] == before


def test_trace_imports_no_jax_and_ends_without_a_traceback_when_its_reader_closes_the_pipe(config):
    def printed(code, *words):
        done = run_python("-c", code, *words)
        assert done.stderr == ""
        return done.stdout.splitlines()[-1]

    code = "import sys; from grain_sft.cli.main import main; status = main(); print(status, 'jax' in sys.modules)"
    assert printed(code, "trace", config, "--checkpoints") == "0 False"
    # `import grain_sft` does not import Grain
    light = "import sys, grain_sft; print('grain' in sys.modules, grain_sft.Host(0, 1), grain_sft.layout.__name__)"
    assert printed(light) == "False Host(index=0, count=1) grain_sft.layout"
    many = [sys.executable, "-m", "grain_sft.cli.main", "trace", config, "--checkpoints", "1"]
    with subprocess.Popen(many, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
