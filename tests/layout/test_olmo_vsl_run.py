"""Runs whose rows have several lengths (layout olmo_vsl) can be resumed, traced, staged, amended, compared and reported."""

import numpy as np
import pytest
from batches import assert_is_traced, assert_one_run, assert_same, load, put, write_config
from vsl_corpora import VslRun, config_of, write_corpus

from grain_sft import GrainSftError, Host
from grain_sft.provenance import checkpoint_table, difference, trace
from grain_sft.view import report

RUN = VslRun("three files", 4, 64, 512, ranks=1, seed=5, curriculum="grow_p2", num_cycles=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return config_of(RUN, write_corpus(RUN.corpus, tmp_path_factory.mktemp("vsl")))


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
