"""Runs of prepare: repeated, interrupted, on several processes, with changed requests, cut documents and full disks."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import CHAT_FORMATS, StoppedError, chat, digests, record, stamps, stop_half_way, write_chats
from template_rules import SPECIAL, save_tokenizers

from grain_sft.cli.main import main
from grain_sft.corpus import open_corpus
from grain_sft.errors import PrepareError, RecordError, StorageError
from grain_sft.prepare import (
    CHAT_TOKENS,
    TEMPLATES,
    Dataset,
    Request,
    TemplateOptions,
    convert,
    load_tokenizer,
    parse_record,
    prepare,
    render,
    train_tokenizer,
)
from grain_sft.prepare.records import inputs

CHAT_TEMPLATES = [name for name in TEMPLATES if name != "text"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By template."""
    return save_tokenizers(tmp_path_factory.mktemp("tokenizers"))


@dataclasses.dataclass
class Place:
    """A folder with inputs in `in`, and what is done in it."""

    folder: Path
    tokenizers: dict[str, str]
    capsys: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        """Write eight small inputs, so eight units."""
        self.chats = [write_chats(self.folder / f"in/{number}.jsonl", 60 + number) for number in range(8)]
        self.out = self.folder / "out"

    def request(
        self, template: str = "primer", format: str = "primer", inputs: list[Path] | None = None, **options: Any
    ) -> Request:
        datasets = tuple(Dataset((str(path),)) for path in inputs or self.chats)
        return Request(datasets, template, self.tokenizers[template], format, **options)

    def prepare(self, request: Request, name: str = "out", workers: int = 1, **options: Any) -> dict[str, Any]:
        return prepare(request, self.folder / name, workers=workers, **options)

    def assert_whole(self, request: Request, name: str = "out") -> None:
        """Assert that a corpus is that of a run which nothing interrupted, and that nothing else was left."""
        self.prepare(request, "fresh")
        assert digests(self.folder / name) == digests(self.folder / "fresh")
        shutil.rmtree(self.folder / "fresh")
        assert not [path for path in self.folder.iterdir() if path.name.endswith("work")]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def command(self, request: Request, *more: str, name: str = "out") -> list[str]:
        inputs = [path for dataset in request.datasets for path in dataset.paths]
        command = ["prepare", *inputs, "--template", request.template, "--tokenizer", request.tokenizer]
        return [*command, "--format", request.format, "-o", str(self.folder / name), "--workers", "1", *more]

    def succeeds(self, command: list[str]) -> str:
        assert main(command) == 0
        return self.capsys.readouterr().out

    def fails(self, command: list[str], lines: int = 1) -> str:
        assert main(command) == 1
        error = self.capsys.readouterr().err
        assert error.count("\n") == lines
        return error


@pytest.fixture
def place(tmp_path: Path, tokenizers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, tokenizers, capsys)


def workers_of_this_process() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # where it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"worker" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds its children in /proc")
def test_a_killed_worker_is_a_sentence_and_the_next_run_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)
    place.chats += [write_chats(place.folder / f"in/more-{number}.jsonl", 400) for number in range(6)]
    request = place.request()
    killed: list[int] = []

    def kill(what: str, done: int, total: int) -> None:
        if what == "Rendering" and done and not killed:
            killed.append(workers_of_this_process()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(
        PrepareError, match=r"a worker process ended \(-9\) at .*jsonl, line \d+ or after it\. .*Start again"
    ):
        place.prepare(request, workers=2, progress=kill)
    assert not place.out.exists() and not workers_of_this_process()
    done = len(list((place.folder / ".out.grain_sft-work/chunks").glob("*.chunk")))
    assert 0 < done < len(place.chats)
    place.prepare(request, workers=2)
    place.assert_whole(request)


def test_ctrl_c_is_a_sentence_and_the_next_run_goes_on(place: Place) -> None:
    place.chats += [write_chats(place.folder / f"in/more-{number}.jsonl", 1500) for number in range(3)]
    request = place.request()
    command = [sys.executable, "-m", "grain_sft.cli.main", *place.command(request, "--workers", "2")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)  # type: ignore[call-overload]
    finally:
        signal.signal(signal.SIGINT, before)
    chunks = place.folder / ".out.grain_sft-work/chunks"
    limit = time.monotonic() + 300
    while not list(chunks.glob("*.chunk")) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers too
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 130 and error.endswith("grain-sft prepare: interrupted.\n")
    assert "Traceback" not in error and not printed and not place.out.exists()
    place.prepare(request)
    place.assert_whole(request)


def test_two_runs_do_not_share_an_output(place: Place) -> None:
    request = place.request()
    refused: list[str] = []

    def again(what: str, done: int, total: int) -> None:
        if what == "Rendering" and len(refused) < 3:
            for overwrite in (False, True):
                with pytest.raises(StorageError) as error:
                    place.prepare(request, overwrite=overwrite)
                refused.append(str(error.value))

    place.prepare(request, progress=again)
    assert set(refused) == {f"{place.out}: is being prepared by another process. Wait for it."}
    place.assert_whole(request)


@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_a_finished_run_started_again_does_nothing(format: str, place: Place) -> None:
    command = place.command(place.request(format=format), "--val-frac", "0.2")
    first, before = place.succeeds(command), stamps(place.folder)
    for more in ([], ["--workers", "2"], ["--overwrite"]):
        assert place.succeeds([*command, *more]) == f"{place.out} is complete: nothing to do.\n{first}"
        assert stamps(place.folder) == before


OPTIONS: dict[str, tuple[Any, str]] = {
    "seed": (43, "42 -> 43"),
    "val_frac": (0.25, "0.1 -> 0.25"),
    "max_length": (50, "null -> 50"),
    "keep": ("first", 'null -> "first"'),
    "format": ("olmo", '"primer" -> "olmo"'),
    "template": ("episode", '"primer" -> "episode"'),
    "special_text": ("encode", '"error" -> "encode"'),
    "shuffle": (False, "null -> false"),
}


def change(what: str, chats: list[Path], request: Request) -> tuple[Request, list[str]]:
    """Change what is named; return the request and what the error says of it."""
    if what == "input":
        chats[3].write_text(chats[3].read_text().replace("kind", "nice", 1))  # as long as before
        return request, [f"{chats[3]}.digest: "]
    if what == "rows":
        chats[5].write_text(chats[5].read_text() + json.dumps(record(7)) + "\n")
        return request, [f"{chats[5]}.records: 65 -> 66"]
    if what == "tokenizer":
        words = [f"the question and other words {number}" for number in range(300)]
        Path(request.tokenizer).write_bytes(train_tokenizer(words, 440, SPECIAL))
        return request, ["tokenizer.sha256: "]
    if what == "names":
        renamed = chats[7].rename(chats[7].with_name("renamed.jsonl"))
        paths = [str(renamed), str(write_chats(chats[0].parent / "9.jsonl", 10))]
        datasets = (*request.datasets[:7], *(Dataset((path,)) for path in paths))
        return dataclasses.replace(request, datasets=datasets), [f"{path}: null -> " for path in paths]
    changed = dataclasses.replace(request, **{name: value for name, (value, _) in OPTIONS.items()})
    return changed, [f"request.{name}: {text}" for name, (_, text) in OPTIONS.items()]


@pytest.mark.parametrize(
    ("what", "stopped"),
    [
        *((each, False) for each in ("input", "rows", "tokenizer", "names", "options")),
        ("rows", True),
        ("options", True),
    ],
)
def test_what_changed_is_named_and_overwritten_only_if_asked(what: str, stopped: bool, place: Place) -> None:
    model = shutil.copy(place.tokenizers["primer"], place.folder / "spm.model")
    request = dataclasses.replace(place.request(val_frac=0.1), tokenizer=str(model))
    with pytest.raises(StoppedError) if stopped else contextlib.nullcontext():
        place.prepare(request, progress=stop_half_way() if stopped else None)
    changed, expected = change(what, place.chats, request)
    before = stamps(place.folder)
    with pytest.raises(PrepareError) as error:
        place.prepare(changed)
    text, found = str(error.value), "unfinished work" if stopped else "a corpus made"
    assert text.startswith(f"{place.out}: holds {found} from other inputs or options. What changed:\n")
    assert all(line in text for line in (*expected, "--overwrite")) and stamps(place.folder) == before
    place.prepare(changed, overwrite=True)
    place.assert_whole(changed)


def test_a_changed_parquet_file_is_noticed_wherever_it_changed(place: Place) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = arrow.Table.from_pylist([chat("", f"answer {number:06d} {'x' * 400}") for number in range(5000)])
    path = place.folder / "a.parquet"
    parquet.write_table(rows, path, compression="none", use_dictionary=False, row_group_size=999)
    request = place.request(inputs=[path])
    place.prepare(request)
    data = bytearray(path.read_bytes())
    assert len(data) > 2 << 20
    data[data.index(b"answer 000777")] ^= 2  # sizes, offsets and statistics stay as they are
    path.write_bytes(data)
    with pytest.raises(PrepareError, match=r"a\.parquet\.digest: "):
        place.prepare(request)


def test_after_an_error_of_the_request_nothing_is_in_the_way(place: Place) -> None:
    good, request = place.chats[6].read_text(), place.request()
    place.chats[6].write_text(good + "{broken\n")
    with pytest.raises(RecordError, match=r"6\.jsonl:67: "):
        place.prepare(request)
    place.chats[6].write_text(good)
    with pytest.raises(PrepareError, match="no document is left"):
        place.prepare(dataclasses.replace(request, max_length=2, keep="first", format="olmo"))
    with pytest.raises(PrepareError, match="has no chat template"):
        place.prepare(dataclasses.replace(request, template="hf"))
    place.prepare(request)
    assert place.names() == ["in", "out"]


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_folder_with_other_files_is_left_alone(more: list[str], place: Place) -> None:
    place.out.mkdir()
    (place.out / "thesis.txt").write_text("years of work")
    place.prepare(place.request(), "made")
    before = stamps(place.folder)
    converting = ["convert", str(place.folder / "made"), "--format", "olmo", "-o", str(place.out)]
    for command in (place.command(place.request()), converting):
        assert f"{place.out}: is not empty, and holds no prepare.json" in place.fails([*command, *more])
    assert stamps(place.folder) == before and (place.out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("in/0.jsonl", "in/0.jsonl: it is not a folder"),
        ("in/0.jsonl/out", "in/0.jsonl: it is not a folder"),
        ("/proc/grain_sft/out", "can't be written: /proc: "),
        ("/", "is the root of the file system"),
        ("o" * 250, "can't be made (File name too long)"),
        ("a\0b", "has NUL"),
        (os.fsdecode(b"a\xffb"), "not UTF-8"),
    ],
)
def test_an_output_that_cannot_be_made_is_a_sentence(output: str, expected: str, place: Place) -> None:
    assert expected in place.fails(place.command(place.request(), name=output))
    assert place.names() == ["in"]


def test_a_link_to_an_empty_folder_stays_one(place: Place) -> None:
    (place.folder / "large-disk").mkdir()
    place.out.symlink_to("large-disk")
    place.prepare(place.request())
    assert place.out.is_symlink() and (place.folder / "large-disk/prepare.json").exists()
    assert place.names() == ["in", "large-disk", "out"]


def test_an_input_whose_name_is_not_utf_8_is_a_sentence(place: Place) -> None:
    path = write_chats(place.folder / os.fsdecode(b"bad/a\xff.jsonl"), 3, bad=(2,))
    command = place.command(place.request(), "--on-error", "skip")
    for where in (path, path.parent):
        assert "not UTF-8" in place.fails([command[0], str(where), *command[1 + len(place.chats) :]])
    assert not place.out.exists()


@pytest.fixture
def small_files() -> Iterator[Callable[[int | None], None]]:
    """Limits the size of files, as a full disk does; None lifts the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("format", "workers"), [*((format, 1) for format in CHAT_FORMATS), ("primer", 2)])
def test_a_full_disk_is_a_sentence_and_the_next_run_goes_on(format, workers, place, small_files):
    request = place.request(format=format)
    place.prepare(request, "whole")
    converted = place.folder / "whole", place.folder / "converted"
    most = max(path.stat().st_size for path in (place.folder / "whole").rglob("*") if path.is_file())
    for limit in (1000, 10_000, most * 3 // 4, most - 1):  # while chunks are written, and later
        small_files(limit)
        for make in (lambda: place.prepare(request, workers=workers), lambda: convert(*converted, format)):
            with pytest.raises(StorageError, match=r"can't be written \(File too large\)"):
                make()
        small_files(None)
        assert not {"out", "converted"} & set(place.names())
    place.prepare(request, workers=workers)
    assert digests(place.out) == digests(place.folder / "whole")
    convert(*converted, format)
    assert place.names() == ["converted", "in", "out", "whole"]


@pytest.mark.parametrize(
    ("keep", "format"), [(None, "episodes"), (None, "olmo"), ("first", "olmo"), ("last", "episodes")]
)
@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_what_is_cut_and_dropped_is_counted(template: str, keep: str | None, format: str, place: Place) -> None:
    rules, most = TEMPLATES[template], 70 if template in ("olmo", "hf") else 24
    request = place.request(template, format, place.chats[:2])
    printed = place.succeeds(place.command(request, "--max-length", str(most), *(["--keep", keep] if keep else [])))
    lines = {
        (file, number): line
        for file, path in enumerate(place.chats[:2])
        for number, line in enumerate(path.read_text().splitlines(), 1)
    }
    records = [parse_record(json.loads(line)) for line in lines.values()]
    rendered = render(rules, records, load_tokenizer(request.tokenizer), TemplateOptions())
    expected: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    names = ("documents", "tokens", "trainable_tokens", "truncated", "cut_tokens", "cut_trainable_tokens")
    kept_of: list[tuple[int, ...]] = []
    for number, document in zip(lines, rendered, strict=True):
        tokens, loss = document.tokens.tolist(), document.loss.tolist()
        total, trainable = len(tokens), sum(map(bool, loss))
        part = slice(-most, None) if (keep or rules.truncation) == "last" else slice(most)
        tokens, loss = tokens[part], loss[part]
        while rules.trim_trailing and loss and not loss[-1]:
            tokens, loss = tokens[:-1], loss[:-1]
        if any(loss) or not (format == "olmo" or rules.trim_trailing):
            kept = sum(map(bool, loss))
            kept_of.append((1, len(tokens), kept, len(tokens) < total, total - len(tokens), trainable - kept))
            expected[number] = (tokens, loss)
    counts, dropped = dict(zip(names, map(sum, zip(*kept_of, strict=True)), strict=True)), len(lines) - len(expected)
    documents = open_corpus(place.out).iter_documents()
    assert {each.source: (each.tokens.tolist(), each.loss.tolist()) for each in documents} == expected
    manifest = json.loads((place.out / "prepare.json").read_text())
    assert {name: manifest["splits"]["train"][name] for name in counts} == counts
    assert counts["truncated"] > 20 and sum(manifest["dropped"].values()) == dropped
    printed_as = ("{} examples", "{} tokens", "", "{} cut", "{} tokens", "{} trainable lost")
    for text, count in zip(printed_as, counts.values(), strict=True):
        assert text.format(f"{count:,}") in " ".join(printed.split())
    assert ("\ndropped " in printed) == bool(dropped)
    assert not dropped or f"dropped  {dropped:,}: no trainable token" in printed


def test_all_dropped_is_a_sentence_and_no_folder(place: Place) -> None:
    request = place.request("episode", "olmo", place.chats[:1])
    error = place.fails(place.command(request, "--max-length", "2", "--keep", "first"))
    assert "no document is left for the split 'train': 60 valid records, 60 dropped (no trainable token)" in error
    bad = place.folder / "bad.jsonl"
    bad.write_text("{broken\n[]\n")
    error = place.fails(place.command(place.request(inputs=[bad]), "--on-error", "skip"))
    assert f"0 valid records, 2 rejected. The first: {bad}:1: not valid JSON" in error
    assert place.names() == ["bad.jsonl", "in"]


@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_one_record_and_no_validation(format: str, place: Place) -> None:
    path = write_chats(place.folder / "a.jsonl", 1)
    for val_frac in (0.0, 0.9):
        out = place.folder / f"out{val_frac}"
        manifest = place.prepare(place.request(format=format, inputs=[path], val_frac=val_frac), out.name)
        assert list(manifest["splits"]) == ["train"] and manifest["splits"]["train"]["documents"] == 1
        assert not [each.name for each in out.rglob("*") if each.name.startswith(("val", "openchat.eval"))]
        assert open_corpus(out).sources.tolist() == [[0, 1]]


def test_amounts_of_a_mixture(place: Place) -> None:
    sizes = {"a": 41, "b": 30, "c": 40, "d": 9, "e": 20}
    a, b, c, d, e = (str(write_chats(place.folder / f"{name}.jsonl", count)) for name, count in sizes.items())
    command = ["prepare", a, "0.5", b, "3.0", c, "100", d, e, "5", "--template", "primer", "--format", "olmo"]
    printed = place.succeeds([*command, "--tokenizer", place.tokenizers["primer"], "-o", str(place.out)])
    assert f"{20 + 90 + 100 + 9 + 5} examples" in printed

    def choice(count: int, size: int) -> list[int]:
        return (np.random.RandomState(42).choice(count, size=size, replace=False) + 1).tolist()

    of_b, of_c, of_d = (list(range(1, count + 1)) for count in (30, 40, 9))
    lines = [choice(41, 20), of_b * 3, [*of_c, *of_c, *choice(40, 20)], of_d, choice(20, 5)]
    mixed = np.array([(number, line) for number, part in enumerate(lines) for line in part])
    expected = mixed[np.random.default_rng(42).permutation(len(mixed))]
    assert np.array_equal(open_corpus(place.out).sources, expected)


@pytest.mark.parametrize("words", [["5", "a.jsonl"], ["a.jsonl", "1", "2"], ["0.5"]])
def test_an_amount_stands_after_an_input(words: list[str], place: Place) -> None:
    command = ["prepare", *words, "--template", "primer", "--tokenizer", place.tokenizers["primer"]]
    assert "an amount follows an input, once" in place.fails([*command, "-o", str(place.out)])


@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_converting_again_and_changed(format: str, place: Place) -> None:
    request = place.request(format="episodes", val_frac=0.2)
    place.prepare(request, "made")
    command = ["convert", str(place.folder / "made"), "--format", format, "-o", str(place.out)]
    first, before = place.succeeds(command), stamps(place.folder)
    left = place.folder / ".out.grain_sft-work"  # of a run that was killed after it had named the output
    left.mkdir()
    (left / "lock").touch()
    assert place.succeeds(command) == f"{place.out} is complete: nothing to do.\n{first}"
    assert not left.exists() and stamps(place.folder) == before
    place.prepare(dataclasses.replace(request, seed=7), "made", overwrite=True)
    before = stamps(place.folder)
    assert f"{place.out}: holds a corpus made from other inputs" in place.fails(command, lines=3)
    assert stamps(place.folder) == before
    place.succeeds([*command, "--overwrite"])
    place.succeeds([*command[:-1], str(place.folder / "fresh")])
    assert digests(place.out) == digests(place.folder / "fresh")


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        ("primer", ["--seq-level-weight"], "seq_level_weight is an option of template openchat, not of primer"),
        ("primer", ["--condition", "GPT4"], "condition is an option of template openchat"),
        ("primer", ["--system-prompt", "Be kind."], "system_prompt is an option of template openchat, episode"),
        ("primer", ["--format", "episodes", "--seed", str(1 << 32)], "expected at most 4294967295"),
        ("primer", ["--tokenizer", "none.model"], "none.model: no such file"),
        ("primer", ["--tokenizer", os.fsdecode(b"\xff.model")], "not UTF-8"),
        ("openchat", ["--condition", os.fsdecode(b"\xff")], "not UTF-8"),
        ("hf", ["--chat-template", "none.jinja"], "none.jinja: no such file"),
    ],
)
def test_options_that_do_not_fit_are_a_sentence(template: str, options: list[str], expected: str, place: Place) -> None:
    for more in ([], ["--dry-run"]):
        if not more or "--seed" not in options:
            assert expected in place.fails(place.command(place.request(template), *options, *more))
    assert place.names() == ["in"]


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_a_dry_run_shows_text_and_writes_nothing(template: str, place: Place) -> None:
    write_chats(place.chats[0], 3, bad=(2,))
    before = stamps(place.folder)
    printed = place.succeeds(place.command(place.request(template), "--max-length", "20", "--dry-run", "5"))
    assert "4 of the first 5 records can be prepared; nothing was written." in printed
    assert f"rejected   1\n  {place.chats[0]}:2: not valid JSON" in printed
    assert "| the answer 0.0 " in printed and "the question 0.0 " in printed
    assert "longer than 20 tokens" in printed
    assert not re.search(r"^[|.] ?$", printed, re.MULTILINE)  # a newline alone is shown as ⏎
    assert stamps(place.folder) == before


@pytest.mark.parametrize("name", ["prepare-chat-sft", "prepare-tool-sft"])
def test_the_episode_tools_lines_work_as_written(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.delenv("GRAIN_SFT_TOKENIZER", raising=False)
    write_chats(Path("data/conversations.jsonl"), 100)
    line = f"{name} --input data/conversations.jsonl --output_dir data/chat_sft --val_split 0.1".split()
    printed = place.succeeds(line)
    assert "90 examples" in printed and "10 examples" in printed and "data/chat_sft/train" in printed
    validation = np.sort(np.random.RandomState(42).permutation(100)[:10]) + 1
    assert open_corpus("data/chat_sft/val").sources[:, 1].tolist() == validation.tolist()
    before = stamps(place.folder)
    assert "nothing to do" in place.succeeds(line)  # the tokenizer that it trained is found again
    assert stamps(place.folder) == before


def test_a_trained_tokenizer_is_the_same_again_and_gives_back_every_text(place: Place) -> None:
    model, again = place.folder / "a.model", place.folder / "b.model"
    for path in (model, again):
        command = ["train-tokenizer", *map(str, place.chats), "-o", str(path), "--vocab-size", "330"]
        assert "pieces  330" in place.succeeds(command)
    assert model.read_bytes() == again.read_bytes()
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocab_size == 330 and set(tokenizer.special_tokens) >= set(CHAT_TOKENS)
    for text in ("", " a  b ", "\n\n", "👩‍👩‍👧‍👦 עברית", "<|eot|>"):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text
    request = dataclasses.replace(place.request(inputs=place.chats[:1]), tokenizer=str(model))
    assert place.prepare(request)["splits"]["train"]["documents"] == 60
