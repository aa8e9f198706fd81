"""`materialize` writes packed rows to files, which a layout reads. The files are also a corpus of the rows' segments."""

import gzip
import os
import pickle

import numpy as np
import pytest
from batches import assert_same, load, open_files, pipeline_of, sections
from sft_files import documents, write_episodes, write_primer, write_sources

from grain_sft import NpyDataSource, PackedLayout, ShiftTargets, WindowLayout, open_corpus
from grain_sft.corpus import row_format
from grain_sft.errors import CorpusError, LayoutError
from grain_sft.layout import FILL_ROW, MaterializedLayout, OlmoVslLayout, documents_of_record, numbers_in
from grain_sft.prepare.materialize import materialize
from grain_sft.provenance import trace
from grain_sft.replay.learning_rate import supervised_ratio
from grain_sft.source.segment_reader import SegmentReader

LENGTH = 64
pytestmark = pytest.mark.usefixtures("own_cache")
pytest_plugins = ["written_rows"]  # the fixtures `layout` and `written`


def opened(folder):
    return NpyDataSource(MaterializedLayout(open_corpus(folder)))


def assert_same_rows(found, expected):
    assert len(found) == len(expected)
    rows = np.random.default_rng(0).permutation(len(expected))
    assert_same(found.read(rows), expected.read(rows))
    rows[::3] = FILL_ROW
    assert_same(found.read(rows), expected.read(rows))
    assert all(array.shape == (0, expected.layout.sequence_length) for array in found.read([]).values())
    for row in (0, len(expected) // 2, len(expected) - 1):
        assert_same(found[row], expected[row])


def make(tmp_path, kind):
    """Return a corpus of `kind`, one of `KINDS`."""
    docs = documents(120, longest=90, weights=kind == "weights")
    if kind == "primer":
        return open_corpus(write_primer(tmp_path / kind, docs))
    if kind == "plain":
        np.concatenate([tokens for tokens, _ in docs]).tofile(tmp_path / "plain.npy")
        return open_corpus(tmp_path / "plain.npy", eos_token_id=2)
    dtype = "uint16" if kind == "uint16" else "uint32"
    return open_corpus(write_episodes(tmp_path / kind, docs, shards=3, gap=2, dtype=dtype))


KINDS = ["masks", "uint16", "weights", "primer", "plain"]
TWO_EPOCHS = {"algorithm": "shuffled_best_fit", "seed": 3, "epochs": 2}


def written_and_opened(layout, folder, shard_bytes):
    """Write the rows of `layout` to one file, then to many files. Yield pairs (source of the written rows, manifest).

    Each time, there are three sources: as opened, from a pickle, and with at most one open file, so that no file is mapped.
    """
    for name, most in (("one", 1 << 30), ("many", shard_bytes)):
        manifest = materialize(layout, folder / name, shard_bytes=most)
        found = opened(folder / name)
        assert (len(manifest["rows_of_shards"]) > 1) == (name == "many")
        assert found.layout.corpus.fingerprint == manifest["fingerprint"]
        for source in (found, pickle.loads(pickle.dumps(found)), NpyDataSource(found.layout, max_open_files=1)):
            yield source, manifest


@pytest.mark.parametrize("long", [False, True], ids=["short segments", "long segments"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {**TWO_EPOCHS, "long_documents": "fragment"}, {"algorithm": "concat_then_split"}],
    ids=lambda options: options.get("algorithm", "best_fit_decreasing"),
)
def test_written_rows_are_the_packed_rows(tmp_path, monkeypatch, kind, options, long):
    """Rows with long segments are written with the ends of the segments, other rows with each token's position and segment."""
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1 if long else row_format.LONG_SEGMENT)
    layout = PackedLayout(make(tmp_path, kind), 8 * LENGTH - 1 if long else LENGTH, **options)
    expected, shift = NpyDataSource(layout), ShiftTargets()
    assert layout.statistics["padding"]
    for found, manifest in written_and_opened(layout, tmp_path, 1 << 13 if long else 1 << 10):
        assert_same_rows(found, expected)
        assert manifest["most_segments"] == (layout.statistics["max_segments"] if long else 0)
        assert bool(manifest["positions_dtype"]) != long
        assert bool(manifest["segments_dtype"]) == (not long or kind != "plain")
        for count in (1, 2, 5):
            rows = np.random.default_rng(count).integers(0, len(expected), count)
            assert_same(shift.read(found, rows), ShiftTargets().map(expected.read(rows)))


@pytest.mark.parametrize("kind", ["plain", "masks"])
@pytest.mark.parametrize("at, value", [(0, 1 << 20), (0, -1), (0, -(1 << 62)), (1, 0), (1, -5), (1, 1 << 20)])
def test_segments_that_end_outside_of_their_row_are_an_error(tmp_path, monkeypatch, kind, at, value):
    """Each read returns `value` as the end of segment number `at`."""
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1)
    materialize(PackedLayout(make(tmp_path, kind), 8 * LENGTH), tmp_path / "rows")
    source, preadv = opened(tmp_path / "rows"), os.preadv

    def damaged(fd, buffers, offset):
        done = preadv(fd, buffers, offset)
        buffers[-1][8 * at : 8 * at + 8] = value.to_bytes(8, "little", signed=True)
        return done

    monkeypatch.setattr(os, "preadv", damaged)
    expected = r"rows: the segment ends of a row are damaged; expected .*Write the rows again"
    with pytest.raises(CorpusError, match=expected):
        ShiftTargets().read(source, np.array([0, 1]))


def test_an_index_entry_that_ends_after_its_row_is_an_error(tmp_path):
    np.tile(np.array([3] * 9 + [2], np.uint32), 600).tofile(tmp_path / "tokens.npy")
    materialize(PackedLayout(open_corpus(tmp_path / "tokens.npy", eos_token_id=2), LENGTH), tmp_path / "rows")
    path = tmp_path / "rows" / "documents_0000.idx"
    entries = np.fromfile(path, "<u8").reshape(-1, 2)
    # The fingerprint hashes the start and the end of the file, and not entry 300.
    entries[300, 1] += LENGTH
    entries.tofile(path)
    rows = opened(tmp_path / "rows").layout
    with pytest.raises(LayoutError, match=r"rows_0000.bin: segment 300 ends after its row"):
        rows.pieces(np.arange(len(rows)))


def test_the_written_files_are_a_corpus_whose_documents_are_the_segments(written, layout):
    corpus = open_corpus(written, format="rows")
    rows = MaterializedLayout(corpus)
    pairs = [pair for row in range(len(layout)) for pair in zip(rows.spans(row), layout.spans(row), strict=True)]
    for number, (found, span) in enumerate(pairs):
        assert found.document == number and found.stop - found.start == span.stop - span.start
        mine, original = corpus.document(number), layout.corpus.document(span.document)
        np.testing.assert_array_equal(mine.tokens, original.tokens[:LENGTH])
        np.testing.assert_array_equal(mine.loss, original.loss[:LENGTH])
    assert len(pairs) == corpus.num_documents == len(list(corpus.iter_documents()))
    assert 0 < supervised_ratio(corpus) < 1
    windows, packed = (NpyDataSource(each).read([1, 5])["tokens"] for each in (WindowLayout(corpus, LENGTH), layout))
    np.testing.assert_array_equal(windows, packed)


def test_any_range_of_tokens_can_be_read_and_laid_out_in_rows_of_other_lengths(written, layout):
    corpus = open_corpus(written)
    rows = NpyDataSource(layout).read(range(len(layout)))
    tokens, loss = rows["tokens"].reshape(-1), rows["loss_mask"].reshape(-1)
    random = np.random.default_rng(0)
    for start in (0, 1, LENGTH - 1, LENGTH, *random.integers(0, len(tokens), 30).tolist()):
        for stop in (start, start + 1, start + LENGTH, min(start + 5 * LENGTH + 3, len(tokens))):
            found = corpus.read(start, min(stop, len(tokens)))
            np.testing.assert_array_equal(found[0], tokens[start:stop])
            np.testing.assert_array_equal(found[1], loss[start:stop])
    windows = NpyDataSource(WindowLayout(corpus, 96))  # a window begins in one row and ends in the next
    for row in range(len(windows)):
        (span,) = windows.layout.spans(row)
        begin = span.start + sum(each.num_tokens for each in corpus.shards[: span.shard])
        np.testing.assert_array_equal(windows[row]["tokens"], tokens[begin : begin + 96])
    again = PackedLayout(corpus, 200, long_documents="fragment")
    for one_by_one in (True, False):  # rows are read one after another, then all pieces at once
        source = NpyDataSource(again)
        source._segment_reader = SegmentReader(again, source._reader, False) if one_by_one else None
        for row in range(0, len(again), 3):
            expected = np.concatenate([corpus.document(span.document).tokens for span in again.spans(row)])
            np.testing.assert_array_equal(source[row]["tokens"][: len(expected)], expected)


def test_max_open_files_bounds_the_open_files_of_a_batch(written, layout, monkeypatch):
    found = MaterializedLayout(open_corpus(written))
    assert len(found.corpus.shards) > 20
    seen, preadv = [], os.preadv

    def counting(fd, *arguments):
        seen.append(len(open_files(f"{written}/rows_")))
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", counting)
    source, expected = NpyDataSource(found, max_open_files=4), NpyDataSource(layout)
    rows = np.arange(len(layout))
    assert_same(ShiftTargets().read(source, rows), ShiftTargets().read(expected, rows))
    few = rows[: 3 * (len(rows) // len(found.corpus.shards))]
    assert_same(ShiftTargets().read(source, few), ShiftTargets().read(expected, few))
    assert 0 < max(seen) <= 2 * 4


def test_rows_in_a_bucket_equal_those_in_a_folder(tmp_path, client, monkeypatch):
    expected = NpyDataSource(PackedLayout(make(tmp_path, "weights"), LENGTH))
    places = (tmp_path / "rows", "gs://bucket/rows")
    for where in places:
        materialize(expected.layout, where, shard_bytes=1 << 13)
    here, there = map(open_corpus, places)
    assert here.fingerprint == there.fingerprint
    found = NpyDataSource(MaterializedLayout(there))
    assert_same_rows(found, expected)
    rows = np.arange(len(expected))[::-3]
    assert_same(ShiftTargets().read(found, rows), ShiftTargets().read(expected, rows))
    np.testing.assert_array_equal(there.read(40, 140)[0], here.read(40, 140)[0])
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1)  # rows are read one after another
    again = [NpyDataSource(PackedLayout(corpus, 200)) for corpus in (here, there)]
    assert all(source._segment_reader is not None for source in again)
    assert_same(ShiftTargets().read(again[0], np.arange(5)), ShiftTargets().read(again[1], np.arange(5)))


def test_sources_of_documents_are_written_too(tmp_path):
    docs = documents(30)
    folder = write_primer(tmp_path / "primer", docs)
    write_sources(folder / "train_sources.bin", docs)
    layout = PackedLayout(open_corpus(folder), LENGTH)
    materialize(layout, tmp_path / "rows")
    numbers = [span.document for row in range(len(layout)) for span in layout.spans(row)]
    np.testing.assert_array_equal(open_corpus(tmp_path / "rows").sources, layout.corpus.sources[numbers])


def test_a_document_found_by_eos_alone_has_the_source_of_its_first_token(tmp_path):
    """The first of three documents was cut and lacks its EOS: by EOS alone, the second continues it. The third has two EOS."""
    folder = tmp_path / "chats"
    folder.mkdir()
    np.array([5, 6, 7, 8, 8, 0, 9, 0, 4, 0], np.uint16).tofile(folder / "token_ids_part_0000.npy")
    np.ones(10, np.bool_).tofile(folder / "labels_mask_part_0000.npy")
    with gzip.open(folder / "token_ids_part_0000.csv.gz", "wt") as file:
        file.write("0,3\n3,6\n6,10\n")
    np.array([[0, 10], [0, 20], [0, 30]], "<i8").tofile(folder / "sources.bin")
    corpus = open_corpus(folder, format="olmo", dtype="uint16", eos_token_id=0)
    layout = PackedLayout(corpus, 6, algorithm="concat_then_split", boundaries="eos")
    expected = [([5, 6, 7, 8, 8, 0], 10), ([9, 0], 30), ([4, 0], 30)]
    materialize(layout, tmp_path / "rows")
    rows = open_corpus(tmp_path / "rows")
    assert [(each.tokens.tolist(), each.source[1]) for each in rows.iter_documents()] == expected
    found = trace(pipeline_of(layout, order="sequential", global_batch_size=1, epochs=1), range(len(layout)))
    assert found.record.tolist() == [record for _, record in expected]
    numbers = [numbers_in(layout, documents_of_record(corpus, record)).tolist() for record in ("10", "20", "30", "40")]
    assert numbers == [[0], [0], [1, 2], []]
    chunks = OlmoVslLayout(corpus, 4, min_sequence_length=1, boundaries="eos")
    assert chunks.sources.tolist() == layout.sources.tolist()
    same = PackedLayout(corpus, 6, boundaries="auto")
    assert same.documents is corpus.documents and same.sources.tolist() == corpus.sources.tolist()


def test_a_config_with_another_sequence_length_than_that_of_the_rows_is_refused(written):
    with pytest.raises(LayoutError, match="sequence_length=32: the rows were written with 64"):
        load(sections(written, 32, layout="materialized"))


@pytest.mark.parametrize(("long_segment", "positions_dtype"), [(row_format.LONG_SEGMENT, ""), (1 << 30, "uint32")])
def test_positions_beyond_uint16_are_omitted_or_written_as_uint32(tmp_path, monkeypatch, long_segment, positions_dtype):
    monkeypatch.setattr(row_format, "LONG_SEGMENT", long_segment)
    length = (1 << 16) + 1
    docs = [(np.arange(size, dtype=np.uint32) % 100 + 3, np.ones(size, bool)) for size in (length, 70_000, 100, 7)]
    expected = NpyDataSource(PackedLayout(open_corpus(write_episodes(tmp_path / "long", docs)), length))
    written = materialize(expected.layout, tmp_path / "rows")
    assert (written["positions_dtype"], written["most_segments"]) == (positions_dtype, 0 if positions_dtype else 2)
    assert_same_rows(opened(tmp_path / "rows"), expected)
