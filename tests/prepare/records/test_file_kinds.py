"""`prepare` makes the right documents of every shape of record (such as ShareGPT) in every kind of file (such as Parquet)."""

import dataclasses
import functools
import gzip
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from prepared import CHAT_FORMATS, digests, rejected_of, request_of
from pyarrow import parquet
from record_files import COLUMNS, KINDS, Record, arrow_stream, lines, read_all
from template_rules import in_one, primer, spelled

from grain_sft.corpus import open_corpus
from grain_sft.errors import CorpusFileError, RecordError
from grain_sft.prepare import Dataset, Request, beam, conversation_lines, dry_run, load_tokenizer, prepare
from grain_sft.prepare.chunks import Chunks, Contents
from grain_sft.prepare.records import inputs, parquet_file

Turns = list[tuple[str, str]]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAPES: dict[str, Callable[[Turns], Record]] = {
    "messages": lambda turns: {"messages": messages(turns), "id": "x"},
    "sharegpt": lambda turns: {"conversations": [{"from": NAMES[role], "value": text} for role, text in turns]},
    "alpaca": lambda turns: {"instruction": turns[0][1], "input": "", "output": turns[1][1], "id": 3},
    "prompt and completion": lambda turns: {"prompt": turns[0][1], "completion": turns[1][1], "source": "web"},
    "messages in two": lambda turns: {"prompt": messages(turns[:-1]), "completion": messages(turns[-1:])},
    "text": lambda turns: {"text": turns[-1][1] or "x", "url": "y"},
    "mixed": lambda turns: SHAPES[("messages", "sharegpt", *PAIRS)[len(turns[1][1]) % 4]](turns),
}
"""Functions that write a conversation as a record, by the shape of the record."""
PAIRS = ("alpaca", "prompt and completion", "mixed")  # shapes whose records hold one question and one answer


def messages(turns: Turns) -> list[Record]:
    return [{"role": role, "content": text} for role, text in turns]


def talks(draw: random.Random, count: int, pairs_only: bool = False) -> list[Turns]:
    """Draw `count` conversations with hard texts. With `pairs_only`, return only those of one question and answer."""
    letters = 'the answer, word "\\\n\t{}[]é\u4e2d\U0001f600<|'
    found: list[Turns] = []
    for _ in range(count):
        system = [("system", text_of(draw, letters))] if draw.random() < 0.2 else []
        pairs = 1 if draw.random() < 0.6 else draw.randrange(2, 4)
        turns = [(role, text_of(draw, letters)) for _ in range(pairs) for role in ("user", "assistant")]
        found += [[*system, *turns]] if not pairs_only or len(system) + len(turns) == 2 else []
    return found


def text_of(draw: random.Random, letters: str) -> str:
    return "".join(draw.choices(letters, k=draw.choice([0, 1, 10, 40, 200])))


def check_documents(out: Path, spm: Path, shape: str, conversations: list[Turns]) -> None:
    """Check that each document is its conversation. All answers take loss; in "messages in two", only the last one does."""
    tokenizer, seen = load_tokenizer(str(spm)), set()
    for document in open_corpus(out).iter_documents():
        number = document.source[1]
        turns = conversations[number - 1]
        record = {"messages": messages(turns)}
        if shape == "messages in two":
            for message in record["messages"][:-1]:
                message["weight"] = 0
        runs = [(SHAPES[shape](turns)["text"], 1), ("</s>", 1)] if shape == "text" else primer(record)
        assert spelled(tokenizer, document.tokens, document.loss) == in_one(runs)
        seen.add(number)
    assert seen == set(range(1, len(conversations) + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [pytest.param(12, id="few"), pytest.param(500, id="many", marks=pytest.mark.heavy)])
def test_every_shape_in_every_kind_of_file_gives_its_documents(shape, count, spm, tmp_path, many_units, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_BLOCKS", 8)  # so that some units of work have several row groups
    draw, formats = random.Random(shape), itertools.cycle(CHAT_FORMATS)
    for kind, write in KINDS.items():
        if shape == "mixed" and kind in COLUMNS:
            continue
        conversations = talks(draw, count, pairs_only=shape in PAIRS)
        path, out = tmp_path / f"a.{kind}", tmp_path / f"out-{kind}"
        path.write_bytes(write([SHAPES[shape](turns) for turns in conversations]))
        request = request_of(spm, path, template="text" if shape == "text" else "primer", format=next(formats))
        prepare(request, out, workers=1)
        check_documents(out, spm, shape, conversations)
        assert f"{len(conversations):,} of the first {len(conversations):,} records" in dry_run(request, 999)
        assert list(conversation_lines([str(path)]))


def test_a_dry_run_and_tokenizer_training_open_a_file_when_its_turn_comes(spm, tmp_path):
    for name, data in (("a", lines([SHAPES["text"]([("user", str(n))]) for n in range(9)])), ("b", b"damaged")):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(data)[: 1000 if name == "a" else 12])
    request = request_of(spm, tmp_path)
    assert "9 of the first 9 records" in dry_run(request, 9)
    assert next(iter(conversation_lines([str(tmp_path)]))) == "0"
    with pytest.raises(CorpusFileError, match="ends in the middle of its gzip data"):
        dry_run(request, 10)
    with pytest.raises(CorpusFileError, match=r"missing\.jsonl: no such file"):
        dry_run(request_of(spm, tmp_path, tmp_path / "missing.jsonl"), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_a_file_that_changes_after_it_was_scanned_is_an_error(kind, workers, spm, tmp_path, many_units):
    """Otherwise the hashes in the manifest would not be those of the records in the corpus."""
    rows = [[SHAPES["messages"]([("user", f"{n}"), ("assistant", answer)]) for n in range(20)] for answer in "ab"]
    before, after = map(KINDS[kind], rows)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(before)

    def progress(what: str, done: int, total: int) -> None:
        if what == "Rendering" and not done:
            path.write_bytes(after)

    with pytest.raises(CorpusFileError, match=r"changed while it was read|ends in the middle of its zstd data"):
        prepare(request_of(spm, path, template="primer"), tmp_path / "out", workers=workers, progress=progress)
    assert not (tmp_path / "out").exists()


DAMAGED = {
    **{kind: KINDS[kind] for kind in KINDS if kind not in ("jsonl", "json")},
    "file.arrow": functools.partial(arrow_stream, new="new_file"),
    "packed.arrow": functools.partial(arrow_stream, compression="zstd"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_without_records_gives_no_records(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(DAMAGED[kind]([]))
    assert read_all(path) == []


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=pytest.mark.heavy)])
def test_a_cut_file_and_a_flipped_bit_give_an_error_or_the_same_records(kind, cases, tmp_path, many_units):
    """Parquet and Arrow have no checksums, so a flipped bit may change a record there, but not the number of records."""
    draw, path, refused = random.Random(kind), tmp_path / f"a.{kind}", 0
    whole = DAMAGED[kind]([{"text": f"a text {draw.random()}"} for _ in range(40)])
    path.write_bytes(whole)
    expected, used = read_all(path), [at for at in range(4, len(whole) - 2) if whole[at]]
    for case in range(cases):
        data = bytearray(whole)
        if case % 3:
            data[draw.choice(used) + draw.randrange(3)] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(5, len(data)) :]
        path.write_bytes(data)
        try:
            found = read_all(path)
        except CorpusFileError as error:
            assert str(error).startswith(f"{path}: ")
            refused += 1
        else:
            assert case % 3 and (len(found) == len(expected) if kind.endswith(COLUMNS) else found == expected)
    assert refused > 0.4 * cases


@pytest.mark.parametrize("part_bytes", [500, 1 << 26], ids=["parts of row groups", "whole row groups"])
def test_a_row_group_is_read_in_parts_by_one_pass(tmp_path, monkeypatch, calls_of, part_bytes):
    monkeypatch.setattr(parquet_file, "PART_BYTES", part_bytes)
    monkeypatch.setattr(parquet_file, "_BATCH", 40)
    decoded = calls_of(parquet_file, "rows_of")
    path, expected = tmp_path / "a.parquet", [{"text": [{"a": f"a text {number}"}]} for number in range(250)]
    rows = [{**row, "absent": None} for row in expected]
    expected[3]["text"][0]["weight"] = 0.5  # which is None in the other rows
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    assert read_all(path, random.Random(1)) == list(enumerate(expected, 1))
    opened = calls_of(parquet_file, "_open")
    assert read_all(path) == list(enumerate(expected, 1))
    assert len(opened) == 2  # to describe it, and to read it
    assert (len(inputs.plan_units(inputs.list_inputs([[str(path)]]))) > 3) == (part_bytes == 500)
    assert (max(batch.num_rows for (batch,) in decoded) < 40) == (part_bytes == 500)  # long rows are decoded a few at a time


def test_files_of_every_kind_are_read_from_a_bucket(client, spm, tmp_path):
    draw = random.Random(13)
    (tmp_path / "in").mkdir()
    for kind, write in KINDS.items():
        data = write([SHAPES["messages"](turns) for turns in talks(draw, 30)])
        (tmp_path / f"in/{kind}.{kind}").write_bytes(data)
        client.pipe_file(f"bucket/kinds/{kind}.{kind}", data)
    here = prepare(request_of(spm, tmp_path / "in", template="primer"), tmp_path / "here", workers=1)
    there = prepare(request_of(spm, "gs://bucket/kinds", template="primer"), "gs://bucket/made-of-kinds", workers=1)
    assert there["splits"] == here["splits"] and here["splits"]["train"]["documents"] == 30 * len(KINDS)
    for name in ("token_ids_part_0000.npy", "labels_mask_part_0000.npy", "sources.bin"):
        assert client.cat_file(f"bucket/made-of-kinds/train/{name}") == (tmp_path / "here/train" / name).read_bytes()
    assert not [path for path in client.find("bucket/") if "grain_sft" in path]
    client.rm(client.find("bucket/"))


def test_processes_and_beam_make_the_same_bytes_of_every_kind_of_file(spm, tmp_path, many_units, monkeypatch):
    """Processes and Beam also report the same bad records, each with its file and its number in the file."""
    monkeypatch.setattr(inputs, "MAX_BLOCKS", 8)  # so that some units of work have several row groups
    draw = random.Random(11)
    paths, bad = [], []
    for kind, write in KINDS.items():
        shapes = ["messages"] if kind in COLUMNS else ["messages", "sharegpt"]
        records = [SHAPES[draw.choice(shapes)](turns) for turns in talks(draw, 25)]
        bad.append((f"{tmp_path}/{len(paths)}.{kind}", draw.randrange(1, 26)))
        records[bad[-1][1] - 1] = SHAPES["messages"]([("user", "u"), ("robot", "a")])
        paths.append(Path(bad[-1][0]))
        paths[-1].write_bytes(write(records))
    request = request_of(spm, *paths, template="primer", val_frac=0.2, format="episodes", on_error="skip")
    expected = prepare(request, tmp_path / "one", workers=1)
    assert [(entry["file"], entry["line"]) for entry in rejected_of(tmp_path / "one")] == bad
    assert expected["rejected"] == len(bad)
    assert prepare(request, tmp_path / "two", workers=3) == expected
    assert beam.prepare(request, tmp_path / "beam") == expected
    made = [digests(tmp_path / name) for name in ("one", "two", "beam")]
    assert made[1:] == made[:1] * 2 and "rejected" in made[0]
    stops_there = dataclasses.replace(request, on_error="stop")
    texts = set()
    for function, options in ((prepare, {"workers": 1}), (prepare, {"workers": 3}), (beam.prepare, {})):
        with pytest.raises(RecordError) as error:
            function(stops_there, tmp_path / "bad", **options)
        texts.add(str(error.value))
    [text] = texts
    assert text.startswith("{}:{}: messages[1].role: 'robot'".format(*bad[0])) and not (tmp_path / "bad").exists()


def test_many_small_texts_are_rendered_together_and_keep_their_sources(spm: Path, tmp_path: Path) -> None:
    """The files are in two datasets. Among them are a large one, empty ones and one that is not UTF-8."""
    for name, count in ("a", 300), ("b", 40):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number:03d}.txt").write_text("" if number == 7 else f"the answer {number}\n")
    (tmp_path / "a/100.txt").write_text("the question " * 100_000)
    (tmp_path / "a/200.txt").write_bytes(b"\xff")
    datasets = tuple(Dataset((str(tmp_path / name),)) for name in "ab")
    request = Request(datasets, "text", str(spm), "olmo", on_error="skip", shuffle=False)
    entries = inputs.list_inputs([dataset.paths for dataset in datasets])
    assert [len(group) for group in inputs.grouped(entries, inputs.plan_units(entries))] == [100, 1, 199, 40]
    manifest = prepare(request, tmp_path / "out", workers=2)
    assert manifest["dropped"] == {"no text": 2} and manifest["rejected"] == 1
    names = [entry["path"] for entry in manifest["inputs"]]
    corpus = open_corpus(tmp_path / "out")
    kept = [number for number in range(340) if number not in (7, 200, 307)]
    assert corpus.sources is not None and corpus.sources.tolist() == [[number, 1] for number in kept]
    tokenizer = load_tokenizer(spm)
    for document, (source, _) in zip(corpus.iter_documents(), corpus.sources, strict=True):
        assert tokenizer.decode(document.tokens[:-1].tolist()) == Path(names[source]).read_text()
    assert [(entry["file"], entry["line"]) for entry in rejected_of(tmp_path / "out")] == [(names[200], 1)]


def test_line_numbers_above_the_range_of_uint32_are_kept(tmp_path: Path) -> None:
    chunks, lines = Chunks(str(tmp_path), "key"), [3, 2**32 + 5]
    for number, line in enumerate(lines):
        made = Contents([(line, 0, 1, 1, 0, 0)], [np.array([7], np.uint32)], [np.ones(1, np.bool_)])
        chunks.write(number, made.encode("key", np.dtype(np.uint16), np.dtype(np.bool_), None))
    assert chunks.column(chunks.headers(2), "line").tolist() == lines
