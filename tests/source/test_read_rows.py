"""`ShiftTargets().read(source, rows)` returns the batch that `ShiftTargets().map(source.read(rows))` returns."""

import numpy as np
import pytest
from batches import assert_same
from sft_files import documents, tokens_of, write_episodes, write_olmo

from grain_sft import NgramFilter, NpyDataSource, PackedLayout, PaddedLayout, ShiftTargets, WindowLayout, open_corpus
from grain_sft.corpus import row_format
from grain_sft.errors import TransformError
from grain_sft.layout import FILL_ROW, MaterializedLayout
from grain_sft.prepare.materialize import materialize

LENGTH = 48
KINDS = ("bool", "weights", "none")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read_rows")
    found = {}
    for kind in KINDS:
        docs = documents(90, seed=2, weights=kind == "weights", longest=70)
        if kind == "none":
            files = tokens_of(write_olmo(folder / kind, docs, part_tokens=300))
            found[kind] = open_corpus(files, dtype="uint16", eos_token_id=2, use_loss_mask=False)
        else:
            found[kind] = open_corpus(write_episodes(folder / kind, docs, shards=3))
    return folder, found


def layouts(folder, corpus, kind):
    """Return layouts of a corpus by name. `kind` is one of `KINDS`, and names the folder of the materialized rows."""
    options = {"cache_dir": folder / "cache"}
    packed = PackedLayout(corpus, LENGTH, **options)
    materialize(packed, folder / f"{kind}-rows-{row_format.LONG_SEGMENT}")
    return {
        "windows": WindowLayout(corpus, LENGTH),
        "padded": PaddedLayout(corpus, LENGTH),
        "packed": packed,
        "fragment": PackedLayout(corpus, LENGTH, long_documents="fragment", **options),
        "concat": PackedLayout(corpus, LENGTH, algorithm="concat_then_split", **options),
        "epochs": PackedLayout(corpus, LENGTH, algorithm="shuffled_best_fit", seed=1, epochs=2, **options),
        "materialized": MaterializedLayout(open_corpus(folder / f"{kind}-rows-{row_format.LONG_SEGMENT}")),
    }


@pytest.mark.parametrize("long_segments", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_shift_targets_read_equals_read_and_then_map(corpora, kind, long_segments, monkeypatch):
    monkeypatch.setattr(row_format, "LONG_SEGMENT", 1 if long_segments else 1 << 30)
    folder, found = corpora
    random = np.random.default_rng(0)
    for name, layout in layouts(folder, found[kind], kind).items():
        source, shift, filter = NpyDataSource(layout), ShiftTargets(), NgramFilter(max_count=3, count_padding=True)
        by_pieces = NpyDataSource(layout)
        by_pieces._segment_reader = None  # all pieces of a batch are read at once
        if name not in ("windows", "materialized"):
            assert (source._segment_reader is not None) is long_segments
        batches = [random.integers(0, len(source), count) for count in (1, 2, 7) for _ in range(6)]
        for rows in [*batches, np.array([0, FILL_ROW, len(source) - 1])]:
            assert_same(source.read(rows), by_pieces.read(rows))
            assert_same(shift.read(source, rows), ShiftTargets().map(source.read(rows)))
            assert_same(shift.read(source, rows, filters=[filter]), ShiftTargets().map(filter.map(source.read(rows))))
        assert shift.read(source, np.empty(0, np.int64))["inputs"].shape == (0, LENGTH)


def test_later_reads_do_not_change_earlier_batches(corpora):
    folder, found = corpora
    source, shift = NpyDataSource(layouts(folder, found["weights"], "weights")["packed"]), ShiftTargets()
    rows = [np.array([row, row + 1]) for row in range(len(source) - 1)]
    held = [shift.read(source, each) for each in rows]
    copies = [{key: array.copy() for key, array in batch.items()} for batch in held]
    for each in rows:
        shift.read(source, each[::-1])
    for batch, copy in zip(held, copies, strict=True):
        assert_same(batch, copy)


@pytest.mark.parametrize("highest", [(1 << 31) - 1, 1 << 31])
@pytest.mark.parametrize("mean_length", [20, 3000])
def test_a_token_beyond_int32_is_an_error_without_and_with_a_cached_plan(tmp_path, own_cache, highest, mean_length):
    random = np.random.default_rng(0)
    tokens = random.integers(3, 100, 60_000).astype(np.uint32)
    tokens[random.integers(0, len(tokens), len(tokens) // mean_length)] = 2
    tokens[np.flatnonzero(tokens == 2)[3] - 1] = highest
    tokens.tofile(tmp_path / "0.npy")
    corpus = open_corpus(tmp_path / "0.npy", dtype="uint32", eos_token_id=2)
    for _ in range(2):  # the second time, the plan is in the cache
        source = NpyDataSource(PackedLayout(corpus, 4096))
        # Only rows of few long segments have a segment reader, which reads one row after another.
        assert source.layout.highest_token == highest and (source._segment_reader is None) == (mean_length == 20)
        rows = np.arange(len(source))
        if highest >> 31:
            with pytest.raises(TransformError, match="above 2147483647"):
                ShiftTargets().read(source, rows)
        else:
            assert (ShiftTargets().read(source, rows)["inputs"] == highest).sum() == 1
