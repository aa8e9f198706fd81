"""`grain-sft demo` resumes a killed run, and compares it with an uninterrupted one. It leaves other files alone."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from grain_sft.demo import run
from grain_sft.demo.corpus import CONFIG
from grain_sft.demo.run import Log, Options, Record, claim, difference, killed_after, newest_step, parse, started, table
from grain_sft.demo.train import batch_sha256
from grain_sft.errors import GrainSftError, StorageError

STEPS = 9


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with claim(tmp_path / "demo"), pytest.raises(StorageError, match="another demo is running"):
        claim(tmp_path / "demo").__enter__()
    with claim(tmp_path / "demo"):
        pass


WHOLE = {step: Record(step, float(np.float32(8 - step / 10)), f"{step:064x}") for step in range(9)}
NEXT_FLOAT = float(np.nextafter(np.float32(WHOLE[5].loss), np.float32(0)))
OTHER_LOSS = {5: msgspec.structs.replace(WHOLE[5], loss=NEXT_FLOAT)}
OTHER_BATCH = {8: msgspec.structs.replace(WHOLE[8], batch_sha256="f" + "0" * 63)}


def log(*steps: int) -> Log:
    """Return the records of `WHOLE` for the steps `range(*steps)`."""
    return {step: WHOLE[step] for step in range(*steps)}


DIFFERENCES = [
    (log(3, 9), WHOLE, "None"),
    (log(3, 9) | OTHER_LOSS, WHOLE, f"Step 5 is the first that differs: Record(step=5, loss={NEXT_FLOAT}"),
    (log(3, 9), WHOLE | OTHER_BATCH, "Step 8 is the first that differs"),
    (log(4, 9), WHOLE, "Step 3 is the first that differs: None and Record"),
    (log(3, 8), log(8), "Step 8 is the first that differs: None and None"),
]


@pytest.mark.parametrize(("resumed", "uninterrupted", "sentence"), DIFFERENCES)
def test_the_first_step_that_differs_is_named(resumed, uninterrupted, sentence):
    assert str(difference(range(3, 9), resumed, uninterrupted)).startswith(sentence)


def test_a_table_marks_what_differs() -> None:
    lines = table([0, 4, 5], {"resumed": log(3, 5) | OTHER_LOSS, "uninterrupted": WHOLE})
    assert [line.split()[-1] for line in lines[1:]] == ["same", "same", "DIFFERS"]


def test_a_line_of_the_log_is_parsed_unless_it_was_cut_off() -> None:
    for each in (WHOLE[0], OTHER_LOSS[5]):
        line = msgspec.json.encode(each).decode()
        assert parse(line) == each and parse(line[:-9]) is None


def test_a_run_that_was_done_before_it_was_killed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest checkpoint would leave no step for the resumed run."""
    text = "\n".join(msgspec.json.encode(record).decode() for record in WHOLE.values())
    command = [sys.executable, "-S", "-c", f"import time; print({text!r}, flush=True); time.sleep(60)"]
    monkeypatch.setattr(run, "started", lambda options: subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    with pytest.raises(GrainSftError, match="the interrupted run ended before it could be killed: give more --steps"):
        run.train("interrupted", Options("", str(tmp_path / "run"), STEPS, 0), kill_after=killed_after(STEPS))


def test_the_hash_of_a_batch_covers_names_shapes_dtypes_and_values() -> None:
    a, b = np.zeros((2, 3), np.int32), np.ones(3, np.int32)
    others = ({"a": a, "b": b * [1, 1, 2]}, {"a": a.T, "b": b}, {"a": a.astype(np.float32), "b": b}, {"a": a, "c": b})
    assert len({batch_sha256(each) for each in ({"a": a, "b": b}, *others)}) == 5
    assert batch_sha256({"b": b, "a": a}) == batch_sha256({"a": a, "b": b})


def test_the_first_run_is_killed_between_its_first_and_its_second_checkpoint() -> None:
    assert killed_after(60) == 32
    assert all(steps // 3 < killed_after(steps) + 1 < 2 * (steps // 3) < steps for steps in range(9, 200))


def demo(folder: Path, max_file_bytes: int | None = None) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of `grain-sft demo` in a process of its own."""
    start = "import sys, resource; from grain_sft.cli.main import main; "
    if max_file_bytes is not None:
        start += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes}, {max_file_bytes})); "
    command = [sys.executable, "-c", start + "sys.exit(main())", "demo", "--dir", str(folder), "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a demo, and what it printed."""
    root = tmp_path_factory.mktemp("demo") / "below" / "new"
    status, output, errors = demo(root)
    assert not errors and status == 0, output
    return root, output


@pytest.mark.pages
def test_the_demo_prints_what_it_trains_on_and_ends_with_equal_runs(finished: tuple[Path, str]) -> None:
    root, output = finished
    assert re.search(r"chat    [\d,]+ questions, .* \d\d% of the tokens are answers\n", output)
    assert re.search(r"rows    [\d,]+ of 256 tokens: \d\.\d conversations in a row, 0\.\d% padding", output)
    assert all(f"EQUAL: {name} and uninterrupted, all" in output for name in ("resumed", "interrupted"))
    assert "DIFFERS" not in output and "NOT EQUAL" not in output
    assert str(root / CONFIG) in output.splitlines()[-1]


@pytest.mark.pages
def test_the_resumed_run_continued_from_the_checkpoint_of_the_killed_one(finished: tuple[Path, str]) -> None:
    runs = finished[0] / "runs"
    logs = {path.name: (path / "log.jsonl").read_text().splitlines() for path in runs.iterdir()}
    steps = {name: [msgspec.json.decode(line)["step"] for line in lines] for name, lines in logs.items()}
    newest, count = newest_step(runs / "interrupted"), len(steps["interrupted"])
    assert killed_after(STEPS) < count < STEPS and 0 < newest <= count
    expected = {"interrupted": range(count), "resumed": range(newest, STEPS), "uninterrupted": range(STEPS)}
    assert steps == {name: list(made) for name, made in expected.items()}
    path = next((runs / "interrupted").glob("step-*.npz"))
    with np.load(path) as arrays:  # a checkpoint holds weights alone, no state of the data
        assert [array.dtype.name for array in arrays.values()] == ["float32"] * 3 * 5


@pytest.mark.pages
def test_a_run_that_can_not_write_its_checkpoint_fails_with_one_sentence(tmp_path: Path) -> None:
    status, _, errors = demo(tmp_path / "demo", 4 << 20)  # the corpus has smaller files, and checkpoints are larger
    assert status == 1
    (sentence,) = errors.splitlines()
    assert sentence.startswith("grain-sft demo: the interrupted run ended with exit status 1: ")
    assert "step-00000003.npz: can't be written (File too large)" in sentence
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.pages
def test_no_process_outlives_an_interrupt(finished: tuple[Path, str], tmp_path: Path) -> None:
    options = Options(str(finished[0] / CONFIG), str(tmp_path), 1000, 0)
    with pytest.raises(KeyboardInterrupt), started(options) as process:
        assert any(parse(line) for line in process.stdout or ())
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def failed(where: Path | str, run_command: Any) -> str:
    """Run a demo that must fail. Return its error, which is one line."""
    printed = run_command("demo", "--dir", where, status=1)
    assert not printed.out and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("below", ["", "below", "below/further"])
def test_a_file_in_place_of_a_folder_is_named(below: str, tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path / 'file'}: it is not a folder" in failed(tmp_path / "file" / below, run_command)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "tokens.npy").write_text("mine")
    assert "contains 'tokens.npy', but no earlier demo" in failed(tmp_path, run_command)
    assert [path.name for path in tmp_path.rglob("*")] == ["tokens.npy"]
    assert "not a local folder" in failed("gs://bucket/demo", run_command)
