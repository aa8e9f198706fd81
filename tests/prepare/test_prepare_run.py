"""`prepare` continues after errors and kills, keeps a finished corpus, and never replaces inputs or files of others."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

import pyarrow
import pytest
from prepared import CHAT_FORMATS, Place, StoppedError, chat, digests, record, stamps, stop_half_way, write_chats
from pyarrow import parquet
from template_rules import SPECIAL

from grain_sft.errors import PrepareError, RecordError, StorageError
from grain_sft.prepare import Dataset, Request, convert, train_tokenizer, workers
from grain_sft.prepare.chunks import Chunks
from grain_sft.prepare.records import inputs
from grain_sft.prepare.render import Renderer


def test_a_killed_worker_is_an_error_and_the_next_run_continues(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "GROUP_BYTES", 2 * place.chats[7].stat().st_size)  # two files
    request, send, processes = place.request(inputs=[place.folder / "in"]), workers._send, set()

    def kill_before_group_2(process, line):
        processes.add(process)
        if line == b"2":
            process.kill()
        send(process, line)

    monkeypatch.setattr(workers, "_send", kill_before_group_2)
    expected = r"a worker process ended \(-9\) in the records .*4\.jsonl:1 to .*5\.jsonl:65\. .*Start again"
    with pytest.raises(PrepareError, match=expected):
        place.prepare(request, workers=2)
    assert not place.out.exists() and None not in [process.poll() for process in processes]
    assert 0 < len(list((place.folder / ".out.grain_sft-work/chunks").glob("*.chunk"))) < len(place.chats)
    monkeypatch.setattr(workers, "_send", send)
    place.prepare(request, workers=2)
    place.assert_whole(request)


def test_a_second_run_with_the_same_output_is_refused_while_the_first_writes_it(place: Place) -> None:
    request, refused = place.request(), []

    def again(what, done, total):
        if what == "Rendering" and len(refused) < 3:
            for overwrite in (False, True):
                with pytest.raises(StorageError) as error:
                    place.prepare(request, overwrite=overwrite)
                refused.append(str(error.value))

    place.prepare(request, progress=again)
    assert set(refused) == {f"{place.out}: is being prepared by another process. Wait for it."}
    place.assert_whole(request)


def test_repeating_a_finished_run_does_not_disturb_a_run_that_replaces_its_corpus(place: Place) -> None:
    old, new = place.request(), place.request(inputs=place.chats[:3])
    place.prepare(old)
    found = []

    def again(what, done, total):
        if what == "Rendering" and done and not found:
            found.append(place.prepare(old)["already"])

    place.prepare(new, overwrite=True, progress=again)
    assert found == [True]
    place.assert_whole(new)


@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_a_finished_run_started_again_does_nothing(format: str, place: Place) -> None:
    command = place.command(place.request(format=format), "--val-frac", "0.2")
    first, before = place.succeeds(command), stamps(place.folder)
    for more in ([], ["--workers", "2"], ["--overwrite"]):
        assert place.succeeds([*command, *more]) == f"{place.out} is complete: nothing to do.\n{first}"
        assert stamps(place.folder) == before


def test_the_key_of_chunks_depends_on_the_text_of_the_template(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    module, keys = types.ModuleType("chats"), set()
    monkeypatch.setitem(sys.modules, "chats", module)
    for module.TEXT in ("{{ messages }}", "{{ messages[0] }}"):
        keys.add(Renderer(dataclasses.replace(place.request(), template="chats:TEXT"), ()).key)
    assert len(keys) == 2


OPTIONS = {"seed": 43, "val_frac": 0.25, "max_length": 50, "keep": "first", "format": "olmo"}
OPTIONS |= {"template": "episode", "special_text": "encode", "shuffle": False, "fim_rate": 0}


def change(what: str, chats: list[Path], request: Request) -> tuple[Request, list[str]]:
    """Change `what`; return the request, and the parts of the error message that name the change."""
    if what == "input":
        chats[3].write_text(chats[3].read_text().replace("kind", "nice", 1))  # the size stays
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
    values = [(name, json.dumps(getattr(request, name)), json.dumps(value)) for name, value in OPTIONS.items()]
    return dataclasses.replace(request, **OPTIONS), [f"request.{name}: {old} -> {new}" for name, old, new in values]


CHANGES = ("input", "rows", "tokenizer", "names", "options")


@pytest.mark.parametrize(("what", "stopped"), [*((what, False) for what in CHANGES), ("rows", True), ("options", True)])
def test_a_change_is_named_and_the_corpus_overwritten_only_if_asked(what: str, stopped: bool, place: Place) -> None:
    model = shutil.copy(place.tokenizers["primer"], place.folder / "spm.model")
    request = dataclasses.replace(place.request(val_frac=0.1), tokenizer=str(model))
    with pytest.raises(StoppedError) if stopped else contextlib.nullcontext():
        place.prepare(request, progress=stop_half_way if stopped else None)
    changed, expected = change(what, place.chats, request)
    before = stamps(place.folder)
    with pytest.raises(PrepareError) as error:
        place.prepare(changed)
    text, found = str(error.value), "unfinished work" if stopped else "a corpus made"
    assert text.startswith(f"{place.out}: holds {found} from other inputs or options. What changed:\n")
    assert all(line in text for line in (*expected, "--overwrite")) and stamps(place.folder) == before
    place.prepare(changed, overwrite=True)
    place.assert_whole(changed)


def test_a_changed_bit_in_the_middle_of_a_parquet_file_is_noticed(place: Place) -> None:
    rows = pyarrow.Table.from_pylist([chat("", f"answer {number:06d} {'x' * 400}") for number in range(5000)])
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


def test_a_run_after_an_error_in_the_input_or_the_template_needs_no_overwrite(place: Place) -> None:
    good, request = place.chats[6].read_text(), place.request()
    place.chats[6].write_text(good + "{broken\n")
    with pytest.raises(RecordError, match=r"6\.jsonl:67: "):
        place.prepare(request)
    place.chats[6].write_text(good)
    with pytest.raises(PrepareError, match="has no chat template"):
        place.prepare(dataclasses.replace(request, template="hf"))
    place.prepare(request)
    assert place.names() == ["in", "out"]


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_missing_or_damaged_chunk_is_named(content: bytes | None, tmp_path: Path) -> None:
    chunks = Chunks(str(tmp_path), "key")
    if content is not None:
        chunks.write(0, content)
    with pytest.raises(StorageError, match=r"group-000000\.chunk: is missing or damaged\. Prepare again\."):
        chunks.headers(1)


def test_a_damaged_manifest_is_named(place: Place) -> None:
    place.prepare(place.request())
    for damaged in (b"{", b"[]", b"\xff"):
        (place.out / "prepare.json").write_bytes(damaged)
        assert "prepare.json: damaged (" in place.fails(place.command(place.request())), damaged


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_folder_with_other_files_is_left_alone(more: list[str], place: Place) -> None:
    thesis, request = place.out / "thesis.txt", place.request()
    place.out.mkdir()
    with pytest.raises(PrepareError, match=r"is not empty, and holds no prepare\.json"):
        place.prepare(request, progress=lambda what, *_: what == "Writing" and thesis.write_text("years of work"))
    place.prepare(request, "made")
    before = stamps(place.folder)
    converting = ["convert", str(place.folder / "made"), "--format", "olmo", "-o", str(place.out)]
    for command in (place.command(request), converting):
        assert f"{place.out}: is not empty, and holds no prepare.json" in place.fails([*command, *more])
    assert stamps(place.folder) == before and thesis.read_text() == "years of work"


def test_no_output_replaces_an_input(place: Place) -> None:
    place.prepare(place.request())
    inside, rejected = write_chats(place.out / "more.jsonl", 9), write_chats(place.folder / "out.rejected.jsonl", 9)
    before = stamps(place.folder)
    for command in (
        place.command(place.request(inputs=[inside]), "--overwrite"),
        place.command(place.request(inputs=[rejected]), "--overwrite", "--on-error", "skip"),
        ["pack", str(place.out), "--sequence-length", "9", "-o", str(place.out / "train_labels.bin")],
    ):
        assert "is an input, which the output" in place.fails(command)
    assert stamps(place.folder) == before


def test_a_glob_that_matches_the_rejected_records_of_an_earlier_run_leaves_them_out(place: Place) -> None:
    write_chats(place.folder / "chats.jsonl", 9, bad=(3,))
    request = place.request(inputs=[place.folder / "*.jsonl"], on_error="skip")
    place.prepare(request)
    assert place.prepare(request)["already"] and place.prepare(request, "other")["rejected"] == 1
    assert "names no file" in place.fails(place.command(place.request(inputs=[place.folder / "*.rejected.jsonl"])))


IMPOSSIBLE_OUTPUTS = [
    ("in/0.jsonl", "in/0.jsonl: is not a folder. Give another output."),
    ("/proc/grain_sft/out", "can't be written: /proc: "),
    ("/", "is the root of the file system"),
    ("/proc", "/proc: is the root of a file system. Give a folder in it."),
    ("o" * 250, "can't be made (File name too long)"),
    ("a\0b", "contains NUL"),
    (os.fsdecode(b"a\xffb"), "not UTF-8"),
]


@pytest.mark.parametrize(("output", "expected"), IMPOSSIBLE_OUTPUTS)
def test_an_output_that_cannot_be_made_is_refused(output: str, expected: str, place: Place) -> None:
    assert expected in place.fails(place.command(place.request(), name=output))
    assert place.names() == ["in"]


def test_the_current_folder_is_not_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in the replaced folder would see no files, and each command in it would fail."""
    place.out.mkdir()
    monkeypatch.chdir(place.out)
    assert "out: is the current folder, which would be replaced" in place.fails(place.command(place.request()))


def test_a_folder_above_the_output_that_cannot_be_written_is_noticed_before_the_scan(place: Place, monkeypatch) -> None:
    place.out.mkdir()
    probe = tempfile.TemporaryFile
    missing = os.fspath(place.folder / "missing")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: probe(dir=missing if dir == str(place.folder) else dir))
    monkeypatch.setattr(inputs, "list_inputs", None)
    assert f"can't be written: {place.folder}: " in place.fails(place.command(place.request()))


def test_an_output_that_is_a_link_to_an_empty_folder_stays_a_link(place: Place) -> None:
    (place.folder / "large-disk").mkdir()
    place.out.symlink_to("large-disk")
    place.prepare(place.request())
    assert place.out.is_symlink() and (place.folder / "large-disk/prepare.json").exists()
    assert place.names() == ["in", "large-disk", "out"]


def test_an_input_whose_name_is_not_utf_8_is_refused(place: Place) -> None:
    path = write_chats(place.folder / os.fsdecode(b"bad/a\xff.jsonl"), 3, bad=(2,))
    command = place.command(place.request(), "--on-error", "skip")
    for where in (path, path.parent):
        assert "not UTF-8" in place.fails([command[0], str(where), *command[1 + len(place.chats) :]])
    assert not place.out.exists()


@pytest.mark.parametrize(("format", "workers"), [*((format, 1) for format in CHAT_FORMATS), ("primer", 2)])
def test_a_full_disk_is_an_error_and_the_next_run_continues(format, workers, place, small_files):
    request = place.request(format=format)
    place.prepare(request, "whole")
    converted = place.folder / "whole", place.folder / "converted"
    most = max(path.stat().st_size for path in (place.folder / "whole").rglob("*") if path.is_file())
    for limit in (1000, 10_000, most * 3 // 4, most - 1):  # small limits fail in chunk files, large ones in the corpus
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


@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_a_finished_conversion_is_kept_until_it_is_overwritten(format: str, place: Place) -> None:
    request = place.request(format="episodes", val_frac=0.2)
    place.prepare(request, "made")
    command = ["convert", str(place.folder / "made"), "--format", format, "-o", str(place.out)]
    first, before = place.succeeds(command), stamps(place.folder)
    left = place.folder / ".out.grain_sft-work"  # as left by a run that is killed after it renamed its output
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
