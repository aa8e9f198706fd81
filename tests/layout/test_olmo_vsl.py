"""Layout olmo_vsl and its sampler give the batches of OLMo-core's NumpyVSLDataset, which make_vsl_golden.py recorded.

Rows have several lengths. A bucket is all rows of one length, and a batch has rows of one bucket. A curriculum is an order of
the batches, such as short rows first.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import vsl_corpora
from batches import golden_values, load, put
from vsl_corpora import CORPORA, EPOCHS, IGNORED, RUNS, batch_digest, write_corpus

from grain_sft import Pipeline
from grain_sft.errors import ConfigError, GrainSftError, LayoutError, SamplerError
from grain_sft.sampling import CurriculumSampler

GOLDEN = golden_values("olmo_vsl.json")["runs"]
REPLAYED = [run for run in RUNS if "error" not in GOLDEN[run.name]]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """`config_of(run)` returns the config of a run. Its token files exist."""
    paths = {name: write_corpus(name, tmp_path_factory.mktemp("vsl")) for name in CORPORA}
    return lambda run: vsl_corpora.config_of(run, paths[run.corpus])


def epoch_digests(pipeline: Pipeline, epoch: int, ranks: int) -> list[tuple[str, str]]:
    """Return, for each rank, the `batch_digest` of the rows that it reads in an epoch."""
    steps = pipeline.sampler.steps_per_epoch
    batches = [pipeline[step] for step in range(epoch * steps, (epoch + 1) * steps)]
    labelled = [(b["inputs"], np.where(b["targets_segmentation"] != 0, b["targets"], IGNORED)) for b in batches]
    parts = [[np.split(array, ranks) for array in pair] for pair in labelled]
    return [batch_digest((inputs[rank], labels[rank]) for inputs, labels in parts) for rank in range(ranks)]


@pytest.mark.parametrize("run", REPLAYED, ids=lambda run: run.name)
def test_every_batch_of_every_rank_and_epoch_is_olmo_cores(config_of, run):
    golden, config = GOLDEN[run.name], config_of(run)
    digest = hashlib.sha256(b"".join(Path(path).read_bytes() for path in config["corpus"]["path"])).hexdigest()
    assert digest[:8] == golden["corpus"], "numpy draws another corpus than for the recorded values"
    pipeline = load(config)
    assert pipeline.num_steps == EPOCHS * sum(golden["batches"])
    found = [epoch_digests(pipeline, epoch, run.ranks) for epoch in range(EPOCHS)]
    assert found[0][0][1] == golden["lengths"]
    assert [[one for one, _ in ranks] for ranks in found] == golden["digests"]


def test_runs_that_olmo_core_cannot_build_are_refused(config_of):
    refused = [run for run in RUNS if "error" in GOLDEN[run.name] and run.longest != 256]  # for 256 see RUNS
    assert len(refused) >= 3
    for run in refused:
        with pytest.raises(SamplerError, match=r"curriculum '.*(OLMo-core stops here|fills no batch|no bucket fills)"):
            load(config_of(run))


CHANGES = [("layout", {"min_sequence_length": 8}), ("layout", {"sequence_length": 32}), ("corpus", {"eos_token_id": 9})]
OF_SAMPLERS = [{"curriculum": "natural"}, {"curriculum": "grow_linear"}, {"num_cycles": 1}, {"seed": 1}, {"epochs": 3}]
OF_SAMPLERS += [{"balanced": True, "num_cycles": 1}, {"shuffle": False}, {"global_batch_tokens": 1024}]
CHANGES += [("sampler", each) for each in OF_SAMPLERS]


def test_every_option_that_changes_batches_changes_the_receipt(config_of):
    config = config_of(RUNS[1])
    changed = [config] + [config | {section: config[section] | change} for section, change in CHANGES]
    assert len({load(each).receipt.code for each in changed}) == len(changed)
    unused = [config | {"sampler": config["sampler"] | {"shuffle": False, "seed": seed}} for seed in (0, 1)]
    assert len({load(each).receipt.code for each in unused}) == 1


def test_every_row_is_found_at_the_step_and_slot_that_read_it(config_of):
    pipeline = load(config_of(RUNS[7]))
    sampler = pipeline.sampler
    slots = sampler.slots(range(pipeline.num_steps))
    found = sampler.find_slots(np.arange(len(pipeline.source)), epochs=2)
    for column, expected in zip(found.columns(), slots.columns(), strict=True):
        np.testing.assert_array_equal(column, expected)
    for epoch in range(EPOCHS):
        rows = sampler.streams[0].rows_at(epoch, np.arange(len(pipeline.source)))
        assert sorted(rows.tolist()) == list(range(len(pipeline.source)))  # rows that no step reads come last
        span = sampler.streams[0].span(epoch)
        assert (span.first, span.last) == (epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch - 1)
    assert [sampler[index].record_key for index in range(len(sampler))] == slots.row.tolist()


def test_rows_of_several_buckets_that_are_read_together_are_padded(config_of):
    pipeline = load(config_of(RUNS[0]))
    source, counts = pipeline.source, pipeline.source.layout.row_counts
    short, longer = source.read([0]), source[counts[0] + counts[1]]
    both = source.read([0, counts[0] + counts[1]])
    assert short["tokens"].shape == (1, 4) and longer["tokens"].shape == (16,)
    np.testing.assert_array_equal(both["tokens"][1], longer["tokens"])
    np.testing.assert_array_equal(both["tokens"][0, :4], short["tokens"][0])
    assert both["segment_ids"][0].tolist() == [1] * 4 + [0] * 12
    assert not both["loss_mask"][0, 4:].any()


WRONG_OPTIONS = [
    ("layout.min_sequence_length", 6, "min_sequence_length=6: expected a power of two, such as 8"),
    ("layout.min_sequence_length", 64, "min_sequence_length=64: expected less than sequence_length=64"),
    ("sampler.order", "olmo", "sampler.order is for rows of one length, but the rows of this layout have several"),
    ("sampler.num_cycles", 0, "num_cycles is 0"),
    ("sampler.curriculum", "grow", "curriculum is 'grow'.*grow_p2"),
    ("sampler.global_batch_tokens", 96, "global_batch_tokens is 96"),
]


@pytest.mark.parametrize(("place", "value", "sentence"), WRONG_OPTIONS)
def test_wrong_options_are_refused(config_of, place, value, sentence):
    with pytest.raises(GrainSftError, match=sentence):
        load(put(config_of(RUNS[0]), place, value))


def test_a_curriculum_for_rows_of_one_length_and_a_mixture_with_rows_of_several_are_refused(config_of):
    config = config_of(RUNS[0])
    with pytest.raises(ConfigError, match=r"sampler.curriculum is for rows of several lengths"):
        load(config | {"layout": {"kind": "windows", "sequence_length": 64}})
    sources = {name: {"weight": 1} | config["corpus"] for name in ("one", "two")}
    with pytest.raises(LayoutError, match="source one has rows of several lengths"):
        load(config | {"corpus": {"mixture": sources}, "sampler": {"seed": 0, "global_batch_size": 4}})


IMPOSSIBLE_BUCKETS = [
    ([(3, 8), (4, 8)], "lengths that divide the last one"),
    ([(4.7, 8), (8, 8)], "a number=4.7: expected an integer"),
    ([(4, 8, 1)], r"buckets: \(length, number of rows\)=\(4, 8, 1\): expected two integers"),
]


@pytest.mark.parametrize(("buckets", "sentence"), IMPOSSIBLE_BUCKETS)
def test_impossible_buckets_are_refused(buckets, sentence):
    with pytest.raises(SamplerError, match=sentence):
        CurriculumSampler(buckets, global_batch_size=4, seed=0)


def test_a_curriculum_that_continues_after_no_rows_begins_at_its_first_step():
    fresh = CurriculumSampler([(4, 8), (8, 8)], global_batch_size=4, seed=0)
    assert fresh.continued({}).rows(1).tolist() == fresh.rows(1).tolist()
