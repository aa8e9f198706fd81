"""Units: every record once, with its line, wherever files are cut."""

from __future__ import annotations

import bz2
import json
import lzma
import random
from pathlib import Path

import pytest

from grain_sft.errors import CorpusFileError, PrepareError, RecordError
from grain_sft.prepare.records import inputs


def read_all(path: Path) -> list[tuple[int, bytes]]:
    return [(number, raw) for _, number, raw in inputs.all_records(inputs.list_inputs([[str(path)]]))]


def expected(data: bytes) -> list[tuple[int, bytes]]:
    lines = data.split(b"\n")
    return [(number, line.rstrip(b"\r")) for number, line in enumerate(lines, 1) if line.strip()]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_every_line_is_in_one_unit(tmp_path, monkeypatch, block):
    monkeypatch.setattr(inputs, "BLOCK", block)
    monkeypatch.setattr(inputs, "MANY_BLOCKS", 5)
    draw = random.Random(block)
    for case in range(60):
        parts = draw.choices([b"a", b"bc", b"\n", b"\n\n", b"\r\n", b"x" * 20], k=draw.randrange(40))
        data = b"".join(parts)
        path = tmp_path / f"{case}.jsonl"
        path.write_bytes(data)
        assert read_all(path) == expected(data)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf{}\n[]")
    assert read_all(tmp_path / "a.jsonl") == [(1, b"{}"), (2, b"[]")]


def test_the_digest_is_of_the_bytes_and_not_of_the_cuts(tmp_path):
    for name, text in (("a", "1\n2\n"), ("b", "1\n2\n"), ("c", "1\n3\n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    found = {}
    for name in "abc":
        entries = inputs.list_inputs([[str(tmp_path / f"{name}.jsonl")]])
        units = inputs.plan_units(entries)
        found[name] = inputs.digests(units, [inputs.scan_unit(entries[0], unit) for unit in units], entries)
    assert found["a"] == found["b"] != found["c"]


def test_directories_and_globs_are_sorted(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}\n")
    for where in (str(tmp_path), str(tmp_path / "*.jsonl")):
        assert [Path(entry.path).name for entry in inputs.list_inputs([[where]])] == ["a.jsonl", "b.jsonl"]


def test_parquet_rows_are_records(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": [{"role": "user", "content": str(number)}], "name": None} for number in range(10)]
    rows[3]["messages"][0]["weight"] = 0.5  # type: ignore[index]
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=4)
    found = read_all(path)
    assert [line for line, _ in found] == list(range(1, 11))
    assert found[0][1] == {"messages": [{"role": "user", "content": "0"}]}
    assert json.loads(json.dumps(found[3][1])) == {"messages": [{"role": "user", "content": "3", "weight": 0.5}]}


def test_what_cannot_be_read_is_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(CorpusFileError, match="no such file"):
        inputs.list_inputs([[str(tmp_path / "none.jsonl")]])
    with pytest.raises(CorpusFileError, match="names no file"):
        inputs.list_inputs([[str(tmp_path / "*.jsonl")]])
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(CorpusFileError, match="is empty, so it is not a compressed file"):
        inputs.list_inputs([[str(tmp_path / "a.jsonl.gz")]])
    for name, compress, command in (("a.bz2", bz2.compress, "bunzip2 -k"), ("a.xz", lzma.compress, "unxz -k")):
        (tmp_path / name).write_bytes(compress(b"{}"))
        with pytest.raises(PrepareError, match=f"Decompress it: {command} {tmp_path}/{name}"):
            inputs.list_inputs([[str(tmp_path / name)]])
    monkeypatch.setattr(inputs, "MAX_LINE", 10)
    (tmp_path / "long.jsonl").write_bytes(b"1\n" + b"x" * 50)
    with pytest.raises(RecordError, match=r"long.jsonl:2: a line of 50 bytes"):
        read_all(tmp_path / "long.jsonl")
