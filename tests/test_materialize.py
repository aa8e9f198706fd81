"""Rows that were written out are the packed rows, whole or not there, and taken up where they were cut off."""

import dataclasses
import gzip
import json
import os
import pickle
import shutil
import types

import numpy as np
import pytest
from batches import assert_same
from sft_files import documents, write_episodes, write_primer, write_sources

import grain_sft
from grain_sft import (
    Host,
    IndexSampler,
    NpyDataSource,
    PackedLayout,
    PaddedLayout,
    Pipeline,
    ShiftTargets,
    WindowLayout,
)
from grain_sft.cli.main import main
from grain_sft.corpus import shard as row_format
from grain_sft.errors import CorpusError, CorpusFileError, LayoutError
from grain_sft.layout import FILL_ROW, MaterializedLayout, documents_of_record, numbers_in
from grain_sft.prepare.materialize import materialize
from grain_sft.provenance import trace
from grain_sft.replay.learning_rate import supervised_ratio
from grain_sft.source.segment_reader import SegmentReader

LENGTH = 64
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def layout(tmp_path):
    folder = write_episodes(tmp_path / "chats", documents(120, longest=90), shards=3)
    return PackedLayout(grain_sft.open_corpus(folder), LENGTH)


@pytest.fixture
def written(tmp_path, layout):
    """The folder of the rows of `layout`, in many files."""
    materialize(layout, tmp_path / "rows", shard_bytes=1 << 10)
    return tmp_path / "rows"


def opened(folder):
    return NpyDataSource(MaterializedLayout(grain_sft.open_corpus(folder)))


def same_rows(found, expected):
    assert len(found) == len(expected)
    rows = np.random.default_rng(0).permutation(len(expected))
    assert_same(found.read(rows), expected.read(rows))
    rows[::3] = FILL_ROW
    assert_same(found.read(rows), expected.read(rows))
    assert {key: array.shape for key, array in found.read([]).items()} == dict.fromkeys(
        found.read([0]), (0, expected.layout.sequence_length)
    )
    for row in (0, len(expected) // 2, len(expected) - 1):
        assert_same(found[row], expected[row])


def make(tmp_path, kind):
    docs = documents(120, longest=90, weights=kind == "weights")
    if kind == "primer":
        return grain_sft.open_corpus(write_primer(tmp_path / kind, docs))
    if kind == "plain":
        np.concatenate([tokens for tokens, _ in docs]).tofile(tmp_path / "plain.npy")
        return grain_sft.open_corpus(tmp_path / "plain.npy", eos_token_id=2)
    dtype = "uint16" if kind == "uint16" else "uint32"
    return grain_sft.open_corpus(write_episodes(tmp_path / kind, docs, shards=3, gap=2, dtype=dtype))


KINDS = ["masks", "uint16", "weights", "primer", "plain"]
TWO_EPOCHS = {"algorithm": "shuffled_best_fit", "seed": 3, "epochs": 2}


def written_and_opened(layout, folder, shard_bytes):
    """Yield the source of the rows of `layout` in one file and in many, and its manifest."""
    for name, most in (("one", 1 << 30), ("many", shard_bytes)):
        manifest = materialize(layout, folder / name, shard_bytes=most)
        found = opened(folder / name)
        assert (len(manifest["rows_of_shards"]) > 1) == (name == "many")
        assert found.layout.corpus.fingerprint == manifest["fingerprint"]
        same_rows(found, NpyDataSource(layout))
        same_rows(pickle.loads(pickle.dumps(found)), NpyDataSource(layout))
        yield found, manifest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {**TWO_EPOCHS, "long_documents": "fragment"}, {"algorithm": "concat_then_split"}],
    ids=lambda options: options.get("algorithm", "best_fit_decreasing"),
)
def test_written_rows_are_the_packed_rows(tmp_path, kind, options):
    assert list(written_and_opened(PackedLayout(make(tmp_path, kind), LENGTH, **options), tmp_path, 1 << 10))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, TWO_EPOCHS], ids=["one epoch", "two epochs"])
def test_rows_that_say_where_their_segments_end_are_the_packed_rows(tmp_path, monkeypatch, kind, options):
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1)
    layout = PackedLayout(make(tmp_path, kind), 8 * LENGTH - 1, **options)
    expected, shift = NpyDataSource(layout), ShiftTargets()
    assert layout.statistics["padding"]
    for found, manifest in written_and_opened(layout, tmp_path, 1 << 13):
        assert manifest["most_segments"] == layout.statistics["max_segments"] and not manifest["positions_dtype"]
        assert bool(manifest["segments_dtype"]) == (kind != "plain")
        same_rows(NpyDataSource(found.layout, max_open_files=1), expected)  # of several files, none is read at once
        for count in (1, 2, 5):
            rows = np.random.default_rng(count).integers(0, len(expected), count)
            assert_same(shift.read(found, rows), ShiftTargets().map(expected.read(rows)))


@pytest.mark.parametrize("count", [1 << 20, -1, -(1 << 62)])
def test_segments_that_end_nowhere_in_their_row_are_an_error(tmp_path, monkeypatch, count):
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1)
    materialize(PackedLayout(make(tmp_path, "plain"), 8 * LENGTH), tmp_path / "rows")
    source, preadv = opened(tmp_path / "rows"), os.preadv

    def damaged(fd, buffers, offset):
        done = preadv(fd, buffers, offset)
        buffers[-1][:8] = count.to_bytes(8, "little", signed=True)
        return done

    monkeypatch.setattr(os, "preadv", damaged)
    with pytest.raises(CorpusError, match=r"rows: a row whose segments end nowhere in it.*write the rows again"):
        ShiftTargets().read(source, np.array([0, 1]))


def test_the_written_corpus_is_one_of_the_segments_as_documents(written, layout):
    corpus = grain_sft.open_corpus(written, format="rows")
    rows = MaterializedLayout(corpus)
    pairs = [pair for row in range(len(layout)) for pair in zip(rows.spans(row), layout.spans(row), strict=True)]
    for number, (found, span) in enumerate(pairs):
        assert found.document == number and found.stop - found.start == span.stop - span.start
        mine, original = corpus.document(number), layout.corpus.document(span.document)
        np.testing.assert_array_equal(mine.tokens, original.tokens[:LENGTH])
        np.testing.assert_array_equal(mine.loss, original.loss[:LENGTH])
    assert len(pairs) == corpus.num_documents == len(list(corpus.iter_documents()))
    assert 0 < supervised_ratio(corpus) < 1
    np.testing.assert_array_equal(
        NpyDataSource(WindowLayout(corpus, LENGTH)).read([1, 5])["tokens"], NpyDataSource(layout).read([1, 5])["tokens"]
    )


def test_tokens_of_written_rows_are_read_as_those_of_any_corpus(written, layout):
    corpus = grain_sft.open_corpus(written)
    rows = NpyDataSource(layout).read(range(len(layout)))
    tokens, loss = rows["tokens"].reshape(-1), rows["loss_mask"].reshape(-1)
    random = np.random.default_rng(0)
    for start in (0, 1, LENGTH - 1, LENGTH, *random.integers(0, len(tokens), 30).tolist()):
        for count in (0, 1, 7, LENGTH, 5 * LENGTH + 3):
            count = min(count, len(tokens) - start)
            found = corpus.read(start, start + count)
            np.testing.assert_array_equal(found[0], tokens[start : start + count])
            np.testing.assert_array_equal(found[1], loss[start : start + count])
    windows = NpyDataSource(WindowLayout(corpus, 96))  # a window begins in one row and ends in the next
    for row in range(len(windows)):
        (span,) = windows.layout.spans(row)
        begin = span.start + sum(each.num_tokens for each in corpus.shards[: span.shard])
        np.testing.assert_array_equal(windows[row]["tokens"], tokens[begin : begin + 96])
    again = PackedLayout(corpus, 200, long_documents="fragment")
    for lengths in (1, 1 << 30):  # row by row, and all pieces at once
        source = NpyDataSource(again)
        source._segment_reader = SegmentReader(again, source._reader, False) if lengths == 1 else None
        for row in range(0, len(again), 3):
            expected = np.concatenate([corpus.document(span.document).tokens for span in again.spans(row)])
            np.testing.assert_array_equal(source[row]["tokens"][: len(expected)], expected)


def test_reading_written_rows_does_not_ask_where_documents_are(written, layout):
    source = opened(written)
    ShiftTargets().read(source, np.arange(3))
    source.read([0])
    assert "documents" not in vars(source.layout.corpus)
    assert len(source.layout.corpus.documents.start) and "documents" in vars(source.layout.corpus)


def test_a_batch_opens_no_more_files_than_it_may(written, layout, monkeypatch):
    found = MaterializedLayout(grain_sft.open_corpus(written))
    assert len(found.corpus.shards) > 20
    seen, preadv = [], os.preadv

    def counting(fd, *arguments):
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        seen.append(sum(os.path.exists(each) and f"{written}/rows_" in os.readlink(each) for each in links))
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", counting)
    source, expected = NpyDataSource(found, max_open_files=4), NpyDataSource(layout)
    rows = np.arange(len(layout))
    assert_same(ShiftTargets().read(source, rows), ShiftTargets().read(expected, rows))
    few = rows[: 3 * (len(rows) // len(found.corpus.shards))]
    assert_same(ShiftTargets().read(source, few), ShiftTargets().read(expected, few))
    assert 0 < max(seen) <= 2 * 4


@pytest.mark.parametrize("kind", ["masks", "uint16", "weights"])
def test_rows_in_a_bucket_are_those_of_a_folder(tmp_path, client, monkeypatch, kind):
    expected = NpyDataSource(PackedLayout(make(tmp_path, kind), LENGTH))
    places = (tmp_path / "rows", f"gs://bucket/{kind}-rows")
    for where in places:
        materialize(expected.layout, where, shard_bytes=1 << 13)
    here, there = map(grain_sft.open_corpus, places)
    assert here.fingerprint == there.fingerprint
    found = NpyDataSource(MaterializedLayout(there))
    same_rows(found, expected)
    rows = np.arange(len(expected))[::-3]
    assert_same(ShiftTargets().read(found, rows), ShiftTargets().read(expected, rows))
    np.testing.assert_array_equal(there.read(40, 140)[0], here.read(40, 140)[0])
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1)  # row by row
    again = [NpyDataSource(PackedLayout(corpus, 200)) for corpus in (here, there)]
    assert all(source._segment_reader is not None for source in again)
    assert_same(ShiftTargets().read(again[0], np.arange(5)), ShiftTargets().read(again[1], np.arange(5)))


def test_pieces_are_what_the_fast_path_reads(written, layout):
    fast, slow = opened(written), opened(written)
    slow._ready = None
    same_rows(slow, fast)
    same_rows(NpyDataSource(fast.layout, max_open_files=1), fast)  # no file may be mapped


def test_sources_of_documents_are_written_too(tmp_path):
    docs = documents(30)
    folder = write_primer(tmp_path / "primer", docs)
    write_sources(folder / "train_sources.bin", docs)
    layout = PackedLayout(grain_sft.open_corpus(folder), LENGTH)
    materialize(layout, tmp_path / "rows")
    corpus = grain_sft.open_corpus(tmp_path / "rows")
    numbers = [span.document for row in range(len(layout)) for span in layout.spans(row)]
    np.testing.assert_array_equal(corpus.sources, layout.corpus.sources[numbers])


def test_documents_found_by_eos_alone_come_from_where_their_first_token_does(tmp_path):
    """The first document was cut, so that the one after it begins before an EOS; the third holds one."""
    folder = tmp_path / "chats"
    folder.mkdir()
    np.array([5, 6, 7, 8, 8, 0, 9, 0, 4, 0], np.uint16).tofile(folder / "token_ids_part_0000.npy")
    np.ones(10, np.bool_).tofile(folder / "labels_mask_part_0000.npy")
    with gzip.open(folder / "token_ids_part_0000.csv.gz", "wt") as file:
        file.write("0,3\n3,6\n6,10\n")
    np.array([[0, 10], [0, 20], [0, 30]], "<i8").tofile(folder / "sources.bin")
    corpus = grain_sft.open_corpus(folder, format="olmo", dtype="uint16", eos_token_id=0)
    layout = PackedLayout(corpus, 6, algorithm="concat_then_split", boundaries="eos")
    expected = [([5, 6, 7, 8, 8, 0], 10), ([9, 0], 30), ([4, 0], 30)]
    materialize(layout, tmp_path / "rows")
    rows = grain_sft.open_corpus(tmp_path / "rows")
    assert [(each.tokens.tolist(), each.source[1]) for each in rows.iter_documents()] == expected
    sampler = IndexSampler(len(layout), global_batch_size=1, seed=0, order="sequential", epochs=1)
    found = trace(Pipeline(NpyDataSource(layout), sampler, [ShiftTargets()]), range(len(layout)))
    assert found.record.tolist() == [record for _, record in expected]
    numbers = [numbers_in(layout, documents_of_record(corpus, record)).tolist() for record in ("10", "20", "30", "40")]
    assert numbers == [[0], [0], [1, 2], []]
    same = PackedLayout(corpus, 6, boundaries="auto")
    assert same.documents is corpus.documents and same.sources.tolist() == corpus.sources.tolist()


def test_a_pipeline_over_written_rows_gives_the_same_batches_in_workers_too(written, layout):
    sampler = IndexSampler(len(layout), global_batch_size=4, seed=1, epochs=1, host=Host(0, 1))
    expected, found = (
        Pipeline(source, sampler, [ShiftTargets()]) for source in (NpyDataSource(layout), opened(written))
    )
    for step, batch in enumerate(found.iter(worker_count=1)):
        assert_same(batch, expected[step])
    config = {
        "corpus": {"path": str(written)},
        "layout": {"kind": "materialized", "sequence_length": LENGTH},
        "sampler": {"seed": 1, "epochs": 1, "global_batch_size": 4},
    }
    assert_same(grain_sft.load(config, host=Host(0, 1))[2], expected[2])
    config["layout"]["sequence_length"] = 32
    with pytest.raises(LayoutError, match="sequence_length=32: the rows were written with 64"):
        grain_sft.load(config, host=Host(0, 1))


def test_what_was_cut_off_is_not_there_and_goes_on_where_it_was(tmp_path, layout, monkeypatch):
    whole = materialize(layout, tmp_path / "whole", shard_bytes=1 << 10)
    calls = []
    read = NpyDataSource.read

    def fails(self, rows):
        calls.append(rows)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(self, rows)

    monkeypatch.setattr(NpyDataSource, "read", fails)
    with pytest.raises(KeyboardInterrupt):
        materialize(layout, tmp_path / "rows", shard_bytes=1 << 10)
    assert not (tmp_path / "rows").exists()
    for _ in range(2):
        assert materialize(layout, tmp_path / "rows", shard_bytes=1 << 10) == whole
        assert len(calls) == 4 + len(whole["rows_of_shards"]) - 3
    assert sorted(os.listdir(tmp_path / "rows")) == sorted(os.listdir(tmp_path / "whole"))
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "rows" / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "chats", "whole", "rows"}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_unfinished_rows_of_something_else_are_begun_anew(tmp_path, layout, monkeypatch, named):
    other = PackedLayout(layout.corpus, LENGTH, max_segments=2)
    materialize(other, tmp_path / "other", shard_bytes=1 << 10)
    made = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(NpyDataSource, "read", lambda self, rows: 1 / 0)
        materialize(other, tmp_path / "rows", shard_bytes=1 << 10)
    (work,) = [path for path in tmp_path.iterdir() if path.name not in made]
    shutil.copytree(tmp_path / "other", work / "corpus", dirs_exist_ok=True)
    if not named:
        (work / "identity.json").unlink()
    materialize(layout, tmp_path / "rows", shard_bytes=1 << 10)
    same_rows(opened(tmp_path / "rows"), NpyDataSource(layout))


def test_replaced_rows_are_noticed_whether_or_not_the_eos_is_given(tmp_path, layout):
    eos = materialize(layout, tmp_path / "rows", shard_bytes=1 << 12)["eos_token_id"]
    first, second, other = (tmp_path / "rows" / f"{name}.bin" for name in ("rows_0000", "rows_0001", "other"))
    for path, name in ((first, other), (second, first), (other, second)):
        path.rename(name)
    for options in ({}, {"eos_token_id": eos}):
        with pytest.raises(CorpusError, match="A file was replaced"):
            grain_sft.open_corpus(tmp_path / "rows", **options)


def test_only_packed_rows_are_written_out_and_where_nothing_else_is(tmp_path, layout):
    with pytest.raises(LayoutError, match=r"PaddedLayout\(.*only a PackedLayout's rows can be written out"):
        materialize(PaddedLayout(layout.corpus, LENGTH), tmp_path / "rows")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(LayoutError, match=r"is not empty, and holds no rows\.json"):
        materialize(layout, tmp_path / "full")
    materialize(layout, tmp_path / "rows")
    padded = dataclasses.replace(layout.corpus, pad_token_id=layout.corpus.padding_token_id + 1)
    for other in (PackedLayout(layout.corpus, LENGTH, max_segments=2), PackedLayout(padded, LENGTH)):
        with pytest.raises(LayoutError, match="holds other rows"):
            materialize(other, tmp_path / "rows")
    with pytest.raises(LayoutError, match="a corpus without rows"):
        MaterializedLayout(layout.corpus)
    with pytest.raises(CorpusError, match="need no index"):
        grain_sft.open_corpus(tmp_path / "rows").save(tmp_path / "index.json")


@pytest.mark.parametrize("name", ["rows_0001.bin", "loss_0001.bin", "documents_0001.idx"])
def test_files_that_are_missing_cut_short_or_replaced_are_errors(written, layout, name):
    path, source = written / name, opened(written)
    data = path.read_bytes()
    for changed in (data[:-16], bytes([data[0] ^ 1]) + data[1:], None):
        path.unlink() if changed is None else path.write_bytes(changed)
        with pytest.raises((CorpusError, CorpusFileError), match=name if changed is None else "rows"):
            grain_sft.open_corpus(written)
        with pytest.raises(
            LayoutError, match=r"rows: holds these rows, but they are damaged.*Remove the folder, and write"
        ):
            materialize(layout, written, shard_bytes=1 << 10)
    if name.endswith(".bin"):
        path.write_bytes(data[:-16])
        with pytest.raises(CorpusFileError, match=name):
            source.read(range(len(source)))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("version", [1]),
        ("format", ["x"]),
        ("sequence_length", [32, "64"]),
        ("rows_of_shards", [[], [0], ["x"]]),
        ("dtype", ["int8"]),
        ("segments_dtype", ["int8", None]),
        ("most_segments", [3, -1]),
        ("loss", ["labels"]),
        ("made_of", [None]),
        ("fingerprint", ["sha256:0"]),
    ],
)
def test_a_garbled_manifest_is_an_error_that_names_it(written, key, values):
    path = written / "rows.json"
    manifest = json.loads(path.read_text())
    for value in values:
        path.write_text(json.dumps({**manifest, key: value}))
        with pytest.raises(CorpusError, match="rows"):
            grain_sft.open_corpus(written)


@pytest.mark.parametrize(("long_segment", "positions_dtype"), [(row_format.LONG_SEGMENT, ""), (1 << 30, "uint32")])
def test_rows_longer_than_uint16_counts(tmp_path, monkeypatch, long_segment, positions_dtype):
    monkeypatch.setattr(row_format, "LONG_SEGMENT", long_segment)
    length = (1 << 16) + 1
    docs = [(np.arange(size, dtype=np.uint32) % 100 + 3, np.ones(size, bool)) for size in (length, 70_000, 100, 7)]
    expected = NpyDataSource(PackedLayout(grain_sft.open_corpus(write_episodes(tmp_path / "long", docs)), length))
    written = materialize(expected.layout, tmp_path / "rows")
    assert (written["positions_dtype"], written["most_segments"]) == (positions_dtype, 0 if positions_dtype else 2)
    same_rows(opened(tmp_path / "rows"), expected)


def test_pack_materializes(tmp_path, layout, capsys):
    arguments = ["pack", str(tmp_path / "chats"), "--sequence-length", str(LENGTH)]
    out = ["--materialize", str(tmp_path / "rows"), "--output", str(tmp_path / "figures.json")]
    assert main([*arguments, "--algorithm", "best_fit_decreasing", *out]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert f"rows written  {tmp_path / 'rows'}" in capsys.readouterr().out
    assert figures["materialized"]["rows"] == len(layout)
    same_rows(opened(tmp_path / "rows"), NpyDataSource(layout))
    with pytest.raises(SystemExit):
        main([*arguments, "--materialize", str(tmp_path / "other")])


def test_too_little_space_is_said_before_anything_is_written(tmp_path, layout, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=10))
    with pytest.raises(grain_sft.GrainSftError, match="GB free, but the rows take"):
        materialize(layout, tmp_path / "rows")
