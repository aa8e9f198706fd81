"""`prepare` reads every record of its inputs once, with its number, wherever a file is cut and however it is compressed."""

import bz2
import gzip
import json
import lzma
import random
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from record_files import read_all, units_of, zstd

from grain_sft.errors import CorpusFileError, PrepareError, RecordError
from grain_sft.prepare.records import decompression, inputs, text_files
from grain_sft.prepare.records.strict_json import parse_json

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": lambda data: data, "gzip": gzip.compress, "zstd": zstd}
ANY = pytest.mark.parametrize("compression", COMPRESS)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def frames(draw: random.Random, data: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Compress random slices of `data` one by one, and join them, as pigz, bgzip, pzstd and `cat` do."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(4)))
    return b"".join(compress(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))


def expected_lines(data: bytes) -> list[tuple[int, bytes]]:
    """Return the number and the bytes of each line that is not blank."""
    return [(number, line.rstrip(b"\r")) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def values(draw: random.Random, count: int) -> list[Any]:
    letters = 'ab"\\[]{},: \n\u00e9\U0001f600'
    texts = ["".join(draw.choices(letters, k=draw.choice([0, 1, 5, 300]))) for _ in range(count)]
    return [draw.choice([{"text": text}, {text: [text, {}]}, [[text]], text, 1.5, None]) for text in texts]


def spaced(draw: random.Random, items: list[Any]) -> bytes:
    """Return `items` as a JSON array with random white space wherever JSON allows it."""
    blank = lambda: draw.choice(["", " ", "\n", "\r\n\t "])  # noqa: E731
    texts = [json.dumps(item, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 2])) for item in items]
    inside = ",".join(f"{blank()}{text}{blank()}" for text in texts) or blank()
    return (draw.choice(["", "\ufeff"]) + blank() + "[" + inside + "]" + blank()).encode()


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_BLOCKS", 2)
    monkeypatch.setattr(inputs, "MANY_BLOCKS", 5)


@ANY
@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_every_line_is_one_record_in_one_unit(tmp_path, monkeypatch, block, compression):
    draw = random.Random(f"{block} {compression}")
    monkeypatch.setattr(inputs, "BLOCK", block)
    monkeypatch.setattr(decompression, "BLOCK", block)
    for case in range(30):
        data = b"{" + b"".join(draw.choices([b"a", b"bc", b"\n", b"\n\n", b"\r\n", b"x" * 20], k=draw.randrange(40)))
        path = written(tmp_path / str(case), frames(draw, data, COMPRESS[compression]))
        assert read_all(path, draw) == read_all(path) == expected_lines(data)


@ANY
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_every_element_of_an_array_is_one_record(tmp_path, monkeypatch, block, compression):
    draw = random.Random(f"{block} {compression}")
    for case in range(8):
        monkeypatch.setattr(inputs, "BLOCK", draw.choice([1, block]))
        monkeypatch.setattr(decompression, "BLOCK", block)
        expected = values(draw, draw.randrange(12))
        path = written(tmp_path / str(case), frames(draw, spaced(draw, expected), COMPRESS[compression]))
        found = read_all(path, draw)
        assert [json.loads(raw) for _, raw in found] == expected
        assert [number for number, _ in found] == list(range(1, len(expected) + 1))


def test_the_content_of_a_file_decides_its_kind_and_not_its_name(tmp_path: Path) -> None:
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"  # a frame that readers skip
    for name, data in (
        ("a.gz", b'{"a": 1}\n'),
        ("a.json", gzip.compress(b'[{"a": 1}]')),
        ("a.jsonl", COMPRESS["zstd"](b' \n[ {"a": 1} ]')),
        ("a.zst", gzip.compress(b'{"a": 1}')),
        ("a", b'\xef\xbb\xbf\n[{"a": 1}]'),
        ("b", b'\xef\xbb\xbf{"a": 1}'),
        ("padded.gz", gzip.compress(b'{"a": 1}') + bytes(600)),
        ("skipped.zst", skipped.join(map(COMPRESS["zstd"], (b'{"a"', b": 1}")))),
        ("pzstd.zst", skipped + zstd(b'{"a": 1}')),
    ):
        assert [json.loads(raw) for _, raw in read_all(written(tmp_path / name, data))] == [{"a": 1}], name


@ANY
@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_a_text_is_one_document(tmp_path: Path, compression: str, name: str) -> None:
    name += {"": "", "gzip": ".gz", "zstd": ".zst"}[compression]
    for text in ("", "\n", "# A title\n\nTwo\r\nlines, é 中.\n", "[1] a note", "{\\small x}", "x" * 5000):
        path = written(tmp_path / name, COMPRESS[compression](text.encode()))
        assert read_all(path) == [(1, {"text": text})]
    assert read_all(written(path, COMPRESS[compression](b"\xef\xbb\xbfa"))) == [(1, {"text": "a"})]
    for records in (b'{"a": 1}\n', b'[\n {"a": 1}]'):  # records are read as records, even from a .txt
        assert [json.loads(raw) for _, raw in read_all(written(path, COMPRESS[compression](records)))] == [{"a": 1}]


@ANY
def test_files_without_records_give_no_records(tmp_path: Path, compression: str) -> None:
    for data in (b"\n \n", b"[]", b" [ \n] \n", *([] if compression else [b""])):
        assert read_all(written(tmp_path / "a", COMPRESS[compression](data))) == []


def test_inputs_that_cannot_be_read_are_errors_that_name_the_fix(tmp_path):
    written(tmp_path / "a.txt", b"a")
    for name, error in (
        ("none.jsonl", r"no such file\. Expected \.jsonl,"),
        ("*.jsonl", "names no file"),
        ("a.txt", "is named twice"),
    ):
        with pytest.raises(CorpusFileError, match=error):
            inputs.list_inputs([[f"{tmp_path}/./a.txt"], [str(tmp_path / name)]])
    with pytest.raises(CorpusFileError, match="is empty, so it is not a compressed file"):
        read_all(written(tmp_path / "a.jsonl.gz", b""))
    for name, compress, command in (("a.bz2", bz2.compress, "bunzip2 -k"), ("a.xz", lzma.compress, "unxz -k")):
        with pytest.raises(PrepareError, match=f"Decompress it: {command} {tmp_path}/{name}"):
            read_all(written(tmp_path / name, compress(b"{}")))
    with pytest.raises(CorpusFileError, match=r"a\.parquet: can't be read as Parquet"):
        read_all(written(tmp_path / "a.parquet", b""))
    with pytest.raises(CorpusFileError, match=r"a\.txt: is a pointer of Git LFS"):
        read_all(written(tmp_path / "a.txt", b"version https://git-lfs.github.com/spec/v1"))
    for magic, kind in ((b"PAR1", "Parquet"), (b"ARROW1\0\0", "Arrow"), (b"\xff" * 4, "Arrow")):
        with pytest.raises(PrepareError, match=f"compressed {kind} file can't be read from the middle. Decompress it"):
            read_all(written(tmp_path / "a", gzip.compress(magic + bytes(100))))


DAMAGED_ARRAYS = [
    (b"[", "an array without its closing bracket after 0 records"),
    (b'[{"a": 1}, {"b": 2}', "an array without its closing bracket after 1 records"),
    (b'[{"a": 1}] {"b": 2}', "text follows the end of the array"),
    (b'[{"role": "user"}]\n[{"role": "user"}]\n', "jq -c '{messages: .}' PATH > PATH.jsonl"),
]


@pytest.mark.parametrize(("data", "expected"), DAMAGED_ARRAYS)
@ANY
def test_a_damaged_array_is_an_error(tmp_path: Path, compression: str, data: bytes, expected: str) -> None:
    path = written(tmp_path / "a.json", COMPRESS[compression](data))
    with pytest.raises(CorpusFileError) as error:
        read_all(path)
    assert str(error.value).startswith(f"{path}: ") and expected.replace("PATH", str(path)) in str(error.value)


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("spread", [False, True], ids=["arrays, one a line", "objects over many lines"])
def test_the_command_in_an_error_makes_a_file_that_is_read(tmp_path: Path, spread: bool) -> None:
    path, turns = tmp_path / "a b.jsonl", [{"role": "user", "content": "x"}]
    path.write_text(json.dumps({"messages": turns}, indent=2) * 2 if spread else f"{json.dumps(turns)}\n" * 2)
    with pytest.raises((RecordError, CorpusFileError)) as error:
        parse_json(read_all(path)[0][1])
    text = str(error.value)
    command = text.split("`")[1] if spread else text.rpartition("make records of them: ")[2]
    subprocess.run(["bash", "-c", command.replace("FILE", shlex.quote(str(path)))], check=True)
    assert [json.loads(raw) for _, raw in read_all(Path(f"{path}.jsonl"))] == [{"messages": turns}] * 2


def test_a_zstd_window_over_the_limit_is_not_called_damage(tmp_path: Path) -> None:
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(20)  # no content size; a window of 2^31 bytes
    with pytest.raises(CorpusFileError, match=r"byte 0 \(zstd: .*memory.*smaller window if it takes too much"):
        read_all(written(tmp_path / "b.jsonl.zst", frame))


def test_a_bad_element_is_a_record_of_its_own(tmp_path: Path) -> None:
    found = read_all(written(tmp_path / "a.json", b'[{"a": 1}, {bad: [2]}, , "\xff", {"b": }} , {"c": 3},]'))
    assert [raw for _, raw in found][:4] == [b'{"a": 1}', b"{bad: [2]}", b"", b'"\xff"']
    assert len(found) == 7 and found[-1][1] == b""


@ANY
@pytest.mark.parametrize(
    ("start", "named"), [(b"{\n", "a:2: a line of"), (b"[1, ", "a:2: a record of"), (b"", "a.txt: a text of")]
)
def test_the_error_of_a_record_that_is_too_long_names_it(tmp_path, monkeypatch, compression, start, named):
    monkeypatch.setattr(text_files, "MAX_RECORD", 1000)
    monkeypatch.setattr(decompression, "BLOCK", 100)
    monkeypatch.setattr(inputs, "BLOCK", 100)
    path = written(tmp_path / named.partition(":")[0], COMPRESS[compression](start + b'"' + b"x" * 5000 + b'"'))
    with pytest.raises(RecordError, match=rf"{named} .* at most (that|1000)\."):
        read_all(path)


@ANY
def test_no_byte_is_read_twice_and_the_first_records_are_read_without_the_rest(tmp_path, monkeypatch, calls_of, compression):
    """A worker reads the units of a compressed file in order. A dry run and the training of a tokenizer read all records."""
    monkeypatch.setattr(inputs, "BLOCK", 2000)
    monkeypatch.setattr(inputs, "_TAIL", 1)
    monkeypatch.setattr(decompression, "BLOCK", 1 << 9)
    data = b"".join(b'{"text": "%d"}\n\n' % number**9 for number in range(5000))
    slices = [data[start : start + 9000] for start in range(0, len(data), 9000)]
    path = written(tmp_path / "a", b"".join(map(COMPRESS[compression], slices)))
    entry, units = units_of(path)
    reads = calls_of(decompression.files, "read_range")
    if compression:
        assert sum(len(list(inputs.read_records(entry, unit))) for unit in units) == 5000 > len(units) > 5
        assert len(reads) == len(set(reads)) == -(-entry.size // decompression.BLOCK)
        reads.clear()
    records = inputs.all_records([[str(path)]])
    found = [next(records), next(records)]
    assert sum(stop - start for _, start, stop in reads) < entry.size / 10
    assert [record[1:] for record in (*found, *records)] == expected_lines(data)
    assert compression or sum(stop - start for _, start, stop in reads) < 1.5 * len(data)


@ANY
def test_opening_shows_progress_while_it_reads_a_file(tmp_path, monkeypatch, compression):
    """Reads from byte 1,000 on wait until progress has been shown."""
    monkeypatch.setattr(decompression, "BLOCK", 100)
    parts = [b"[0", *(b"," + json.dumps(n * 7919).encode() for n in range(400)), b"]"]
    path = written(tmp_path / "a", b"".join(COMPRESS[compression](part) for part in parts))
    shown, read_bytes = threading.Event(), [0]
    read_range = decompression.files.read_range

    def read(path: str, start: int, stop: int) -> bytes:
        assert start < 1000 or shown.wait(60)
        return read_range(path, start, stop)

    def progress(what: str, done: int, total: int) -> None:
        assert what == "Opening the inputs" and total == path.stat().st_size
        assert read_bytes[-1] <= done <= total
        read_bytes.append(done)
        if 0 < done < total:
            shown.set()

    monkeypatch.setattr(decompression.files, "read_range", read)
    inputs.list_inputs([[str(path)]], progress)
    assert shown.is_set() and read_bytes[-1] == path.stat().st_size


def test_a_long_string_is_scanned_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompression, "BLOCK", 100)
    scans = []

    class Token:
        def finditer(self, data: bytes, start: int = 0) -> Any:
            scans.append(len(data) - start)
            return token.finditer(data, start)

    token = text_files._TOKEN
    monkeypatch.setattr(text_files, "_TOKEN", Token())
    read_all(written(tmp_path / "a.json", b'["' + b"x" * 100_000 + b'"]'))
    assert sum(scans) < 500_000
