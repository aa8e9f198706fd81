"""Every shape of records in every kind of file: the same documents, with loss where it belongs."""

import dataclasses
import functools
import gzip
import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prepared import digests, save_trained
from record_files import COLUMNS, KINDS, Record, arrow_stream, lines, read_all
from template_rules import SPECIAL, in_one, primer, spelled

from grain_sft.cli.main import main
from grain_sft.corpus import open_corpus
from grain_sft.errors import CorpusFileError, RecordError
from grain_sft.prepare import Dataset, Request, conversation_lines, dry_run, load_tokenizer, prepare
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
}
"""From a conversation to a record."""
PAIRS = ("alpaca", "prompt and completion")  # shapes that hold one question and its answer


def messages(turns: Turns) -> list[Record]:
    return [{"role": role, "content": text} for role, text in turns]


def talks(draw: random.Random, count: int, pairs_only: bool = False) -> list[Turns]:
    """Conversations with hard texts; the assistant speaks last. With `pairs_only`, those of one question and its answer."""
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


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("spm"), SPECIAL, 450)


def request_of(spm: Path, *paths: Path, template: str = "primer", **options: Any) -> Request:
    return Request((Dataset(tuple(map(str, paths))),), template, str(spm), options.pop("format", "olmo"), **options)


def check_documents(out: Path, spm: Path, shape: str, conversations: list[Turns]) -> None:
    """Every document spells its own conversation, with loss on what the assistant says last or ever."""
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
def test_every_shape_in_every_kind_of_file_gives_its_documents(shape, count, spm, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK", 300)  # several units of each file
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)
    draw = random.Random(shape)
    for kind, write in KINDS.items():
        conversations = talks(draw, count, pairs_only=shape in PAIRS)
        path, out = tmp_path / f"a.{kind}", tmp_path / f"out-{kind}"
        path.write_bytes(write([SHAPES[shape](turns) for turns in conversations]))
        request = request_of(spm, path, template="text" if shape == "text" else "primer")
        prepare(request, out, workers=1)
        check_documents(out, spm, shape, conversations)
        assert f"{len(conversations):,} of the first {len(conversations):,} records" in dry_run(request, 999)
        assert list(conversation_lines([str(path)]))


def test_a_dry_run_and_a_training_open_a_file_when_its_turn_comes(spm, tmp_path):
    for name, data in (("a", lines([SHAPES["text"]([("user", str(n))]) for n in range(9)])), ("b", b"damaged")):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(data)[: 1000 if name == "a" else 12])
    request = request_of(spm, tmp_path, template="text")
    assert "9 of the first 9 records" in dry_run(request, 9)
    assert next(iter(conversation_lines([str(tmp_path)]))) == "0"
    with pytest.raises(CorpusFileError, match="ends in the middle of its gzip data"):
        dry_run(request, 10)
    with pytest.raises(CorpusFileError, match=r"missing\.jsonl: no such file"):
        dry_run(request_of(spm, tmp_path, tmp_path / "missing.jsonl", template="text"), 1)


def test_shapes_may_differ_from_record_to_record_and_from_file_to_file(spm, tmp_path):
    draw = random.Random(5)
    conversations = talks(draw, 200, pairs_only=True)
    chats = [shape for shape in SHAPES if shape not in ("text", "messages in two")]
    records = [SHAPES[draw.choice(chats)](turns) for turns in conversations]
    (tmp_path / "mixed.jsonl").write_bytes(lines(records))
    prepare(request_of(spm, tmp_path / "mixed.jsonl"), tmp_path / "one", workers=1)
    check_documents(tmp_path / "one", spm, "messages", conversations)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_a_file_that_changes_after_it_was_scanned_is_an_error(kind, workers, spm, tmp_path, monkeypatch):
    """Else the corpus would hold records that its manifest's hashes are not of."""
    monkeypatch.setattr(inputs, "BLOCK", 300)
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)
    before, after = (
        KINDS[kind]([SHAPES["messages"]([("user", f"{n}"), ("assistant", answer)]) for n in range(20)])
        for answer in "ab"
    )
    path = tmp_path / f"a.{kind}"
    path.write_bytes(before)

    def progress(what: str, done: int, total: int) -> None:
        if what == "Rendering" and not done:
            path.write_bytes(after)

    with pytest.raises(CorpusFileError, match=r"changed while it was read|ends in the middle of its zstd data"):
        prepare(request_of(spm, path), tmp_path / "out", workers=workers, progress=progress)
    assert not (tmp_path / "out").exists()


DAMAGED = {
    **{kind: KINDS[kind] for kind in KINDS if kind not in ("jsonl", "json")},
    "file.arrow": functools.partial(arrow_stream, new="new_file"),
    "packed.arrow": functools.partial(arrow_stream, compression="zstd"),
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=pytest.mark.heavy)])
def test_a_cut_or_flipped_file_is_a_sentence_or_the_same_records(kind, cases, tmp_path, monkeypatch):
    """Of Parquet and Arrow, which have no checksums, as many rows."""
    monkeypatch.setattr(inputs, "MAX_BLOCKS", 1)
    monkeypatch.setattr(inputs, "BLOCK", 500)
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
def test_a_row_group_is_read_in_parts_by_one_pass(tmp_path, monkeypatch, part_bytes):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(parquet_file, "PART_BYTES", part_bytes)
    monkeypatch.setattr(parquet_file, "_BATCH", 7)
    path, expected = tmp_path / "a.parquet", [{"text": [{"a": f"a text {number}"}]} for number in range(250)]
    rows = [{**row, "absent": None} for row in expected]
    expected[3]["text"][0]["weight"] = 0.5  # which is None in the other rows
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=100)
    assert read_all(path, random.Random(1)) == list(enumerate(expected, 1))
    opened, open_file = [], parquet_file._open
    monkeypatch.setattr(parquet_file, "_open", lambda path: opened.append(path) or open_file(path))
    assert read_all(path) == list(enumerate(expected, 1))
    assert len(opened) == 2  # to describe it, and to read it
    assert (len(inputs.plan_units(inputs.list_inputs([[str(path)]]))) > 3) == (part_bytes == 500)


def test_files_of_every_kind_are_read_from_a_bucket(client, spm, tmp_path):
    draw = random.Random(13)
    (tmp_path / "in").mkdir()
    for kind, write in KINDS.items():
        data = write([SHAPES["messages"](turns) for turns in talks(draw, 30)])
        (tmp_path / f"in/a.{kind}").write_bytes(data)
        client.pipe_file(f"bucket/kinds/a.{kind}", data)
    here = prepare(request_of(spm, tmp_path / "in"), tmp_path / "here", workers=1)
    request = Request((Dataset(("gs://bucket/kinds",)),), "primer", str(spm), "olmo")
    there = prepare(request, "gs://bucket/made-of-kinds", workers=1)
    assert there["splits"] == here["splits"] and here["splits"]["train"]["documents"] == 30 * len(KINDS)
    for name in ("token_ids_part_0000.npy", "labels_mask_part_0000.npy", "sources.bin"):
        assert client.cat_file(f"bucket/made-of-kinds/train/{name}") == (tmp_path / "here/train" / name).read_bytes()
    left = [path for path in client.find("bucket/") if "grain_sft" in path]
    assert not left, left
    client.rm(client.find("bucket/"))


def command(spm, path, *more):
    return ["prepare", str(path), "--tokenizer", str(spm), "-o", str(path.parent / "out"), *more]


@pytest.mark.parametrize("format", ["olmo", "episodes", "primer", "openchat"])
def test_plain_documents_are_their_tokens_and_eos_with_loss_on_all(format, spm, tmp_path):
    draw = random.Random(7)
    texts = ["".join(draw.choices("the answer\n\t é<|", k=draw.randrange(200))) for _ in range(60)]
    path = tmp_path / "documents.jsonl"
    path.write_bytes(lines([{"id": number, "text": text} for number, text in enumerate(texts)]))
    assert main(command(spm, path, "--template", "text", "--format", format)) == 0
    tokenizer, corpus = load_tokenizer(spm), open_corpus(tmp_path / "out")
    assert corpus.num_documents == sum(1 for text in texts if text)
    for document in corpus.iter_documents():
        tokens = document.tokens.tolist()
        assert tokens[-1] == tokenizer.eos_token_id and tokens.count(tokens[-1]) == 1
        assert tokenizer.decode(tokens[:-1]) == texts[document.source[1] - 1]
        assert document.loss.all()


def test_documents_and_conversations_are_not_mixed(spm, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    for shape, template, said in (("text", "primer", "is a plain document"), ("messages", "text", "is a conversation")):
        path.write_bytes(lines([SHAPES[shape]([("user", "u"), ("assistant", "a")])]))
        assert main(command(spm, path, "--template", template)) == 1
        assert f"{path}:1: the record {said}" in capsys.readouterr().err


def test_the_option_that_an_error_names_prepares_the_file(spm, tmp_path, capsys):
    path = tmp_path / "qa.jsonl"
    path.write_bytes(lines([{"question": f"word {n}", "answer": f"the answer {n}"} for n in range(9)]))
    words = command(spm, path, "--template", "primer")
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"grain-sft prepare: {path}:1: the record's keys are 'question', 'answer'; expected")
    assert main([*words, *shlex.split(error.rpartition(" add ")[2])]) == 0
    tokenizer, documents = load_tokenizer(spm), open_corpus(tmp_path / "out").iter_documents()
    said = {tokenizer.decode(each.tokens[each.loss].tolist()) for each in documents}
    assert said == {f"the answer {n}<|eot|>" for n in range(9)}


def test_processes_and_beam_make_the_same_bytes_of_every_kind_of_file(spm, tmp_path, monkeypatch):
    """And name the same bad records, by their files and numbers."""
    monkeypatch.setattr(inputs, "BLOCK", 500)
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)
    draw = random.Random(11)
    paths, bad = [], []
    for kind, write in KINDS.items():
        shapes = ["messages"] if kind in COLUMNS else ["messages", "sharegpt"]
        records = [SHAPES[draw.choice(shapes)](turns) for turns in talks(draw, 25)]
        bad.append((f"{tmp_path}/{len(paths)}.{kind}", draw.randrange(1, 26)))
        records[bad[-1][1] - 1] = SHAPES["messages"]([("user", "u"), ("robot", "a")])
        paths.append(Path(bad[-1][0]))
        paths[-1].write_bytes(write(records))
    request = request_of(spm, *paths, val_frac=0.2, format="episodes", on_error="skip")
    expected = prepare(request, tmp_path / "one", workers=1)
    rejected = [json.loads(line) for line in Path(f"{tmp_path}/one.rejected.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in rejected] == bad and expected["rejected"] == len(bad)
    beam = pytest.importorskip("grain_sft.prepare.beam")
    pytest.importorskip("apache_beam")
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
