"""Compressed files and JSON arrays: every record once, with its number, or a sentence."""

from __future__ import annotations

import gzip
import json
import random
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from grain_sft.errors import CorpusFileError, RecordError
from grain_sft.prepare.records import inputs, unpacked
from grain_sft.prepare.records.strict_json import parse_json

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def frames(draw: random.Random, data: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Compressed in several members or frames, as pigz, bgzip, pzstd and `cat` leave them."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(4)))
    return b"".join(compress(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))


def read_all(path: Path, draw: random.Random | None = None) -> list[tuple[int, Any]]:
    """All records; the units in another order than they are in, where there is a draw."""
    [entry] = inputs.list_inputs([[str(path)]])
    units, first, jobs = inputs.plan_units([entry]), 1, []
    for unit in units:
        jobs.append((unit, first))
        first += inputs.scan_unit(entry, unit).records
    order = list(range(len(jobs)))
    if draw is not None:
        draw.shuffle(order)
    found = {at: list(inputs.read_records(entry, *jobs[at])) for at in order}
    return [record for at in range(len(jobs)) for record in found[at]]


def values(draw: random.Random, count: int) -> list[Any]:
    letters = 'ab"\\[]{},: \n\u00e9\U0001f600'
    texts = ["".join(draw.choices(letters, k=draw.choice([0, 1, 5, 300]))) for _ in range(count)]
    return [draw.choice([{"text": text}, {text: [text, {}]}, [[text]], text, 1.5, None]) for text in texts]


def spaced(draw: random.Random, items: list[Any]) -> bytes:
    """An array with blanks wherever they may be."""
    blank = lambda: draw.choice(["", " ", "\n", "\r\n\t "])  # noqa: E731
    texts = [json.dumps(item, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 2])) for item in items]
    inside = ",".join(f"{blank()}{text}{blank()}" for text in texts) or blank()
    return (draw.choice(["", "\ufeff"]) + blank() + "[" + inside + "]" + blank()).encode()


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(inputs, "MAX_BLOCKS", 1)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_every_element_of_an_array_is_one_record(tmp_path, monkeypatch, block, compression):
    draw = random.Random(f"{block} {compression}")
    for case in range(8):
        monkeypatch.setattr(inputs, "BLOCK", draw.choice([1, block]))
        monkeypatch.setattr(unpacked, "BLOCK", block)
        expected = values(draw, draw.randrange(12))
        path = tmp_path / f"{case}.any"
        path.write_bytes(frames(draw, spaced(draw, expected), COMPRESS[compression]))
        found = read_all(path, draw)
        assert [json.loads(raw) for _, raw in found] == expected
        assert [number for number, _ in found] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_every_line_of_a_compressed_file_is_one_record(tmp_path, monkeypatch, block, compression):
    draw = random.Random(f"{block} {compression}")
    monkeypatch.setattr(inputs, "BLOCK", block)
    monkeypatch.setattr(unpacked, "BLOCK", block)
    for case in range(12):
        data = b"{" + b"".join(
            draw.choice([b"a", b"bc", b"\n", b"\n\n", b"\r\n", b"x" * 20]) for _ in range(draw.randrange(40))
        )
        path, plain = tmp_path / f"{case}.packed", tmp_path / f"{case}.jsonl"
        plain.write_bytes(data)
        path.write_bytes(frames(draw, data, COMPRESS[compression]))
        assert read_all(path, draw) == read_all(plain)


def test_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"  # a frame that readers skip
    for name, data in (
        ("a.gz", b'{"a": 1}\n'),
        ("a.json", gzip.compress(b'[{"a": 1}]')),
        ("a.jsonl", COMPRESS["zstd"](b' \n[ {"a": 1} ]')),
        ("a.zst", gzip.compress(b'{"a": 1}')),
        ("a", b'\xef\xbb\xbf\n[{"a": 1}]'),
        ("padded.gz", gzip.compress(b'{"a": 1}') + bytes(600)),
        ("skipped.zst", skipped.join(map(COMPRESS["zstd"], (b'{"a"', b": 1}")))),
    ):
        (tmp_path / name).write_bytes(data)
        assert [json.loads(raw) for _, raw in read_all(tmp_path / name)] == [{"a": 1}], name


@pytest.mark.parametrize("compression", COMPRESS)
def test_files_without_records_have_none(tmp_path: Path, compression: str) -> None:
    for data in (b"\n \n", b"[]", b" [ \n] \n", *([] if compression else [b""])):
        (tmp_path / "a").write_bytes(COMPRESS[compression](data))
        assert read_all(tmp_path / "a") == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[", "an array without its closing bracket after 0 records"),
        (b'[{"a": 1}, {"b": 2}', "an array without its closing bracket after 1 records"),
        (b'[{"a": "]', "an array without its closing bracket"),
        (b'[{"a": 1}] {"b": 2}', "text follows the end of the array"),
        (b'[{"role": "user"}]\n[{"role": "user"}]\n', "jq -c '{messages: .}' PATH > PATH.jsonl"),
    ],
)
@pytest.mark.parametrize("compression", COMPRESS)
def test_a_damaged_array_is_a_sentence(tmp_path: Path, compression: str, data: bytes, expected: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(COMPRESS[compression](data))
    with pytest.raises(CorpusFileError) as error:
        read_all(path)
    assert str(error.value).startswith(f"{path}: ") and expected.replace("PATH", str(path)) in str(error.value)


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("spread", [False, True], ids=["arrays, one a line", "objects over many lines"])
def test_the_commands_that_errors_name_make_files_that_are_read(tmp_path: Path, spread: bool) -> None:
    path, turns = tmp_path / "a b.jsonl", [{"role": "user", "content": "x"}]
    path.write_text(json.dumps({"messages": turns}, indent=2) * 2 if spread else f"{json.dumps(turns)}\n" * 2)
    with pytest.raises((RecordError, CorpusFileError)) as error:
        parse_json(read_all(path)[0][1])
    text = str(error.value)
    command = text.split("`")[1] if spread else text.rpartition("make records of them: ")[2]
    subprocess.run(["bash", "-c", command.replace("FILE", shlex.quote(str(path)))], check=True)
    assert [json.loads(raw) for _, raw in read_all(Path(f"{path}.jsonl"))] == [{"messages": turns}] * 2


def test_a_bad_element_is_a_record_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1}, {bad: [2]}, , "\xff", {"b": }} , {"c": 3},]')
    assert [raw for _, raw in read_all(path)][:4] == [b'{"a": 1}', b"{bad: [2]}", b"", b'"\xff"']
    assert len(read_all(path)) == 7 and read_all(path)[-1][1] == b""


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_cut_or_flipped_file_is_a_sentence_or_the_same_records(tmp_path: Path, compression: str) -> None:
    draw = random.Random(compression)
    lines = "".join(json.dumps({"text": draw.random()}) + "\n" for _ in range(200)).encode()
    whole = COMPRESS[compression](lines)
    path = tmp_path / "a"
    path.write_bytes(whole)
    expected = read_all(path)
    assert len(expected) == 200
    for case in range(100):
        data = bytearray(whole)
        if case % 2:
            del data[draw.randrange(5, len(data)) :]
        else:
            data[draw.randrange(4, len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            found = read_all(path)
        except CorpusFileError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            assert not case % 2 and found == expected


@pytest.mark.parametrize("name", ["lines.gz", "array.json"])
def test_a_file_that_changes_between_two_reads_is_noticed(tmp_path: Path, name: str) -> None:
    make = gzip.compress if name.endswith(".gz") else lambda data: b"[" + data.replace(b"\n", b",")[:-1] + b"]"
    path = tmp_path / name
    path.write_bytes(make(b'{"a": 1}\n' * 50))
    [entry] = inputs.list_inputs([[str(path)]])
    [unit] = inputs.plan_units([entry])
    path.write_bytes(make(b'{"a": 2}\n' * 50))
    with pytest.raises(CorpusFileError, match="changed while it was read"):
        list(inputs.read_records(entry, unit, 1))


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("start", [b"{", b"[1, "])
def test_a_record_that_is_too_long_is_named(tmp_path, monkeypatch, compression, start):
    if not compression and start == b"{":
        pytest.skip("of plain lines: test_inputs.py")
    monkeypatch.setattr(unpacked, "MAX_RECORD", 1000)
    monkeypatch.setattr(unpacked, "BLOCK", 100)
    monkeypatch.setattr(inputs, "BLOCK", 100)
    path = tmp_path / "a"
    path.write_bytes(COMPRESS[compression](start + b'"' + b"x" * 5000 + b'"'))
    with pytest.raises(
        RecordError, match=rf"a:{2 if start == b'[1, ' else 1}: a (line|record) of more than 1000 bytes"
    ):
        read_all(path)


def test_a_process_goes_through_a_compressed_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units in their order, as workers get them, cost one pass."""
    data = "".join(json.dumps({"text": f"{number:060d}"}) + "\n" for number in range(5000)).encode()
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(data, 1))
    monkeypatch.setattr(inputs, "BLOCK", 20_000)
    monkeypatch.setattr(unpacked, "BLOCK", 1 << 9)
    [entry] = inputs.list_inputs([[str(path)]])
    units = inputs.plan_units([entry])
    assert len(units) > 10
    reads = []
    read_range = unpacked.files.read_range
    monkeypatch.setattr(unpacked.files, "read_range", lambda *place: reads.append(place) or read_range(*place))
    assert sum(len(list(inputs.read_records(entry, unit, 1))) for unit in units) == 5000
    assert len(reads) == len(set(reads)) == -(-entry.size // unpacked.BLOCK)


@pytest.mark.parametrize("compression", ["gzip", "zstd", ""])
def test_opening_a_file_that_is_read_for_it_shows_progress(tmp_path, monkeypatch, compression):
    """Until it has been shown, no further byte is read."""
    monkeypatch.setattr(inputs, "PAUSE", 0.001)
    monkeypatch.setattr(unpacked, "BLOCK", 100)
    path = tmp_path / "a"
    parts = [b"[0", *(b"," + json.dumps(n * 7919).encode() for n in range(400)), b"]"]
    path.write_bytes(b"".join(COMPRESS[compression](part) for part in parts))
    shown = threading.Event()
    read_range = unpacked.files.read_range

    def read(path: str, start: int, stop: int) -> bytes:
        assert start < 1000 or shown.wait(60)
        return read_range(path, start, stop)

    def progress(what: str, done: int, total: int) -> None:
        assert what == "Opening the inputs" and total == path.stat().st_size
        if 0 < done < total:
            shown.set()

    monkeypatch.setattr(unpacked.files, "read_range", read)
    inputs.list_inputs([[str(path)]], progress)
    assert shown.is_set()


def test_a_long_string_is_scanned_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "BLOCK", 100)
    scans = []

    class Token:
        def finditer(self, data: bytes, start: int = 0) -> Any:
            scans.append(len(data) - start)
            return token.finditer(data, start)

    token = unpacked._TOKEN
    monkeypatch.setattr(unpacked, "_TOKEN", Token())
    path = tmp_path / "a.json"
    path.write_bytes(b'["' + b"x" * 100_000 + b'"]')
    inputs.list_inputs([[str(path)]])
    assert sum(scans) < 500_000
