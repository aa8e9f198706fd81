"""Runs of prepare: repeated, interrupted, on several processes, with changed requests, cut documents and full disks."""

from __future__ import annotations

import dataclasses
import hashlib
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
from template_rules import SPECIAL
from tokenizer_makers import byte_level_json, save_huggingface

from grain_sft.cli.main import main
from grain_sft.corpus import open_corpus
from grain_sft.errors import PrepareError, RecordError, StorageError
from grain_sft.prepare import (
    FORMATS,
    TEMPLATES,
    Dataset,
    Request,
    TemplateOptions,
    load_tokenizer,
    parse_record,
    prepare,
    render,
)
from grain_sft.prepare.training import train_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHAT_TEMPLATES = [name for name in TEMPLATES if name != "text"]


def record(number: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": "be kind"}] if number % 4 == 0 else []
    for turn in range(1 + number % 3):
        messages.append({"role": "user", "content": f"the question {number}.{turn} " + "word " * (number % 11)})
        messages.append({"role": "assistant", "content": f"the answer {number}.{turn} " + "then " * (number % 17)})
    if number % 5 == 0:
        messages.append({"role": "user", "content": "thanks, word by word"})
    return {"messages": messages}


def write_chats(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    """`count` records, one a line; lines `bad` are broken."""
    lines = [json.dumps(record(number)) if number + 1 not in bad else "{broken" for number in range(count)]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By template."""
    folder = tmp_path_factory.mktemp("tokenizers")
    words = [f"the question and the answer, word {number}, then be kind" for number in range(100)]
    spm = folder / "spm.model"
    spm.write_bytes(train_tokenizer(words, 450, SPECIAL))
    hf = save_huggingface(folder / "hf", byte_level_json(SPECIAL), eos="<|endoftext|>", chat_template=CHATML)
    return {name: hf if name in ("hf", "olmo") else spm for name in TEMPLATES}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / ".cache"))


@pytest.fixture
def chats(tmp_path: Path) -> list[Path]:
    """Eight small inputs, so eight units."""
    (tmp_path / "in").mkdir()
    return [write_chats(tmp_path / f"in/{number}.jsonl", 60 + number) for number in range(8)]


def request_of(
    chats: list[Path], tokenizers: dict[str, Path], template: str = "primer", format: str = "primer", **options: Any
) -> Request:
    datasets = tuple(Dataset((str(path),)) for path in chats)
    return Request(datasets, template, str(tokenizers[template]), format, **options)


def command_of(request: Request, out: Path, *more: str) -> list[str]:
    inputs = [path for dataset in request.datasets for path in dataset.paths]
    command = ["prepare", *inputs, "--template", request.template, "--tokenizer", request.tokenizer]
    return [*command, "--format", request.format, "-o", str(out), "--workers", "1", *more]


def digest(out: Path) -> dict[str, str]:
    """Of every file, the rejected ones too."""
    found = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    rejected = Path(f"{out}.rejected.jsonl")
    found |= {"rejected": rejected} if rejected.exists() else {}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(found.items())}


def stamps(folder: Path) -> dict[str, int]:
    """When every file and folder was changed, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")}


class StoppedError(Exception):
    """Of a run that is stopped half-way."""


def stop_after(units: int) -> Callable[[str, int, int], None]:
    """A progress that stops a run when so many units are rendered."""
    seen = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal seen
        if what == "Rendering" and done:
            seen += 1
            if seen == units:
                raise StoppedError

    return progress


# Workers.


def test_the_number_of_workers_changes_no_byte(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    inputs = [write_chats(tmp_path / "in/large.jsonl", 3600, bad=(7, 2500, 3600))]  # several units in one file
    assert inputs[0].stat().st_size > 1 << 20
    inputs += [write_chats(tmp_path / f"in/{number}.jsonl", 40, bad=(3,)) for number in range(3)]
    found = []
    for workers in (1, 2, 3):
        request = request_of(inputs, tokenizers, "episode", "olmo", on_error="skip", val_frac=0.1, part_bytes=100_000)
        prepare(request, tmp_path / f"out{workers}", workers=workers)
        found.append(digest(tmp_path / f"out{workers}"))
    assert found[0] == found[1] == found[2]
    with open(tmp_path / "out1.rejected.jsonl") as file:
        rejected = [json.loads(line) for line in file]
    assert [entry["line"] for entry in rejected] == [7, 2500, 3600, 3, 3, 3]
    errors = set()
    for workers in (1, 2):
        with pytest.raises(RecordError) as error:
            prepare(dataclasses.replace(request, on_error="stop"), tmp_path / "stopped", workers=workers)
        errors.add(str(error.value))
    [text] = errors
    assert text.startswith(f"{inputs[0]}:7: ")


def workers_of_this_process() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"worker" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds its children in /proc")
def test_a_killed_worker_is_a_sentence_and_the_next_run_goes_on(
    chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    chats += [write_chats(tmp_path / f"in/more-{number}.jsonl", 800) for number in range(6)]
    request = request_of(chats, tokenizers)
    killed: list[int] = []

    def kill(what: str, done: int, total: int) -> None:
        if what == "Rendering" and done and not killed:
            killed.append(workers_of_this_process()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(PrepareError, match=r"a worker process ended \(-9\) at .*jsonl, unit \d+\. .*Start again"):
        prepare(request, tmp_path / "out", workers=2, progress=kill)
    assert not (tmp_path / "out").exists()
    assert not workers_of_this_process()
    done = len(list((tmp_path / ".out.grain_sft-work/chunks").glob("unit-*.chunk")))
    assert 0 < done < len(chats)
    begun: list[int] = []
    prepare(request, tmp_path / "out", workers=2, progress=lambda what, done, total: begun.append(done))
    prepare(request, tmp_path / "whole", workers=1)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    assert not (tmp_path / ".out.grain_sft-work").exists()


def test_ctrl_c_is_a_sentence_and_the_next_run_goes_on(
    chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    chats += [write_chats(tmp_path / f"in/more-{number}.jsonl", 2500) for number in range(3)]
    request = request_of(chats, tokenizers)
    command = [sys.executable, "-m", "grain_sft.cli.main", *command_of(request, tmp_path / "out", "--workers", "2")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    chunks = tmp_path / ".out.grain_sft-work/chunks"
    limit = time.monotonic() + 300
    while not list(chunks.glob("unit-*.chunk")) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers too
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 130 and error.endswith("grain-sft prepare: interrupted.\n")
    assert "Traceback" not in error and not printed and not (tmp_path / "out").exists()
    prepare(request, tmp_path / "out", workers=1)
    prepare(request, tmp_path / "whole", workers=1)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_two_runs_do_not_share_an_output(chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path) -> None:
    request = request_of(chats, tokenizers)
    refused: list[str] = []

    def again(what: str, done: int, total: int) -> None:
        if what == "Rendering" and len(refused) < 3:
            for overwrite in (False, True):
                with pytest.raises(StorageError) as error:
                    prepare(request, tmp_path / "out", workers=1, overwrite=overwrite)
                refused.append(str(error.value))

    prepare(request, tmp_path / "out", workers=1, progress=again)
    assert set(refused) == {f"{tmp_path}/out: is being prepared by another process. Wait for it."}
    prepare(request, tmp_path / "whole", workers=1)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


# Again.


@pytest.mark.parametrize("format", FORMATS)
def test_a_finished_run_started_again_does_nothing(
    format: str, chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_of(request_of(chats, tokenizers, format=format), tmp_path / "out", "--val-frac", "0.2")
    assert main(command) == 0
    first, before = capsys.readouterr().out, stamps(tmp_path)
    for more in ([], ["--workers", "2"], ["--overwrite"]):
        assert main([*command, *more]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/out is complete: nothing to do.\n{first}"
        assert stamps(tmp_path) == before


def change_input(chats: list[Path], request: Request) -> tuple[Request, str]:
    text = chats[3].read_text()
    chats[3].write_text(text.replace("kind", "nice", 1))  # as long as before
    return request, f"{chats[3]}.digest: "


def change_rows(chats: list[Path], request: Request) -> tuple[Request, str]:
    with chats[5].open("a") as file:
        file.write(json.dumps(record(7)) + "\n")
    return request, f"{chats[5]}.records: 65 -> 66"


def change_tokenizer(chats: list[Path], request: Request) -> tuple[Request, str]:
    path = Path(request.tokenizer)
    other = train_tokenizer([f"the question and other words {number}" for number in range(300)], 440, SPECIAL)
    path.write_bytes(other)
    return request, "tokenizer.sha256: "


def add_input(chats: list[Path], request: Request) -> tuple[Request, str]:
    more = write_chats(chats[0].parent / "9.jsonl", 10)
    return dataclasses.replace(request, datasets=(*request.datasets, Dataset((str(more),)))), f"{more}: null -> "


def with_option(name: str, value: Any, said: str) -> Callable[[list[Path], Request], tuple[Request, str]]:
    return lambda chats, request: (dataclasses.replace(request, **{name: value}), said)


CHANGES = {
    "input": change_input,
    "rows": change_rows,
    "tokenizer": change_tokenizer,
    "one input more": add_input,
    "seed": with_option("seed", 43, "request.seed: 42 -> 43"),
    "val_frac": with_option("val_frac", 0.25, "request.val_frac: 0.1 -> 0.25"),
    "max_length": with_option("max_length", 50, "request.max_length: null -> 50"),
    "keep": with_option("keep", "first", 'request.keep: null -> "first"'),
    "format": with_option("format", "olmo", 'request.format: "primer" -> "olmo"'),
    "template": with_option("template", "episode", 'request.template: "primer" -> "episode"'),
    "special text": with_option("special_text", "encode", 'request.special_text: "error" -> "encode"'),
    "shuffle": with_option("shuffle", False, "request.shuffle: null -> false"),
}


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "unfinished"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_named_and_overwritten_only_where_that_is_said(
    change: str, stopped: bool, chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "spm.model"
    shutil.copy(tokenizers["primer"], model)
    request = dataclasses.replace(request_of(chats, tokenizers, val_frac=0.1), tokenizer=str(model))
    out = tmp_path / "out"
    if stopped:
        with pytest.raises(StoppedError):
            prepare(request, out, workers=1, progress=stop_after(3))
    else:
        prepare(request, out, workers=1)
    changed, said = CHANGES[change](chats, request)
    before = stamps(tmp_path)
    with pytest.raises(PrepareError) as error:
        prepare(changed, out, workers=1)
    text = str(error.value)
    what = "unfinished work" if stopped else "a corpus made"
    assert text.startswith(f"{out}: holds {what} from other inputs or options. What changed:\n") and said in text
    assert "--overwrite" in text and stamps(tmp_path) == before
    prepare(changed, out, workers=1, overwrite=True)
    prepare(changed, tmp_path / "fresh", workers=1)
    assert digest(out) == digest(tmp_path / "fresh")
    assert not (tmp_path / ".out.grain_sft-work").exists()


def test_a_changed_parquet_file_is_noticed_wherever_it_changed(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [{"role": "assistant", "content": f"answer {number:06d} {'x' * 400}"}]} for number in range(5000)
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.Table.from_pylist(rows), path, compression="none", use_dictionary=False, row_group_size=999
    )
    request = request_of([path], tokenizers)
    prepare(request, tmp_path / "out", workers=1)
    data = bytearray(path.read_bytes())
    assert len(data) > 2 << 20
    place = data.index(b"answer 000777")
    data[place] ^= 2  # sizes, offsets and statistics stay as they are
    path.write_bytes(data)
    with pytest.raises(PrepareError, match=r"a\.parquet\.digest: "):
        prepare(request, tmp_path / "out", workers=1)


def test_a_renamed_input_is_another(chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path) -> None:
    request = request_of([chats[0].parent], tokenizers)
    prepare(request, tmp_path / "out", workers=1)
    chats[7].rename(tmp_path / "in/renamed.jsonl")
    with pytest.raises(PrepareError, match=r"in/renamed\.jsonl: null -> "):
        prepare(request, tmp_path / "out", workers=1)


def test_after_an_error_of_the_request_nothing_is_in_the_way(
    chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    good = chats[6].read_text()
    chats[6].write_text(good + "{broken\n")
    request = request_of(chats, tokenizers)
    with pytest.raises(RecordError, match=r"6\.jsonl:67: "):
        prepare(request, tmp_path / "out", workers=1)
    chats[6].write_text(good)
    with pytest.raises(PrepareError, match="no document is left"):
        prepare(dataclasses.replace(request, max_length=2, keep="first", format="olmo"), tmp_path / "out", workers=1)
    with pytest.raises(PrepareError, match="has no chat template"):
        prepare(dataclasses.replace(request, template="hf"), tmp_path / "out", workers=1)
    prepare(request, tmp_path / "out", workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


# Where to.


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_folder_with_other_files_is_left_alone(
    more: list[str], chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    before = stamps(tmp_path)
    assert main(command_of(request_of(chats, tokenizers), tmp_path / "out", *more)) == 1
    assert f"{tmp_path}/out: " in (error := capsys.readouterr().err) and "holds no prepare.json" in error
    assert stamps(tmp_path) == before and (tmp_path / "out/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("output", "said"),
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
def test_an_output_that_cannot_be_made_is_a_sentence(
    output: str,
    said: str,
    chats: list[Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command_of(request_of(chats, tokenizers), tmp_path / output)) == 1
    assert said in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_a_sentence(
    chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        prepare(request_of(chats, tokenizers), tmp_path / "locked/out")


def test_a_link_to_an_empty_folder_stays_one(chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "out").symlink_to("large-disk")
    prepare(request_of(chats, tokenizers), tmp_path / "out", workers=1)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "large-disk/prepare.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "large-disk", "out"]


@pytest.mark.parametrize("name", [b"a\xff.jsonl"])
def test_an_input_whose_name_is_no_utf_8_is_a_sentence(
    name: bytes, tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chats(tmp_path / os.fsdecode(name), 3, bad=(2,))
    for where in (tmp_path / os.fsdecode(name), tmp_path):
        request = Request((Dataset((str(tmp_path),)),), "primer", str(tokenizers["primer"]), "primer")
        command = command_of(request, tmp_path / "out", "--on-error", "skip")
        command[1] = str(where)
        assert main(command) == 1
        assert "not UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Limits the size of files, as a full disk does; given back at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_a_sentence_and_the_next_run_goes_on(
    format: str,
    workers: int,
    chats: list[Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    small_files: Callable[[int], None],
) -> None:
    if workers == 2 and format != "primer":
        pytest.skip("workers don't write formats")
    request = request_of(chats, tokenizers, format=format)
    prepare(request, tmp_path / "whole", workers=1)
    sizes = [path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    for limit in (1000, 10_000, max(sizes) * 3 // 4, max(sizes) - 1):  # while chunks are written, and later
        small_files(limit)
        with pytest.raises(StorageError, match=r"can't be written \(File too large\)"):
            prepare(request, tmp_path / "out", workers=workers)
        small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        assert not (tmp_path / "out").exists()
    prepare(request, tmp_path / "out", workers=workers)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


# What falls out.


@pytest.mark.parametrize("keep", [None, "first", "last"])
@pytest.mark.parametrize("template", CHAT_TEMPLATES)
@pytest.mark.parametrize("format", ["episodes", "olmo"])
def test_what_is_cut_and_dropped_is_counted(
    template: str,
    keep: str | None,
    format: str,
    chats: list[Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules, most = TEMPLATES[template], 70 if template in ("olmo", "hf") else 24
    request = request_of(chats[:2], tokenizers, template, format)
    more = ["--max-length", str(most), *(["--keep", keep] if keep else [])]
    assert main(command_of(request, tmp_path / "out", *more)) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for path in chats[:2] for line in path.read_text().splitlines()]
    places = [(file, line) for file in (0, 1) for line in range(1, 61 + file)]
    rendered = render(
        rules, [parse_record(line) for line in lines], load_tokenizer(request.tokenizer), TemplateOptions()
    )
    expected: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    counts = dict.fromkeys(
        ("documents", "tokens", "trainable_tokens", "truncated", "cut_tokens", "cut_trainable_tokens"), 0
    )
    dropped = 0
    for place, document in zip(places, rendered, strict=True):
        tokens, loss = document.tokens.tolist(), document.loss.tolist()
        total, trainable = len(tokens), sum(map(bool, loss))
        if total > most:
            last = (keep or rules.truncation) == "last"
            tokens, loss = (tokens[-most:], loss[-most:]) if last else (tokens[:most], loss[:most])
        while rules.trim_trailing and loss and not loss[-1]:
            tokens, loss = tokens[:-1], loss[:-1]
        if (format == "olmo" or rules.trim_trailing) and not any(loss):
            dropped += 1
            continue
        kept = sum(map(bool, loss))
        for name, value in zip(
            counts, (1, len(tokens), kept, len(tokens) < total, total - len(tokens), trainable - kept), strict=True
        ):
            counts[name] += value
        expected[place] = (tokens, loss)
    corpus = open_corpus(tmp_path / "out")
    found = {each.source: (each.tokens.tolist(), each.loss.tolist()) for each in corpus.iter_documents()}
    assert found == expected
    manifest = json.loads((tmp_path / "out/prepare.json").read_text())
    assert {name: manifest["splits"]["train"][name] for name in counts} == counts
    assert counts["truncated"] > 20 and sum(manifest["dropped"].values()) == dropped
    words = printed.split()
    for said in (f"{counts['truncated']:,} cut", f"{counts['cut_tokens']:,} tokens"):
        assert said in " ".join(words)
    assert f"{counts['cut_trainable_tokens']:,} trainable lost" in printed
    assert f"{counts['documents']:,} examples" in printed and f"{counts['tokens']:,} tokens" in printed
    assert ("\ndropped " in printed) == bool(dropped)
    if dropped:
        assert f"dropped  {dropped:,}: no trainable token" in printed


def test_all_dropped_is_a_sentence_and_no_folder(
    chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of(chats[:1], tokenizers, "episode", "olmo")
    assert main(command_of(request, tmp_path / "out", "--max-length", "2", "--keep", "first")) == 1
    error = capsys.readouterr().err
    assert "no document is left for the split 'train': 60 valid records, 60 dropped (no trainable token)" in error
    (tmp_path / "bad.jsonl").write_text("{broken\n[]\n")
    request = request_of([tmp_path / "bad.jsonl"], tokenizers)
    assert main(command_of(request, tmp_path / "out", "--on-error", "skip")) == 1
    error = capsys.readouterr().err
    assert f"0 valid records, 2 rejected. The first: {tmp_path}/bad.jsonl:1: not valid JSON" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "in"]


@pytest.mark.parametrize("format", FORMATS)
def test_one_record_and_no_validation(format: str, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", 1)
    for val_frac in (0.0, 0.9):
        out = tmp_path / f"out{val_frac}"
        manifest = prepare(request_of([path], tokenizers, format=format, val_frac=val_frac), out, workers=1)
        assert list(manifest["splits"]) == ["train"] and manifest["splits"]["train"]["documents"] == 1
        assert not [each.name for each in out.rglob("*") if each.name.startswith(("val", "openchat.eval"))]
        assert open_corpus(out).sources.tolist() == [[0, 1]]


# Mixtures.


def test_amounts_of_a_mixture(tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"a": 41, "b": 30, "c": 40, "d": 9, "e": 20}
    paths = [str(write_chats(tmp_path / f"{name}.jsonl", count)) for name, count in sizes.items()]
    a, b, c, d, e = paths
    command = ["prepare", a, "0.5", b, "3.0", c, "100", d, e, "5", "--template", "primer", "--format", "olmo"]
    assert main([*command, "--tokenizer", str(tokenizers["primer"]), "-o", str(tmp_path / "out")]) == 0
    sources = open_corpus(tmp_path / "out").sources

    def choice(count: int, size: int) -> np.ndarray[Any, Any]:
        return np.random.RandomState(42).choice(count, size=size, replace=False) + 1

    whole = np.arange(1, 41)
    expected = [
        np.sort(choice(41, 20)),
        np.repeat(np.arange(1, 31), 3),
        np.sort(np.concatenate([whole, whole, choice(40, 20)])),
        np.arange(1, 10),
        np.sort(choice(20, 5)),
    ]
    for number, lines in enumerate(expected):
        assert np.array_equal(np.sort(sources[sources[:, 0] == number, 1]), lines), number
    assert f"{20 + 90 + 100 + 9 + 5} examples" in capsys.readouterr().out
    mixed = np.concatenate(
        [np.stack([np.full(len(part), number), part], 1) for number, part in enumerate(in_order(expected, choice))]
    )
    assert np.array_equal(sources, mixed[np.random.default_rng(42).permutation(len(mixed))])


def in_order(expected: list[Any], choice: Callable[[int, int], Any]) -> list[Any]:
    """The lines of each dataset as open-instruct selects them, before the shuffle."""
    b, c = np.arange(1, 31), np.arange(1, 41)
    return [choice(41, 20), np.concatenate([b] * 3), np.concatenate([c, c, choice(40, 20)]), expected[3], choice(20, 5)]


@pytest.mark.parametrize("words", [["5", "a.jsonl"], ["a.jsonl", "1", "2"], ["0.5"]])
def test_an_amount_stands_after_an_input(
    words: list[str], tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", *words, "--template", "primer", "--tokenizer", str(tokenizers["primer"])]
    assert main([*command, "-o", str(tmp_path / "out")]) == 1
    assert "an amount follows an input, once" in capsys.readouterr().err


# Special text.


@pytest.mark.parametrize("kind", ["primer", "hf"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_special_text_has_its_place_or_is_ordinary(
    role: str, kind: str, tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "primer" if kind == "primer" else "hf"
    texts = ["a <|eot|> b", "<|im_end|>", "x<|asst|><|usr|>", "</myPT_user>\n<|endoftext|>", "<|eo<|eot|>t|>"]
    conversations = []
    for text in texts:
        said = {"user": "hi", "assistant": "yes", role: text}
        conversations.append({"messages": [{"role": name, "content": said[name]} for name in ("user", "assistant")]})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [record(0), *conversations]))
    command = command_of(request_of([path], tokenizers, template, "episodes"), tmp_path / "out")
    assert main(command) == 1
    place = f"messages[{int(role == 'assistant')}].content: spells the special token '<|eot|>' at character 2"
    assert f"{path}:2: {place}" in capsys.readouterr().err
    assert main([*command, "--special-text", "encode"]) == 0
    tokenizer = load_tokenizer(tokenizers[template])
    special = set(tokenizer.special_tokens.values())
    plain = [document for document in open_corpus(tmp_path / "out").iter_documents() if document.source[1] > 1]
    lengths = set()
    for text, document in zip(texts, plain, strict=True):
        assert text in tokenizer.decode(document.tokens.tolist())
        inner = [number for number in document.tokens.tolist() if number in special]
        lengths.add(len(inner))
        if role == "assistant":
            end = "<|eot|>" if template == "primer" else "<|im_end|>"
            assert tokenizer.decode(document.tokens[document.loss].tolist()) == text + end
    assert lengths == {4}  # those of the template


# Convert.


@pytest.mark.parametrize("format", FORMATS)
def test_converting_again_changed_and_on_a_full_disk(
    format: str,
    chats: list[Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    small_files: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = request_of(chats, tokenizers, format="episodes", val_frac=0.2)
    prepare(request, tmp_path / "made", workers=1)
    command = ["convert", str(tmp_path / "made"), "--format", format, "-o", str(tmp_path / "out")]
    small_files(1500)
    assert main(command) == 1
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    error = capsys.readouterr().err
    assert "can't be written (File too large)" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main(command) == 0
    first, before = capsys.readouterr().out, stamps(tmp_path)
    left = tmp_path / ".out.grain_sft-work"  # of a run that was killed after it had named the output
    left.mkdir()
    (left / "lock").touch()
    assert main(command) == 0
    assert not left.exists()
    assert capsys.readouterr().out == f"{tmp_path}/out is complete: nothing to do.\n{first}"
    assert stamps(tmp_path) == before
    prepare(dataclasses.replace(request, seed=7), tmp_path / "made", workers=1, overwrite=True)
    before = stamps(tmp_path)
    assert main(command) == 1
    assert f"{tmp_path}/out: holds a corpus made from other inputs" in capsys.readouterr().err
    assert stamps(tmp_path) == before
    assert main([*command, "--overwrite"]) == 0
    assert main([*command[:-1], str(tmp_path / "fresh")]) == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/x").touch()
    assert main([*command[:-1], str(tmp_path / "foreign"), "--overwrite"]) == 1
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["x"]


# Options, and the command line.


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        ("primer", ["--seq-level-weight"], "seq_level_weight is an option of template openchat, not of primer"),
        ("episode", ["--seq-level-weight"], "seq_level_weight is an option of template openchat, not of episode"),
        ("primer", ["--condition", "GPT4"], "condition is an option of template openchat"),
        ("primer", ["--system-prompt", "Be kind."], "system_prompt is an option of template openchat, episode"),
        ("primer", ["--format", "episodes", "--seed", str(1 << 32)], "expected at most 4294967295"),
        ("primer", ["--tokenizer", "none.model"], "none.model: no such file"),
        ("primer", ["--tokenizer", os.fsdecode(b"\xff.model")], "not UTF-8"),
        ("openchat", ["--condition", os.fsdecode(b"\xff")], "not UTF-8"),
        ("hf", ["--chat-template", "none.jinja"], "none.jinja: no such file"),
    ],
)
def test_options_that_do_not_fit_are_a_sentence(
    template: str,
    options: list[str],
    said: str,
    chats: list[Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more in ([], ["--dry-run"]):
        if not more or "--seed" not in options:
            assert main(command_of(request_of(chats, tokenizers, template), tmp_path / "out", *options, *more)) == 1
            assert said in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_dry_run_shows_text_and_writes_nothing(
    chats: list[Path], tokenizers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chats(chats[0], 3, bad=(2,))
    before = stamps(tmp_path)
    for template in CHAT_TEMPLATES:
        command = command_of(request_of(chats, tokenizers, template), tmp_path / "out", "--max-length", "20")
        assert main([*command, "--dry-run", "5"]) == 0
        printed = capsys.readouterr().out
        assert "4 of the first 5 records can be prepared; nothing was written." in printed
        assert f"rejected   1\n  {chats[0]}:2: not valid JSON" in printed
        assert "| the answer 0.0 " in printed and "the question 0.0 " in printed
        assert "longer than 20 tokens" in printed
        assert not re.search(r"^[|.] ?$", printed, re.MULTILINE)  # a newline alone is shown as ⏎
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("name", ["prepare-chat-sft", "prepare-tool-sft"])
def test_the_episode_tools_lines_work_as_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRAIN_SFT_TOKENIZER", raising=False)
    (tmp_path / "data").mkdir()
    write_chats(tmp_path / "data/conversations.jsonl", 100)
    line = f"{name} --input data/conversations.jsonl --output_dir data/chat_sft --val_split 0.1"
    assert main(line.split()) == 0
    printed = capsys.readouterr().out
    assert "90 examples" in printed and "10 examples" in printed and "data/chat_sft/train" in printed
    for split, count in (("train", 90), ("val", 10)):
        shard = tmp_path / "data/chat_sft" / split / "shard_00000"
        index = np.fromfile(shard / "episodes.idx", "<u8").reshape(-1, 2)
        mask, tokens = np.fromfile(shard / "mask.bin", "u1"), np.fromfile(shard / "tokens.bin", "<u4")
        assert len(index) == count and len(mask) == len(tokens) == index[-1].sum()
        assert np.array_equal(index[1:, 0], np.cumsum(index[:-1, 1]))
    metadata = json.loads((tmp_path / "data/chat_sft/dataset_metadata.json").read_text())
    assert (metadata["num_train_episodes"], metadata["num_val_episodes"]) == (90, 10)
    validation = np.sort(np.random.RandomState(42).permutation(100)[:10]) + 1
    assert open_corpus(tmp_path / "data/chat_sft/val").sources[:, 1].tolist() == validation.tolist()
    before = stamps(tmp_path)
    assert main(line.split()) == 0  # the tokenizer that it trained is found again
    assert "nothing to do" in capsys.readouterr().out and stamps(tmp_path) == before


def test_a_trained_tokenizer_is_the_same_again_and_gives_back_every_text(
    chats: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        inputs = [str(path) for path in chats]
        assert main(["train-tokenizer", *inputs, "-o", str(tmp_path / f"{name}.model"), "--vocab-size", "330"]) == 0
    assert "pieces  330" in capsys.readouterr().out
    model = tmp_path / "a.model"
    assert model.read_bytes() == (tmp_path / "b.model").read_bytes()
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocab_size == 330 and set(tokenizer.special_tokens) >= {
        "<|sys|>",
        "<|usr|>",
        "<|asst|>",
        "<|eot|>",
    }
    for text in ("", " a  b ", "\n\n", "👩‍👩‍👧‍👦 עברית", "<|eot|>"):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text
    request = Request((Dataset((str(chats[0]),)),), "primer", str(model), "primer")
    assert prepare(request, tmp_path / "out", workers=1)["splits"]["train"]["documents"] == 60
