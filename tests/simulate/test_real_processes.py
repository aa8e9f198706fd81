"""`simulate` predicts the times of real processes, which read from the emulator with a latency of 50 ms."""

import concurrent.futures
import dataclasses
import os
import statistics
import time

import pytest
from batches import load, sections, write_config
from emulator import LENGTH, put_windows
from failing_proxy import before_emulator

from grain_sft import Host
from grain_sft.simulate import Conditions, measure_processes, simulate
from grain_sft.simulate.processes import run_host

pytestmark = pytest.mark.heavy
PROCESSES, STEPS = 8, range(100)
CONDITIONS = Conditions(latency_ms=50)


@pytest.fixture
def config(client, tmp_path):
    """The path of a config whose token files are in the emulator."""
    with before_emulator() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSSPEC_GS_TOKEN", "anon")
        proxy.latency = 0.05
        config = sections(put_windows(client), LENGTH, layout="windows", order="shuffle", global_batch_size=64)
        yield str(write_config(tmp_path / "config.json", config))


def test_times_of_eight_processes_one_after_the_other_are_predicted_within_20_percent(config):
    real = measure_processes(load(config), config, PROCESSES, STEPS, CONDITIONS, PROCESSES)
    print({name: f"{error:.1%}" for name, error in real.errors.items()})
    assert len(real.predicted) == PROCESSES
    assert max(real.errors.values()) <= 0.20, real.errors


def busy():
    """Return how many seconds this machine's cores have been busy since it booted, with any program."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def test_eight_processes_at_once_share_the_cores(config):
    """Eight processes start together, and their mean start-up is predicted. Cores that other programs use count as absent."""
    pipeline = load(config)
    real = measure_processes(pipeline, config, PROCESSES, STEPS, CONDITIONS, 3)
    before, began = busy(), time.time()
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        hosts = [Host(number, PROCESSES) for number in range(PROCESSES)]
        measured = list(pool.map(lambda host: run_host(config, host, range(16), CONDITIONS), hosts))
    seconds = time.time() - began
    others = (busy() - before - sum(each["open_cpu_s"] + each["cpu_s"] for each in measured)) / seconds
    cores = (len(os.sched_getaffinity(0)) - others) / PROCESSES
    real = real._replace(conditions=dataclasses.replace(real.conditions, cores=cores))
    predicted = simulate(pipeline, PROCESSES, STEPS, real=real)["start"]["seconds"]
    found = [each["start_up_s"] + each["delayed_s"] for each in measured]
    print(f"{cores:.3f} cores each: {predicted:.1f} s, measured {min(found):.1f} to {max(found):.1f} s")
    assert 0.8 <= predicted / statistics.mean(found) <= 1.25, (predicted, found, cores)
