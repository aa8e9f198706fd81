"""`simulate` runs shipped configs on 2,048 hosts for 10,000 steps in little time and memory, and counts rows exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
from batches import load, write_config
from python_runs import run_python
from sft_files import write_primer

from grain_sft import Host
from grain_sft.bench.plans import LENGTH, TRACED, made_up_lengths, make_corpus
from grain_sft.simulate import Conditions, simulate

CONFIGS = Path(__file__).parents[2] / "configs"
PROGRAM = """
import json, resource, sys, time
import grain_sft
from grain_sft.simulate import simulate
begin = time.process_time()
pipeline = grain_sft.load(sys.argv[1], host=grain_sft.Host(0, 1))
opened = time.process_time()
figures = simulate(pipeline, int(sys.argv[2]), range(int(sys.argv[3])), as_bucket=True)
seconds = [opened - begin, time.process_time() - opened]
figures["run_with"] = [*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6]
print(json.dumps(figures))
"""
"""Simulates a config and prints the figures, with the seconds to open and to simulate it, and the most memory in GB."""


def configs(folder, rows, documents, hosts):
    """Write configs that inherit shipped ones, with their data, into `folder`. Return their paths. A batch has `hosts` rows."""
    names, mix = [f"{number:03d}.npy" for number in range(100)], str(folder / "mix.txt")
    for name in names:
        with open(folder / name, "wb") as file:
            file.truncate(rows // len(names) * 8192 * 4)  # a sparse file
    Path(mix).write_text("".join(f"web,{name}\n" for name in names))
    make_corpus(folder, made_up_lengths(documents, TRACED, LENGTH))
    primers = {}
    for name in ("primer", "oasst1", "dolly15k"):
        sizes = np.random.default_rng(len(name)).integers(20, 300, 20_000)
        docs = [(np.full(size, 9, np.uint16), np.arange(size) > 7) for size in sizes]
        primers[name] = {"path": str(write_primer(folder / name, docs))}
    batch, data, epochs = {"global_batch_size": hosts}, str(folder / "data"), {"epochs": 1000}
    schedule = [{"step": 1000, "weights": {"chat": 0.95, "web": 0.05}}, {"step": 2000, "global_batch_size": 2 * hosts}]
    mixture = {"chat": {"path": data, "sampler": epochs}, "web": {"path": mix}}
    changes = {
        "pretrain_8192": {"corpus": {"path": mix}, "sampler": batch},
        "pretrain_8192_olmo_order": {"corpus": {"path": mix}, "sampler": batch},
        "olmo3_32b_think_sft": {"corpus": {"path": data}, "sampler": batch | epochs},
        "primer_mixture": {"corpus": {"mixture": primers}, "sampler": batch},
        "sft_with_pretraining": {"corpus": {"mixture": mixture}, "sampler": batch | {"schedule": schedule}},
    }
    made = {name: {"inherits": str(CONFIGS / f"{name}.yaml"), **own} for name, own in changes.items()}
    return {name: write_config(folder / f"{name}.json", config) for name, config in made.items()}


def read_rows(pipeline, steps):
    """Return the rows that the pipeline's host reads in all steps, one after the other: int64 [slots]."""
    return np.concatenate([pipeline.sampler.rows(step) for step in range(steps)])


def assert_divided(pipeline, steps, rows, count, hosts):
    """Check that each host h of `hosts` reads `rows[h::count]`. `rows` are those that all `count` hosts read."""
    for host in hosts:
        np.testing.assert_array_equal(read_rows(pipeline.replace(host=Host(host, count)), steps), rows[host::count])


def assert_each_once(pipeline, rows):
    """Check that no epoch reads a row twice. A source of a mixture reads all its rows before it reads a row again."""
    sampler, begin = pipeline.sampler, 0
    for name, layout in pipeline.source.layout.parts.items():
        read = rows[(rows >= begin) & (rows < begin + len(layout))] - begin
        # without a mixture, an epoch drops its last rows, so that all batches are whole
        each = len(layout) if name else sampler.steps_per_epoch * sampler.global_batch_size
        for first in range(0, len(read), each):
            assert np.bincount(read[first : first + each], minlength=len(layout)).max() == 1, (name, first)
        begin += len(layout)


def assert_counted(figures, rows):
    """Check the counts that `simulate` returned against `rows`, which the sampler gives."""
    counts, found = np.bincount(rows), figures["coverage"]
    assert found["rows_read"] == found["slots"] == len(rows)
    assert (found["distinct"], found["most_often"]) == (np.count_nonzero(counts), counts.max())


def test_simulate_counts_the_rows_that_the_samplers_of_shipped_configs_give(tmp_path):
    made = configs(tmp_path, 4000, 300, 8)
    for name, steps in (("pretrain_8192_olmo_order", 300), ("olmo3_32b_think_sft", 40), ("primer_mixture", 90)):
        pipeline = load(made[name])
        figures, rows = simulate(pipeline, 8, range(steps), Conditions(), as_bucket=True), read_rows(pipeline, steps)
        assert_counted(figures, rows)
        assert_divided(pipeline, steps, rows, 8, range(8))
        assert_each_once(pipeline, rows)


SHIPPED = ("pretrain_8192", "pretrain_8192_olmo_order", "olmo3_32b_think_sft", "primer_mixture", "sft_with_pretraining")
COUNTED = SHIPPED[1:4]  # configs whose rows are also counted by brute force
HOSTS, STEPS = 2048, 10_000


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    return configs(tmp_path_factory.mktemp("pod"), 25_000_000, 2_253_916, HOSTS)


@pytest.mark.heavy
@pytest.mark.parametrize("name", SHIPPED)
def test_2048_hosts_and_10000_steps_take_less_than_two_minutes_and_2_gb(pod, name):
    figures = json.loads(run_python("-c", PROGRAM, pod[name], HOSTS, STEPS).stdout)
    opening, seconds, memory = figures["run_with"]
    assert opening + seconds < 120 and memory < 2, figures["run_with"]
    if name in COUNTED:
        pipeline = load(pod[name])
        rows = read_rows(pipeline, STEPS)
        assert_counted(figures, rows)
        assert_divided(pipeline, STEPS, rows, HOSTS, range(0, HOSTS, 64))
        assert_each_once(pipeline, rows)
