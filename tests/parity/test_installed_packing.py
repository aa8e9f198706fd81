"""Packed rows equal those of the installed OLMo-core: `pytest -m parity`. tests/layout compares them with recorded values."""

import gzip

import numpy as np
import pytest
from packed_corpora import EOS, PACKED_CASES, PAD, olmo_doc_lengths, write_case
from packed_layouts import open_case, packing_of

from grain_sft import NpyDataSource, PackedLayout, open_corpus

pytestmark = pytest.mark.parity


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
def test_own_packing_and_a_plan_of_olmo_core_both_give_the_rows_of_olmo_core(tmp_path, case):
    pytest.importorskip("olmo_core.data")
    from make_packed_golden import olmo_dataset

    tokens, masks = write_case(case, tmp_path)
    dataset = olmo_dataset(case, tokens, masks, tmp_path / "work")
    corpus, options = open_case(case, tmp_path, (tokens, masks)), {**packing_of(case), "cache_dir": tmp_path}
    ours = PackedLayout(corpus, case.sequence_length, boundaries="eos", ties="numpy", **options)
    assert_equal_rows(ours, dataset, case.bos)
    options |= {"work_dir": tmp_path / "work", "paths": list(map(str, tokens))}
    theirs = PackedLayout.from_olmo_core(corpus, case.sequence_length, **options)
    assert [theirs.spans(row) for row in range(len(theirs))] == [ours.spans(row) for row in range(len(ours))]
    assert theirs.statistics == ours.statistics


def prepared(paths, work, **options):
    """Return OLMo-core's dataset over `paths`, after it has written its plan below `work`."""
    data = pytest.importorskip("olmo_core.data")
    dataset = data.NumpyPackedFSLDataset(*paths, pad_token_id=PAD, eos_token_id=EOS, vocab_size=100, **options)
    dataset.work_dir = work
    dataset.prepare()
    return dataset


@pytest.mark.parametrize("group", [1, 2])
def test_a_plan_that_olmo_core_made_from_boundary_files_is_read(tmp_path, group):
    """With `use_array_if_local=False`, OLMo-core takes the documents from the .csv.gz files. They do not all end with EOS."""
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
    options = {"source_group_size": group, "use_array_if_local": False}
    dataset = prepared(paths, tmp_path / "work", sequence_length=64, generate_doc_lengths=True, **options)
    corpus, options = open_corpus(tmp_path, dtype="uint16", eos_token_id=EOS), {**options, "cache_dir": tmp_path}
    layout = PackedLayout.from_olmo_core(corpus, 64, tmp_path / "work", paths=paths, **options)
    assert_equal_rows(layout, dataset, False)


def test_a_plan_with_a_group_without_documents_is_read(tmp_path):
    """The second file has no EOS, so its group has no document. OLMo-core writes an empty array as a file of one byte."""
    paths = [str(tmp_path / name) for name in ("a.npy", "b.npy")]
    for path, tokens in zip(paths, ([5, 6, EOS, 7, EOS], [5, 6, 7, 8]), strict=True):
        np.array(tokens, np.uint16).tofile(path)
    dataset = prepared(paths, tmp_path / "work", sequence_length=8, dtype=np.uint16)
    assert 1 in {path.stat().st_size for path in (tmp_path / "work" / "dataset-common").iterdir()}
    corpus = open_corpus(paths, dtype="uint16", eos_token_id=EOS)
    layout = PackedLayout.from_olmo_core(corpus, 8, tmp_path / "work", cache_dir=tmp_path)
    assert len(layout) == len(dataset) == 1
    row = NpyDataSource(layout)[0]
    assert row["tokens"][row["segment_ids"] > 0].tolist() == dataset[0]["input_ids"].tolist()[:5]
