"""Every record of an ArrayRecord file, and every row of an Arrow file or stream, is read once. Damaged files are refused."""

import base64
import dataclasses
import functools
import gzip
import json
import random
import sys
from pathlib import Path

import pyarrow as arrow
import pytest
from batches import golden_values
from prepared import rejected_of, request_of
from pyarrow import parquet
from record_files import arrow_stream as stream
from record_files import read_all, units_of
from record_files import write_array_record as array_record
from tokenizer_makers import save_sentencepiece

from grain_sft.errors import CorpusFileError, MissingExtraError, RecordError, RemoteTimeoutError
from grain_sft.prepare import dry_run, prepare
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.units import Scanner
from grain_sft.storage import files

EXAMPLES = golden_values("inputs/examples.json")["examples"]
OPTIONS = [
    *("group_size:1", "group_size:3,uncompressed", "group_size:7,brotli:3", "group_size:50,snappy"),
    *("group_size:5,transpose:true", "group_size:4,pad_to_block_boundary:true"),
]


def read(path: Path | str, draw: random.Random | None = None) -> list:
    found = read_all(path, draw)
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    return [raw for _, raw in found]


def texts(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choices("ab \n中é", k=draw.choice((0, 1, 30, 2000, 70_000)))) for _ in range(count)]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_record_is_in_one_unit_with_all_options_of_the_writer(options, tmp_path, many_units, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK", 5000)  # so that some units have several chunks
    draw = random.Random(options)
    expected = [{"text": text} for text in texts(draw, 60)]
    path = array_record(tmp_path / "named.as.it.may.be", [record["text"].encode() for record in expected], options)
    assert read(path, draw) == read(path) == expected
    assert len(units_of(path)[1]) > 1


def test_empty_records_are_read_as_empty_texts(tmp_path, many_units):
    """Riegeli pads a chunk of empty records to one byte for each record."""
    for count, group in ((1, 1), (70_000, 30_000)):
        assert read(array_record(tmp_path / "a", [b""] * count, f"group_size:{group}")) == [{"text": ""}] * count


def test_tf_examples_are_read_as_their_features(tmp_path):
    records = [base64.b64decode(example["record"]) for example in EXAMPLES]
    found = read(array_record(tmp_path / "a.array_record", records))
    # examples.json has every feature but `raw`, because its bytes can't be written as JSON
    assert [record.pop("raw", None) for record in found] == [None, b"\xff\x00"] * 10
    assert found == [example["fields"] for example in EXAMPLES]
    assert read(array_record(tmp_path / "a.array_record", [b"", *records, b""]))[::21] == [{}, {}]  # the first and the last


@pytest.mark.parametrize("place", [1, 150])
def test_a_bad_tf_example_is_an_error_or_is_skipped(place: int, tmp_path: Path) -> None:
    records = [base64.b64decode(example["record"]) for example in EXAMPLES] * 10
    records[place] = b"\xff not an example"
    path = array_record(tmp_path / "a.array_record", records)
    request = request_of(save_sentencepiece(tmp_path), path, shuffle=False)
    with pytest.raises(RecordError, match=rf"a\.array_record:{place + 1}: the record is not a tf\.train\.Example"):
        prepare(request, tmp_path / "out", workers=1)
    assert f"a.array_record:{place + 1}: the record is not" in dry_run(request, 200)
    manifest = prepare(dataclasses.replace(request, on_error="skip"), tmp_path / "skipped", workers=1)
    assert manifest["splits"]["train"]["documents"] == 199
    [rejected] = rejected_of(tmp_path / "skipped")
    assert rejected["line"] == place + 1 and base64.b64decode(rejected["record_base64"]) == records[place]


def test_json_objects_are_read_without_parsing_even_if_some_are_damaged(tmp_path):
    records = [b"{", *(json.dumps({"text": f"{n} é"}).encode() for n in range(150)), b"{"]
    assert read(array_record(tmp_path / "a", records)) == records


def test_records_are_texts_unless_most_of_the_first_ones_are_json_objects_or_tf_examples(tmp_path):
    mixed = [b"", b'{"text": "a program"}', b'{"a": 1}', b"\n\x05hello", b"[1]", b"{x}", EXAMPLES[0]["record"].encode()]
    expected = [{"text": record.decode()} for record in mixed]
    assert read(array_record(tmp_path / "a", mixed)) == expected
    assert read(array_record(tmp_path / "a", mixed[3:4])) == expected[3:4]  # it begins like a tf.train.Example
    assert read(array_record(tmp_path / "a", [b"a", b"\xff"])) == [{"text": "a"}, {"text": b"\xff"}]


def test_an_empty_file_and_two_files_in_one_are_refused(tmp_path):
    path = array_record(tmp_path / "a.array_record", [b"one record %d" % n for n in range(50)])
    for data in (b"", path.read_bytes() * 2):  # the joined file ends with the offsets of only one copy
        path.write_bytes(data)
        with pytest.raises(CorpusFileError, match=r"a\.array_record: (byte \d+: |ends without)"):
            read(path)


def test_a_file_in_a_bucket_may_be_replaced_by_one_of_equal_size(client, tmp_path):
    """Both files have the same size, a multiple of 64 KiB. The cached footer of the first must not be used for the second."""
    url = "gs://bucket/replaced.array_record"
    for count, group in ((6, 2), (9, 3)):
        records = [f"{count} {number}".encode() for number in range(count)]
        client.pipe_file(url, array_record(tmp_path / "a", records, f"group_size:{group},uncompressed").read_bytes())
        assert read(url) == [{"text": record.decode()} for record in records]


def test_only_the_chunks_of_a_unit_are_read_from_a_file_in_a_bucket(client, tmp_path, many_units, calls_of):
    expected = [{"text": text} for text in texts(random.Random(4), 60)]
    path = array_record(tmp_path / "a", [record["text"].encode() for record in expected], "group_size:2,uncompressed")
    url = "gs://bucket/some.array_record-00000-of-00001"
    client.pipe_file(url, path.read_bytes())
    assert read(url) == expected
    entry, units = units_of(url)
    reads = calls_of(files, "read_range")
    begin = units[1].first - 1
    assert [raw for _, raw in inputs.read_records(entry, units[1])] == expected[begin : begin + units[1].records]
    assert sum(stop - start for _, start, stop in reads) == units[1].size < entry.size / 5


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
    assert read_all(path, draw) == read_all(path) == list(enumerate(rows, 1))
    assert len(units_of(path)[1]) > 5
    path.write_bytes(make(rows, batch=1000))
    assert read_all(path) == list(enumerate(rows, 1))


@pytest.mark.parametrize("changing", [False, True], ids=["one dictionary", "dictionaries that change"])
def test_columns_with_dictionaries_are_read(changing, tmp_path, many_units):
    words = [[f"{part if changing else 0} {n % 5}" for n in range(20)] for part in range(30)]
    batches = [arrow.record_batch({"text": arrow.array(each).dictionary_encode()}) for each in words]
    path = str(tmp_path / "a.arrow")
    write(path, arrow.Table.from_batches(batches))
    assert [raw["text"] for _, raw in read_all(path)] == [word for each in words for word in each]
    assert (len(units_of(path)[1]) == 1) == changing  # a file whose dictionaries change is one unit
    for number in (0, 1):  # the first batch, which comes after the dictionary, is empty
        write(path, arrow.Table.from_batches([batches[0][:0], *batches[:number]]))
        assert [raw["text"] for _, raw in read_all(path)] == words[0][: 20 * number]


def test_a_map_becomes_an_object(tmp_path):
    column = arrow.array([[("city", "Paris")], [], None], arrow.map_(arrow.string(), arrow.string()))
    table = arrow.table({"call": arrow.StructArray.from_arrays([column], ["arguments"])})
    parquet.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "a.arrow", table)
    for name in ("a.parquet", "a.arrow"):
        expected = [{"arguments": {"city": "Paris"}}, {"arguments": {}}, {}]
        assert [raw["call"] for _, raw in read_all(tmp_path / name)] == expected


def test_a_file_that_replaces_another_is_read_with_its_own_dictionary(tmp_path, many_units):
    """Both files have the same size."""
    path = str(tmp_path / "a.arrow")
    for words in (["cat", "dog"] * 50, ["dog", "cat"] * 50):
        write(path, arrow.table({"text": arrow.array(words).dictionary_encode()}), max_chunksize=10)
        assert len(units_of(path)[1]) > 2
        assert [raw["text"] for _, raw in read_all(path)] == words


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
                read_all(tmp_path / name)


@pytest.mark.parametrize("make", [stream, file])
def test_a_wrong_end_of_a_file_is_an_error(make, tmp_path):
    path, whole = tmp_path / "a.arrow", make(rows_of(40))
    batches = whole[: whole.rindex(b"\xff\xff\xff\xff\0\0\0\0")]
    cut = [(batches, "end-of-stream marker"), (whole[:-1], "end-of-stream marker|not a message")]
    for data, expected in (*cut, (whole + b"\0", "not a message of Arrow"), (whole * 2, "not a message of Arrow")):
        path.write_bytes(data)
        with pytest.raises(CorpusFileError, match=rf"^{path}: .*({expected})"):
            read_all(path)


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
        read_all(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"reading Arrow needs pyarrow.*parquet"):
        read_all(path)
