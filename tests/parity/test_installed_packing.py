"""Packing against the installed OLMo-core: `pytest -m parity`. Golden values are tested without, in tests/layout."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from packed_corpora import BOS, EOS, PACKED_CASES, PAD, olmo_doc_lengths, write_case

from grain_sft import NpyDataSource, PackedLayout, open_corpus

pytestmark = pytest.mark.parity


def layout_of(case, written, folder, **options):
    where = folder if case.mask else list(map(str, written))
    corpus = open_corpus(where, dtype=case.dtype, eos_token_id=EOS)
    bos = BOS if case.bos else None
    settings = {"long_documents": case.long, "source_group_size": case.group, "bos_token_id": bos, "cache_dir": folder}
    if "work_dir" in options:
        return PackedLayout.from_olmo_core(corpus, case.sequence_length, **settings, **options)
    return PackedLayout(corpus, case.sequence_length, boundaries="eos", **settings, **options)


def assert_equal_rows(layout, dataset, bos):
    assert len(layout) == len(dataset)
    rows = NpyDataSource(layout).read(range(len(layout)))
    for row in range(len(layout)):
        theirs = dataset[row]
        used = rows["segment_ids"][row] > 0
        expected = theirs["input_ids"].numpy()
        np.testing.assert_array_equal(rows["tokens"][row][used], expected[used])
        assert (expected[~used] == PAD).all()
        np.testing.assert_array_equal(rows["loss_mask"][row], theirs["label_mask"].numpy())
        tokens = np.where(used, rows["tokens"][row], PAD)
        assert olmo_doc_lengths(rows["segment_ids"][row], tokens, bos) == theirs["doc_lens"].tolist()


@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.name)
def test_rows_are_olmo_cores_and_so_are_those_of_the_plan_that_it_wrote(tmp_path, case):
    pytest.importorskip("olmo_core.data")
    sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
    from make_packed_golden import olmo_dataset

    tokens, masks = write_case(case, tmp_path)
    dataset = olmo_dataset(case, tokens, masks, tmp_path / "work")
    ours = layout_of(case, tokens, tmp_path, ties="numpy")
    assert_equal_rows(ours, dataset, case.bos)
    theirs = layout_of(case, tokens, tmp_path, work_dir=tmp_path / "work", paths=list(map(str, tokens)))
    assert [theirs.spans(row) for row in range(len(theirs))] == [ours.spans(row) for row in range(len(ours))]
    assert theirs.statistics == ours.statistics


@pytest.mark.parametrize("group", [1, 2])
def test_a_plan_of_boundary_files_is_read_back(tmp_path, group):
    """`use_array_if_local=False`: documents of .csv.gz files, not all of which end with an EOS."""
    pytest.importorskip("olmo_core.data")
    from olmo_core.data import NumpyPackedFSLDataset

    random = np.random.default_rng(group)
    paths = []
    for number in range(3):
        path = tmp_path / f"token_ids_part_{number:04d}.npy"
        ends = np.cumsum(random.integers(1, 80, 60))
        random.integers(3, 100, ends[-1]).astype(np.uint16).tofile(path)
        np.ones(ends[-1], np.bool_).tofile(tmp_path / f"labels_mask_part_{number:04d}.npy")
        with gzip.open(str(path).replace(".npy", ".csv.gz"), "wt") as file:
            file.writelines(f"{start},{end}\n" for start, end in zip([0, *ends[:-1]], ends, strict=True))
        paths.append(str(path))
    dataset = NumpyPackedFSLDataset(
        *paths,
        sequence_length=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        vocab_size=100,
        generate_doc_lengths=True,
        source_group_size=group,
        use_array_if_local=False,
    )
    dataset.work_dir = tmp_path / "work"
    dataset.prepare()
    corpus = open_corpus(tmp_path, dtype="uint16", eos_token_id=EOS)
    settings = {"source_group_size": group, "use_array_if_local": False, "cache_dir": tmp_path / "cache"}
    layout = PackedLayout.from_olmo_core(corpus, 64, tmp_path / "work", paths=paths, **settings)
    assert_equal_rows(layout, dataset, False)


def test_a_plan_with_a_group_that_has_no_document_is_read_back(tmp_path):
    """The second file holds no EOS. OLMo-core writes its empty arrays as files of one byte."""
    pytest.importorskip("olmo_core.data")
    from olmo_core.data import NumpyPackedFSLDataset

    paths = [str(tmp_path / name) for name in ("a.npy", "b.npy")]
    for path, tokens in zip(paths, ([5, 6, EOS, 7, EOS], [5, 6, 7, 8]), strict=True):
        np.array(tokens, np.uint16).tofile(path)
    dataset = NumpyPackedFSLDataset(
        *paths, sequence_length=8, pad_token_id=PAD, eos_token_id=EOS, vocab_size=100, dtype=np.uint16
    )
    dataset.work_dir = tmp_path / "work"
    dataset.prepare()
    assert 1 in {path.stat().st_size for path in (tmp_path / "work" / "dataset-common").iterdir()}
    corpus = open_corpus(paths, dtype="uint16", eos_token_id=EOS)
    layout = PackedLayout.from_olmo_core(corpus, 8, tmp_path / "work", cache_dir=tmp_path)
    assert len(layout) == len(dataset) == 1
    row = NpyDataSource(layout)[0]
    assert row["tokens"][row["segment_ids"] > 0].tolist() == dataset[0]["input_ids"].tolist()[:5]
