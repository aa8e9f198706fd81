"""Each row of an Arrow file or stream is read as one record. The error of a damaged file states the file's path."""

import functools
import gzip
import random
import sys
from pathlib import Path

import pyarrow as arrow
import pytest
from batches import golden_values
from pyarrow import parquet
from record_files import arrow_stream as stream
from record_files import read_all as read
from record_files import units_of

from grain_sft.errors import CorpusFileError, MissingExtraError, RemoteTimeoutError
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.units import Scanner

GOLDEN = Path(__file__).parents[2] / "golden/inputs"


def rows_of(count: int) -> list[dict]:
    texts = ("", "é中\U0001f600", '{"text": 1}', "two\nlines")
    return [{"text": texts[n % 4] + str(n), "n": n, "tags": ["a"] * (n % 3)} for n in range(count)]


def write(path, table, **options):
    with arrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, **options)


file = functools.partial(stream, new="new_file")


@pytest.mark.parametrize(("folder", "name"), [("saved/train", "train"), ("saved/test", "test"), ("chosen", "chosen")])
def test_the_rows_of_a_dataset_saved_by_hugging_face_datasets_are_read(folder, name):
    rows = golden_values("inputs/rows.json")[name]
    expected = [{key: value for key, value in row.items() if value is not None} for row in rows]
    assert [raw for _, _, raw in inputs.all_records([[str(GOLDEN / folder)]])] == expected


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"compression": "lz4"}], ids=str)
@pytest.mark.parametrize("make", [stream, file])
def test_every_row_is_one_record_in_one_unit(make, options, tmp_path, many_units):
    draw, rows = random.Random(1), rows_of(100)
    path = tmp_path / "named.as.it.may.be"
    path.write_bytes(make(rows, **options))
    assert read(path, draw) == read(path) == list(enumerate(rows, 1))
    assert len(units_of(path)[1]) > 5
    path.write_bytes(make(rows, batch=1000))
    assert read(path) == list(enumerate(rows, 1))


@pytest.mark.parametrize("changing", [False, True], ids=["one dictionary", "dictionaries that change"])
def test_columns_with_dictionaries_are_read(changing, tmp_path, many_units):
    words = [[f"{part if changing else 0} {n % 5}" for n in range(20)] for part in range(30)]
    batches = [arrow.record_batch({"text": arrow.array(each).dictionary_encode()}) for each in words]
    path = str(tmp_path / "a.arrow")
    write(path, arrow.Table.from_batches(batches))
    assert [raw["text"] for _, raw in read(path)] == [word for each in words for word in each]
    assert (len(units_of(path)[1]) == 1) == changing  # a file whose dictionaries change is one unit
    write(path, arrow.Table.from_batches([batch[:0] for batch in batches]))
    assert not read(path)


def test_a_map_becomes_an_object(tmp_path):
    column = arrow.array([[("city", "Paris")], [], None], arrow.map_(arrow.string(), arrow.string()))
    table = arrow.table({"call": arrow.StructArray.from_arrays([column], ["arguments"])})
    parquet.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "a.arrow", table)
    for name in ("a.parquet", "a.arrow"):
        expected = [{"arguments": {"city": "Paris"}}, {"arguments": {}}, {}]
        assert [raw["call"] for _, raw in read(tmp_path / name)] == expected


def test_a_file_that_replaces_another_is_read_with_its_own_dictionary(tmp_path, many_units):
    """Both files have the same size."""
    path = str(tmp_path / "a.arrow")
    for words in (["cat", "dog"] * 50, ["dog", "cat"] * 50):
        write(path, arrow.table({"text": arrow.array(words).dictionary_encode()}), max_chunksize=10)
        assert len(units_of(path)[1]) > 2
        assert [raw["text"] for _, raw in read(path)] == words


def test_rows_that_cannot_become_records_are_an_error(tmp_path):
    for columns, names, message in (
        ([["a"], arrow.array([10**7], arrow.int32()).cast(arrow.date32())], ["text", "date"], "date value out of range"),
        ([["a"], arrow.array([1], arrow.timestamp("s", "Mars/Olympus"))], ["text", "time"], "Mars/Olympus"),
        ([["a"], ["b"]], ["text", "text"], "two columns have the same name"),
    ):
        table = arrow.table(columns, names)
        parquet.write_table(table, tmp_path / "a.parquet")
        write(tmp_path / "a.arrow", table)
        for name in ("a.parquet", "a.arrow"):
            with pytest.raises(CorpusFileError, match=rf"{name}: .*can't be read.*{message}"):
                read(tmp_path / name)


@pytest.mark.parametrize("make", [stream, file])
def test_a_wrong_end_of_a_file_is_an_error(make, tmp_path):
    path, whole = tmp_path / "a.arrow", make(rows_of(40))
    batches = whole[: whole.rindex(b"\xff\xff\xff\xff\0\0\0\0")]
    cut = [(batches, "end-of-stream marker"), (whole[:-1], "end-of-stream marker|not a message")]
    for data, expected in (*cut, (whole + b"\0", "not a message of Arrow"), (whole * 2, "not a message of Arrow")):
        path.write_bytes(data)
        with pytest.raises(CorpusFileError, match=rf"^{path}: .*({expected})"):
            read(path)


def test_a_failing_read_is_not_called_a_damaged_file(tmp_path, monkeypatch):
    path = tmp_path / "a.arrow"
    path.write_bytes(stream(rows_of(40)))

    def take(self: Scanner, count: int) -> bytes:
        raise RemoteTimeoutError("gs://b/a.arrow: no answer in 120 s")

    monkeypatch.setattr(Scanner, "take", take)
    with pytest.raises(RemoteTimeoutError, match=r"^gs://b/a\.arrow: no answer"):
        inputs.list_inputs([[str(path)]])


def test_a_compressed_file_is_refused_and_a_missing_pyarrow_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.arrow"
    path.write_bytes(gzip.compress(stream(rows_of(3))))
    with pytest.raises(CorpusFileError, match="byte 0: not a message of Arrow"):
        read(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"reading Arrow needs pyarrow.*parquet"):
        read(path)
