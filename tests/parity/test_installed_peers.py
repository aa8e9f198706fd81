"""The n-gram filter, batches, order and index equal those of installed OLMo-core and MaxText: `pytest -m parity`.

The extra `parity` installs OLMo-core, for which the CPU build of torch is enough. MaxText needs Python 3.12; install it with
`pip install --no-deps maxtext`.
"""

import numpy as np
import pytest
from batches import pipeline_of
from making import olmo_loader, olmo_windows

from grain_sft import Host, IndexSampler, NgramFilter, NpyDataSource, WindowLayout, open_corpus

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
    paths = []
    for number, tokens in enumerate((64 * 40 + 7, 30, 64 * 25)):
        paths.append(str(tmp_path / f"{number}.npy"))
        rng.integers(0, 50000, tokens, np.uint16).tofile(paths[-1])
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
