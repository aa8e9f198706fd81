"""Rows, batches, orders and filters equal those of installed OLMo-core, MaxText and megatron-core: `pytest -m parity`.

Other tests compare them with recorded values. The extra `parity` installs OLMo-core, for which the CPU build of torch is
enough. MaxText needs Python 3.12; install it with `pip install --no-deps maxtext`.
"""

import gzip

import numpy as np
import pytest
from batches import pipeline_of
from making import olmo_loader, olmo_windows
from megatron_corpora import EOD, write_prefix
from packed_corpora import EOS, PACKED_CASES, PAD, olmo_doc_lengths, write_case
from packed_layouts import open_case, packing_of
from vsl_corpora import EPOCHS, IGNORED, RUNS, config_of, write_corpus

from grain_sft import (
    GrainSftError,
    Host,
    IndexSampler,
    NgramFilter,
    NpyDataSource,
    PackedLayout,
    WindowLayout,
    load,
    open_corpus,
)
from grain_sft.layout import MegatronGptLayout

pytestmark = pytest.mark.parity


def repetitive_rows(rng, rows, length):
    """Return rows of random tokens. Each repeats an n-gram of 1 to 14 tokens at most 35 times; the filter fails it at 32."""
    tokens = rng.integers(0, rng.choice([2, 3, 50, 1000]), (rows, length)).astype(np.uint16)
    for row in tokens:
        period, repeats = int(rng.integers(1, 15)), int(rng.integers(29, 36))
        span = np.tile(rng.integers(0, 1000, period), repeats + 1)[: period * repeats + int(rng.integers(0, period))]
        span = span[:length]
        start = int(rng.choice([0, length - len(span), rng.integers(0, length - len(span) + 1)]))
        row[start : start + len(span)] = span
        if rng.random() < 0.3:
            row[-period:] = row[:period]
    return tokens


@pytest.mark.parametrize("length", [512, 521, 455, 96])
def test_the_ngram_filter_fails_the_rows_in_which_olmo_core_finds_32_repeats(length):
    utils = pytest.importorskip("olmo_core.data.utils")
    rows = repetitive_rows(np.random.default_rng(length), 1000, length)
    repeats = [utils.find_periodic_sequences(row.astype(np.int64), max_period=13) for row in rows]
    expected = [any(found.times >= 32 for found in of_row) for of_row in repeats]
    assert 50 < sum(expected) < 950
    assert NgramFilter().fails(rows).tolist() == expected


@pytest.mark.parametrize("seed", [0, 34521])
def test_batches_of_every_rank_are_those_of_olmo_cores_loader(tmp_path, seed):
    pytest.importorskip("olmo_core.data")
    length, batch, ranks = 64, 12, 3
    rng = np.random.default_rng(seed)
    paths = [str(tmp_path / f"{number}.npy") for number in range(3)]
    for path, tokens in zip(paths, (64 * 40 + 7, 30, 64 * 25), strict=True):
        rng.integers(0, 50000, tokens, np.uint16).tofile(path)
    dataset = olmo_windows(paths, length, np.uint16)
    layout = WindowLayout(open_corpus(paths, dtype="uint16"), length)
    for rank in range(ranks):
        loader = olmo_loader(dataset, tmp_path / "work", batch=batch, seed=seed, ranks=ranks, rank=rank)
        batches = pipeline_of(layout, host=Host(rank, ranks), global_batch_size=batch, seed=seed).iter()
        for epoch in (1, 2):
            loader.reshuffle(epoch=epoch)
            for theirs in loader:
                np.testing.assert_array_equal(next(batches)["inputs"], theirs["input_ids"].numpy())
            loader.reset()


@pytest.mark.parametrize("hosts", [1, 3])
def test_order_maxtext_gives_the_rows_of_maxtexts_sampler(hosts):
    maxtext = pytest.importorskip("maxtext.input_pipeline.olmo_data_grain")
    for index in range(hosts):
        theirs = maxtext.OlmoIndexSampler(total_instances=100, seed=5, shard_index=index, shard_count=hosts)
        ours = IndexSampler(100, global_batch_size=hosts, seed=5, order="maxtext", host=Host(index, hosts))
        assert [ours[i].record_key for i in range(250)] == [theirs[i].record_key for i in range(250)]


def test_maxtext_reads_an_index_that_corpus_save_writes(tmp_path):
    maxtext = pytest.importorskip("maxtext.input_pipeline.olmo_data")
    grain_loader = pytest.importorskip("maxtext.input_pipeline.olmo_data_grain")
    for number, tokens in enumerate((1000, 515)):
        np.arange(tokens, dtype=np.uint32).tofile(tmp_path / f"{number}.npy")
    open_corpus(tmp_path).save(tmp_path / "index.json", format="maxtext", sequence_length=128, tokenizer="t")
    index = maxtext.load_index(str(tmp_path / "index.json"))
    assert index.fingerprint == maxtext.compute_fingerprint(128, "uint32", "t", index.files)
    theirs = grain_loader.OlmoNpyDataSource(index)
    ours = NpyDataSource(WindowLayout(open_corpus(tmp_path / "index.json"), 128))
    assert len(ours) == len(theirs)
    for row in range(len(ours)):
        np.testing.assert_array_equal(ours[row]["tokens"], theirs[row]["tokens"])


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


@pytest.mark.parametrize("number", range(0, len(RUNS), 2))
def test_every_batch_of_every_rank_is_that_of_olmo_cores_loader(tmp_path, number):
    """The seeds are not those of the recorded values, and the number of ranks is random."""
    pytest.importorskip("olmo_core.data")
    from make_vsl_golden import batches, olmo_vsl_loader

    drawn = np.random.default_rng(number)
    run = RUNS[number]
    rows = run.batch_tokens // run.longest
    ranks = int(drawn.choice([count for count in range(1, rows + 1) if rows % count == 0]))
    run = run._replace(seed=int(drawn.integers(1 << 16)), ranks=ranks)
    paths = write_corpus(run.corpus, tmp_path)
    try:
        loaders = [olmo_vsl_loader(run, paths, tmp_path / "work", rank) for rank in range(ranks)]
        expected = [[list(batches(loader, 1 + epoch)) for loader in loaders] for epoch in range(EPOCHS)]
    except (ValueError, AssertionError, IndexError):
        if run.longest != 256:  # at 256, only OLMo-core fails, because it stores the length as uint8
            with pytest.raises(GrainSftError):
                load(config_of(run, paths), host=Host(0, 1))
        return
    for rank in range(ranks):
        pipeline = load(config_of(run, paths), host=Host(rank, ranks))
        theirs = [batch for epoch in expected for batch in epoch[rank]]
        assert pipeline.num_steps == len(theirs)
        for step, (inputs, labels) in enumerate(theirs):
            batch = pipeline[step]
            np.testing.assert_array_equal(batch["inputs"], inputs)
            taken = np.where(batch["targets_segmentation"] != 0, batch["targets"], IGNORED)
            np.testing.assert_array_equal(taken, labels)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("seed", range(40))
def test_rows_of_random_blends_equal_those_of_megatron_core(tmp_path, seed):
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from make_megatron_gpt_golden import dataset_of

    random = np.random.default_rng(seed)
    names = [f"p{number}" for number in range(random.integers(1, 5))]
    for name in names:
        options = {"sequences": int(random.integers(1, 4)), "longest": int(random.integers(3, 60))}
        write_prefix(tmp_path, name, int(random.integers(20, 90)), int(random.integers(99)), **options)
    weighted = random.random() < 0.7
    kinds = [random.random(len(names)) + 0.01, random.integers(1, 9, len(names)).astype(float)]
    weights = random.choice(kinds).tolist()
    blend = [each for pair in zip(weights, names, strict=True) for each in pair] if weighted else names
    options = {"seed": int(random.integers(2**31)), "sequence_length": int(random.integers(4, 40))}
    options["num_samples"] = int(random.integers(1, 500)) if weighted or random.random() < 0.7 else None
    options["add_extra_token_to_sequence"] = bool(random.random() < 0.8)
    split, subset = str(random.choice(["1,0,0", "7,2,1"])), "train"
    expected = dataset_of(tmp_path, {"blend": blend, "split": split, "subset": subset, **options})
    paths = [str(tmp_path / each) if isinstance(each, str) else str(each) for each in blend]
    corpus = open_corpus(paths, format="megatron", eos_token_id=EOD, split=split, subset=subset)
    found = MegatronGptLayout(corpus, **options)
    assert len(found) == len(expected)
    rows = np.unique(random.integers(0, len(found), 60))
    tokens = NpyDataSource(found).read(rows)["tokens"][:, : options["sequence_length"]]
    assert tokens.tolist() == [expected[row]["tokens"].tolist() for row in rows.tolist()]
