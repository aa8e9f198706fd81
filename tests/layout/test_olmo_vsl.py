"""Layout olmo_vsl and its sampler give the batches of OLMo-core's NumpyVSLDataset, which make_vsl_golden.py recorded.

Rows have several lengths. A bucket is all rows of one length, and a batch has rows of one bucket. A curriculum is an order of
the batches, such as short rows first. Runs can be resumed, traced, staged, amended, compared and reported.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import vsl_corpora
from batches import assert_is_traced, assert_one_run, assert_same, golden_values, load, put, write_config
from vsl_corpora import CORPORA, EPOCHS, IGNORED, RUNS, VslRun, batch_digest, write_corpus

from grain_sft import Host, Pipeline
from grain_sft.errors import ConfigError, GrainSftError, LayoutError, SamplerError
from grain_sft.provenance import checkpoint_table, difference, trace
from grain_sft.sampling import CurriculumSampler
from grain_sft.view import report

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
    ("sampler.epochs", 1 << 63, r"epochs=9223372036854775808: expected at most \d+"),
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


RUN = VslRun("three files", 4, 64, 512, ranks=1, seed=5, curriculum="grow_p2", num_cycles=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return vsl_corpora.config_of(RUN, write_corpus(RUN.corpus, tmp_path_factory.mktemp("vsl")))


@pytest.fixture(scope="module")
def pipeline(config):
    return load(config)


def test_hosts_and_resumed_iterators_read_the_same_batches(config, pipeline):
    begin = pipeline.sampler.steps_per_epoch - 3
    assert_one_run(lambda host: load(config, host=host), range(begin, begin + 6), [1, 2, 4])


def test_a_late_step_of_an_endless_run_is_read_without_the_earlier_steps(config, pipeline):
    endless = load(put(config, "sampler.epochs", None))
    step = 10**6 * pipeline.sampler.steps_per_epoch + 7
    assert endless.num_steps is None and endless[step]["inputs"].size == 512
    assert endless.sampler.streams[0].begin(step)[0] == 10**6
    assert_same(endless[pipeline.num_steps - 1], pipeline[pipeline.num_steps - 1])


@pytest.mark.parametrize("transforms", [["ngram_filter", "shift_targets"], ["shift_targets"]])
def test_a_trace_lists_the_rows_that_hosts_read(config, transforms):
    steps = range(40, 48)
    hosts = [load(config | {"transforms": transforms}, host=Host(index, 2)) for index in range(2)]
    assert_is_traced(trace(hosts[0], steps), hosts, steps)


@pytest.mark.parametrize("steps", [[7, 30, 5], [7, 90, 5]])
def test_stages_with_the_same_batches_continue_one_run(config, pipeline, steps):
    """A stage with other batches, such as those of another curriculum, may begin only at the start of an epoch."""
    # The filter is in the first and in the last of the three stages.
    transforms = (["ngram_filter", "shift_targets"][number % 2 :] for number in range(3))
    stages = [{"steps": count, "transforms": own} for count, own in zip(steps, transforms, strict=True)]
    staged = load(config | {"stages": stages})
    rows = [staged.sampler.rows(step).tolist() for step in range(sum(steps))]
    assert rows == [pipeline.sampler.rows(step).tolist() for step in range(sum(steps))]
    assert_one_run(lambda host: load(config | {"stages": stages}, host=host), range(5, 9), [1, 2])
    whole, traced = (trace(run, range(40), trainable=False).columns() for run in (pipeline, staged))
    assert_same(traced, whole)
    other = {"sampler": {"curriculum": "natural"}}
    epoch = pipeline.sampler.steps_per_epoch
    changed = load(config | {"stages": [{"steps": epoch}, other]})
    natural = load(put(config, "sampler.curriculum", "natural"))
    first = natural.sampler.steps_per_epoch
    for step in range(3):
        assert_same(changed[epoch + step], natural[first + step])
    message = r"stage 2: an earlier stage ended inside an epoch .*'grow_p2'.* has batches of .*'natural'"
    with pytest.raises(GrainSftError, match=message):
        load(config | {"stages": [{"steps": epoch + 1}, other]})
    with pytest.raises(GrainSftError, match="no row is left: the 2 epochs were read before"):
        load(config | {"stages": [{"steps": 2 * epoch}, {}]})


def test_batch_sizes_count_the_rows_of_each_step(pipeline, config):
    skips = [{"skip": {"from": 4, "steps": 3}}, {"skip": {"from": 50, "steps": 200}}]
    for run in (pipeline, load(config | {"amendments": skips})):
        sizes, steps = run.sampler.batch_sizes, np.arange(run.num_steps)
        counts = [len(run.sampler.rows(step)) for step in steps.tolist()]
        before = np.cumsum([0, *counts])
        assert [sizes.at(step) for step in steps.tolist()] == counts
        assert [sizes.before(step) for step in range(len(steps) + 1)] == before.tolist()
        for found, expected in zip(sizes.of_steps(steps), (before[:-1], counts), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert [sizes.step_of(row) for row in range(0, before[-1], 97)] == steps.repeat(counts).tolist()[::97]
        assert len(run.sampler) == before[-1]
        lengths = [run.sampler.row_length(step) for step in steps.tolist()]
        assert {count * length for count, length in zip(counts, lengths, strict=True)} == {512}


def test_checkpoint_tables_and_reports_count_tokens_and_a_difference_has_its_first_step(pipeline, config):
    table = checkpoint_table(pipeline, 40)
    assert table["tokens"] == [step * 512 for step in table["step"]]
    assert table["rows"] == [pipeline.sampler.batch_sizes.before(step) for step in table["step"]]
    left = sum(line["tokens"] for line in report.left_out(pipeline))
    assert left == pipeline.source.layout.corpus.num_tokens - pipeline.sampler.steps_per_epoch * 512
    other = load(config | {"sampler": config["sampler"] | {"curriculum": "grow_linear", "num_cycles": 1}})
    found = difference(pipeline, other, steps=range(100))
    first = next(k for k in range(100) if pipeline.sampler.rows(k).tolist() != other.sampler.rows(k).tolist())
    assert found.first_step == first and 0 < found.differing_rows <= found.total_rows


def test_commands_accept_a_run_with_rows_of_several_lengths(config, tmp_path, run_command):
    stated = config | {"audit": str(tmp_path / "audit")}
    path = write_config(tmp_path / "run.json", stated)
    for _ in load(stated).iter():
        pass
    assert "confirmed: " in run_command("audit-check", tmp_path / "audit.log", path).out
    run_command("verify", path, "--full", "--vocab-size", "60000")
    run_command("inspect", path, "--step", "1")
    measured = run_command("bench", path, "--seconds", "0.1", "--repeats", "1", "--max-workers", "0").out
    assert "rows of 4 to 64 tokens" in measured
    run_command("report", path, "--output", tmp_path / "report.html")
    layout, page = load(config).source.layout, (tmp_path / "report.html").read_text()
    for length, rows in zip(layout.row_lengths, layout.row_counts, strict=True):
        assert f"{rows:,} of {length:,} tokens" in page
