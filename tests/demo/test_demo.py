"""grain-sft demo: its text, tokens and model, what its verdict rests on, and the whole of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
import sentencepiece

import grain_sft
from grain_sft.cli.main import main
from grain_sft.demo import checkpoint, log, model, text, tokens
from grain_sft.demo.child import Child
from grain_sft.demo.compare import compare, table
from grain_sft.demo.folder import DemoFolder, claim
from grain_sft.demo.log import Record
from grain_sft.demo.prepare import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, prepare
from grain_sft.demo.run import Plan
from grain_sft.demo.train import RunOptions, update
from grain_sft.errors import StorageError

STEPS = 9
LOGITS = jax.jit(model.logits, static_argnums=1)
LOSS = jax.jit(model.loss, static_argnums=1)
UPDATE = jax.jit(update, static_argnums=3)
SMALL = model.ModelConfig(vocab_size=32, width=16, heads=2, layers=2, hidden=32)
DOCUMENTS = (
    "One line.",
    "Two lines,\n\n    the second one set in.",
    "Ünïcode, 漢字 and\ttabs.",
    "one two three " * 50,
)


def small_sources() -> list[text.Source]:
    return text.python_sources(max_characters=150_000)


# --- text ---


def test_docstrings_come_in_order_from_files_that_are_never_imported(tmp_path: Path) -> None:
    files = {
        "b.py": '"""Module b."""\nraise SystemExit("imported")\n',
        "a.py": '"""Module a."""\nclass A:\n    "Class A."\n    def f(self): "Method f."\nif 1:\n    def g(): "Function g."\n',
        "broken.py": "def (:\n",
        "null.py": "\0",
        "escape.py": '"Bad \\escape."\n',
        "test/t.py": '"""A test."""',
        "site-packages/s.py": '"""A package."""',
        "sub/c.py": '"""Module c."""\n',
        "notes.txt": '"""No Python."""',
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    found = [document for document in text.library_docstrings(tmp_path) if document]
    expected = ["Module a.", "Class A.", "Method f.", "Function g.", "Module b.", "Bad \\escape.", "Module c."]
    assert found == expected


def test_text_is_the_same_twice_within_its_bound_and_without_repeats() -> None:
    first = small_sources()
    assert first == small_sources()
    documents = [document for source in first for document in source.documents]
    assert 100_000 < sum(map(len, documents)) <= 150_000
    assert all(len(set(source.documents)) == len(source.documents) for source in first)
    assert all(document.strip() for document in documents)


# --- tokens ---


def test_tokens_give_back_every_document_and_eos_ends_each() -> None:
    trained = tokens.train_tokenizer(DOCUMENTS, vocab_size=330)
    assert trained == tokens.train_tokenizer(DOCUMENTS, vocab_size=330)
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained)
    (shard,) = tokens.tokenize(processor, DOCUMENTS)
    assert shard.dtype == np.uint16
    ends = np.flatnonzero(shard == processor.eos_id())
    assert len(ends) == len(DOCUMENTS)
    pieces = np.split(shard, ends + 1)[:-1]
    assert [processor.decode(piece[:-1].tolist()) for piece in pieces] == list(DOCUMENTS)


def test_text_can_not_forge_an_eos() -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokens.train_tokenizer(DOCUMENTS, vocab_size=330))
    assert processor.eos_id() not in processor.encode("before</s>after")


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert [tokens.token_dtype(size).name for size in (256, 257, 2048, 65_536, 65_537)] == [
        *("uint8", "uint16", "uint16", "uint16", "uint32")
    ]


def test_a_mix_lists_raw_files_by_label_that_end_with_a_document(tmp_path: Path) -> None:
    trained = tokens.train_tokenizer(DOCUMENTS, vocab_size=330)
    sources = [text.Source("one", DOCUMENTS * 3), text.Source("two", DOCUMENTS[:1])]
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained)
    written = tokens.write_mix(tmp_path / "mix.txt", "tokens", "small", trained, sources)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "tokens/small/one/part-00000.npy",
        "tokens/small/two/part-00000.npy",
    ]
    lines = (tmp_path / "mix.txt").read_text().splitlines()
    assert lines[0].startswith("#")
    assert lines[1] == "one,tokens/{TOKENIZER}/one/part-00000.npy"
    corpus = grain_sft.open_corpus(
        tmp_path / "mix.txt", dtype="uint16", eos_token_id=processor.eos_id(), tokenizer="small"
    )
    assert [shard.label for shard in corpus.shards] == ["one", "two"]
    assert all(shard.data_offset == 0 for shard in corpus.shards)
    assert corpus.num_documents == 3 * len(DOCUMENTS) + 1
    assert len(list(tokens.tokenize(processor, DOCUMENTS, shard_tokens=1))) == len(DOCUMENTS)


# --- the corpus in its folder ---


def test_a_corpus_is_made_once_and_made_again_if_it_is_damaged(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        made = prepare(folder, 0, read=small_sources)
        again = prepare(folder, 1, read=small_sources)
        assert (made.reused, again.reused) == (False, True)
        assert again.corpus.fingerprint == made.corpus.fingerprint
        pipeline = grain_sft.load(folder.config, host=grain_sft.Host(0, 1))
        assert pipeline.sampler.seed == 1
        assert pipeline[0]["inputs"].shape == (GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH)
        damaged = Path(made.corpus.shards[0].path)
        damaged.write_bytes(damaged.read_bytes()[:-2])
        mended = prepare(folder, 0, read=small_sources)
        assert not mended.reused
        assert mended.corpus.fingerprint == made.corpus.fingerprint
        folder.record.unlink()  # a demo that was ended before its corpus was complete
        assert not prepare(folder, 0, read=small_sources).reused


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with claim(tmp_path / "demo"), pytest.raises(StorageError, match="another demo is running"):
        claim(tmp_path / "demo").__enter__()
    with claim(tmp_path / "demo"):
        pass


# --- the model ---


def batch_of(inputs: np.ndarray, segments: np.ndarray | None = None) -> dict[str, np.ndarray]:
    rows, length = inputs.shape
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    segments = np.ones_like(inputs) if segments is None else segments
    return {
        "inputs": inputs,
        "targets": np.roll(inputs, -1, axis=1),
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets_segmentation": segments,
    }


def random_inputs(rows: int = 2, length: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SMALL.vocab_size, (rows, length)).astype(np.int32)


def scores(batch: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(LOGITS(model.init_params(SMALL, 0), SMALL, batch))


def test_a_later_token_changes_no_earlier_score() -> None:
    inputs = random_inputs()
    changed = inputs.copy()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = scores(batch_of(inputs)), scores(batch_of(changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(axis=(1, 2)).all()


def test_another_segment_changes_no_score() -> None:
    inputs = random_inputs()
    segments = np.repeat(np.array([[1, 2, 0]], np.int32), (5, 4, 3), axis=1).repeat(2, axis=0)
    changed = inputs.copy()
    changed[:, :5] = (changed[:, :5] + 1) % SMALL.vocab_size
    before, after = scores(batch_of(inputs, segments)), scores(batch_of(changed, segments))
    np.testing.assert_array_equal(before[:, 5:], after[:, 5:])
    assert np.isfinite(before).all()  # padding included


def test_scores_depend_on_distances_that_come_from_positions() -> None:
    batch = batch_of(random_inputs())
    moved = {**batch, "inputs_position": batch["inputs_position"] + 100}
    stretched = {**batch, "inputs_position": batch["inputs_position"] * 3}
    np.testing.assert_allclose(scores(batch), scores(moved), atol=1e-4)
    assert np.abs(scores(batch) - scores(stretched)).max() > 1e-3


def test_loss_ignores_targets_that_take_none() -> None:
    params, batch = model.init_params(SMALL, 0), batch_of(random_inputs())
    batch["targets_segmentation"] = batch["targets_segmentation"].copy()
    batch["targets_segmentation"][:, 4:9] = 0
    masked, taken = dict(batch), dict(batch)
    masked["targets"], taken["targets"] = batch["targets"].copy(), batch["targets"].copy()
    masked["targets"][:, 4:9] += 1
    taken["targets"][:, 3] = (taken["targets"][:, 3] + 1) % SMALL.vocab_size
    loss = LOSS(params, SMALL, batch)
    assert loss == LOSS(params, SMALL, masked)
    assert loss != LOSS(params, SMALL, taken)
    nothing = {**batch, "targets_segmentation": np.zeros_like(batch["targets"])}
    assert LOSS(params, SMALL, nothing) == 0
    logits = scores(batch).astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    of_targets = np.take_along_axis(log_probabilities, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -of_targets[batch["targets_segmentation"] != 0].mean(), rtol=1e-5)


def test_a_checkpoint_gives_back_every_bit_and_the_newest_is_last(tmp_path: Path) -> None:
    state, batch = checkpoint.init_state(SMALL, 0), batch_of(random_inputs())
    first_state, first_loss = UPDATE(state, 0, batch, SMALL)
    for step in (2, 10):
        checkpoint.save(tmp_path, step, first_state)
    (tmp_path / ".step-00000011.npz.x.tmp").touch()  # of a process that was killed while it wrote
    assert list(checkpoint.steps(tmp_path)) == [2, 10]
    loaded = checkpoint.load(tmp_path, 10)
    for part in ("params", "mean", "square"):
        for name, value in getattr(first_state, part).items():
            np.testing.assert_array_equal(getattr(loaded, part)[name], value)
    assert UPDATE(loaded, 1, batch, SMALL)[1] < first_loss
    assert checkpoint.steps(tmp_path / "none") == []
    with pytest.raises(StorageError, match=r"step-00000003\.npz"):
        checkpoint.load(tmp_path, 3)


# --- logs and the verdict ---


def record(step: int, loss: float | None = None) -> Record:
    value = float(np.float32(8 - step / 10 if loss is None else loss))
    return Record(step, value.hex(), f"{step:064x}")


def logs() -> dict[str, list[Record]]:
    return {"resumed": [record(step) for step in range(3, 9)], "uninterrupted": [record(step) for step in range(9)]}


def verdict(changed: dict[str, list[Record]]) -> str | None:
    result = compare("resumed", "uninterrupted", range(3, 9), changed)
    assert result.equal == (result.difference is None)
    return result.difference


def test_equal_logs_are_equal() -> None:
    assert verdict(logs()) is None


def test_one_bit_of_one_loss_is_a_difference_that_names_the_step() -> None:
    changed = logs()
    bits = np.nextafter(np.float32(changed["resumed"][2].loss), np.float32(0))
    changed["resumed"][2] = dataclasses.replace(changed["resumed"][2], loss_hex=float(bits).hex())
    changed["resumed"][4] = record(7, loss=1.0)
    assert "Step 5 is the first that differs: its loss" in (verdict(changed) or "")
    assert [line.split()[-1] for line in table(["resumed", "uninterrupted"], [0, 4, 5], changed)[1:]] == [
        *("same", "same", "DIFFERS")
    ]


def test_one_hexadecimal_digit_of_a_batch_is_a_difference() -> None:
    changed = logs()
    changed["uninterrupted"][8] = dataclasses.replace(changed["uninterrupted"][8], batch_sha256="f" + "0" * 63)
    assert "Step 8 is the first that differs: its batch" in (verdict(changed) or "")


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        (slice(0, 0), "Step 3 is missing"),
        (slice(0, 5), "Step 8 is missing"),
        (slice(1, 6), "Step 3 was expected"),
    ],
)
def test_a_step_that_is_missing_is_a_difference(kept: slice, sentence: str) -> None:
    changed = logs()
    changed["resumed"] = changed["resumed"][kept]
    assert sentence in (verdict(changed) or "")


def test_no_steps_at_all_and_steps_too_many_are_differences() -> None:
    assert compare("resumed", "uninterrupted", range(0), logs()).difference
    changed = logs()
    changed["resumed"].append(record(9))
    assert "after its last" in (verdict(changed) or "")
    changed = logs()
    changed["uninterrupted"].append(record(2))
    assert "twice" in (verdict(changed) or "")


def test_a_log_gives_back_its_records_and_passes_over_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written = [record(0), record(1, loss=1 / 3)]
    for each in written:
        log.append(path, each)
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    assert log.read(path) == written
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {"step": 0, "loss": 8.0, "loss_hex": "0x1.0000000000000p+3", "batch_sha256": "0" * 64}
    assert log.read(tmp_path / "none") == []


def test_the_hash_of_a_batch_covers_names_shapes_dtypes_and_values() -> None:
    batch = {"a": np.zeros((2, 3), np.int32), "b": np.ones(3, np.int32)}
    hashes = {
        log.batch_sha256(each)
        for each in (
            batch,
            {**batch, "b": np.array([1, 1, 2], np.int32)},
            {**batch, "a": np.zeros((3, 2), np.int32)},
            {**batch, "a": np.zeros((2, 3), np.float32)},
            {"a": batch["a"], "c": batch["b"]},
        )
    }
    assert len(hashes) == 5
    assert log.batch_sha256(dict(reversed(batch.items()))) == log.batch_sha256(batch)


def test_the_first_run_is_killed_between_its_first_and_its_second_checkpoint() -> None:
    assert (Plan(60, 0).checkpoint_every, Plan(60, 0).killed_after) == (20, 32)
    for steps in range(9, 200):
        plan = Plan(steps, 0)
        assert plan.checkpoint_every < plan.killed_after + 1 < 2 * plan.checkpoint_every < steps


# --- the whole of it ---


@dataclasses.dataclass(frozen=True)
class Finished:
    folder: DemoFolder
    status: int
    output: str


def demo(folder: Path, *, max_file_bytes: int | None = None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `grain-sft demo` in a process of its own."""

    start = "import sys, resource; from grain_sft.cli.main import main; "
    if max_file_bytes is not None:
        start += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes}, {max_file_bytes})); "
    command = [sys.executable, "-c", start + "sys.exit(main())", "demo", "--dir", str(folder), "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("demo") / "below" / "new"
    status, output, errors = demo(root)
    assert not errors
    return Finished(DemoFolder(root), status, output)


def test_the_demo_ends_with_equal_runs(finished: Finished) -> None:
    assert finished.status == 0, finished.output
    assert "EQUAL: resumed and uninterrupted, all" in finished.output
    assert "EQUAL: interrupted and uninterrupted, all" in finished.output
    assert "DIFFERS" not in finished.output and "NOT EQUAL" not in finished.output
    assert str(finished.folder.config) in finished.output.splitlines()[-1]


def test_the_killed_run_left_off_early_and_the_resumed_one_took_up_its_checkpoint(finished: Finished) -> None:
    def steps(name: str) -> list[int]:
        return [each.step for each in log.read(finished.folder.runs / name / "log.jsonl")]

    killed, resumed = steps("interrupted"), steps("resumed")
    newest = checkpoint.steps(finished.folder.runs / "interrupted" / "checkpoints")[-1]
    assert killed == list(range(len(killed))) and Plan(STEPS, 0).killed_after < len(killed) < STEPS
    assert resumed == list(range(newest, STEPS)) and 0 < newest <= len(killed)
    assert steps("uninterrupted") == list(range(STEPS))
    assert sorted(path.name for path in finished.folder.runs.iterdir()) == ["interrupted", "resumed", "uninterrupted"]


def test_a_checkpoint_holds_no_state_of_the_data(finished: Finished) -> None:
    path = next((finished.folder.runs / "interrupted" / "checkpoints").glob("step-*.npz"))
    with np.load(path) as arrays:
        assert {key.split("/")[0] for key in arrays.files} == {"params", "mean", "square"}
        assert all(array.dtype == np.float32 for array in arrays.values())


def test_a_run_that_can_not_write_fails_with_its_sentence(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder.root, tmp_path / "demo")
    status, output, errors = demo(tmp_path / "demo", max_file_bytes=1 << 20)
    assert status == 1
    assert "as an earlier demo left it" in output
    (sentence,) = errors.splitlines()
    assert sentence.startswith("grain-sft demo: the interrupted run ended with exit status 1: ")
    assert "step-00000003.npz: can't be written (File too large)" in sentence and "Free some space" in sentence
    assert not list(tmp_path.rglob("*.tmp"))


def test_no_process_outlives_an_interrupt(finished: Finished, tmp_path: Path) -> None:
    options = RunOptions(finished.folder.config, tmp_path, tokens.VOCAB_SIZE, 1000, 1000, 0)
    with pytest.raises(KeyboardInterrupt), Child("endless", options) as child:
        assert next(child.records()).step == 0
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


# --- errors ---


def failed(where: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["demo", "--dir", str(where)]) == 1
    captured = capsys.readouterr()
    assert not captured.out
    (sentence,) = captured.err.splitlines()
    return sentence


@pytest.mark.parametrize("below", ["", "below", "below/further"])
def test_a_file_in_the_way_is_named(below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    sentence = failed(tmp_path / "file" / below, capsys)
    assert str(tmp_path / "file") in sentence and "--dir" in sentence and "A file is in the way" in sentence
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "mine.npy").write_text("mine")
    assert "holds 'tokens', but no earlier demo" in failed(tmp_path, capsys)
    assert [path.name for path in tmp_path.rglob("*")] == ["tokens", "mine.npy"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "readonly").mkdir(mode=0o555)
    assert "Give a folder that you are allowed to write to" in failed(tmp_path / "readonly" / "demo", capsys)


def test_a_url_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a local folder" in failed("gs://bucket/demo", capsys)


@pytest.mark.parametrize("arguments", [["--steps", "8"], ["--steps", "many"], ["--seed", "-1"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["demo", *arguments])
    assert error.value.code == 2
    assert "expected an integer" in capsys.readouterr().err
