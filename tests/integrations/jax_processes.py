"""Real jax.distributed processes on this machine. `run(...)` starts them, and each runs this file as its program.

A process takes jobs as JSON. For every case and step, it prints digests of the global arrays, gathered from all processes. For
every case, it prints how many bytes of token files it read.
"""

import functools
import hashlib
import json
import socket
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_sft import Host, load
from grain_sft.integrations.jax_arrays import GlobalBatches
from grain_sft.storage.activity import counts

LOCAL = "process-local data"
CASES = ("data", "data x sequence", "data x sequence over hosts", "data x model", "data x model over hosts", "columns")
"""Meshes, which divide rows and columns over devices. With "over hosts", the second axis (such as the sequence) is divided over
the processes, and the rows over the devices of each process."""
BY_4 = ("data x sequence by 4", "data x sequence by 4 over hosts")  # for 8 devices


def digest(array: Any) -> str:
    """Return the digest of an array's shape, dtype and bytes."""
    return hashlib.sha256(f"{array.shape}{array.dtype}".encode() + array.tobytes()).hexdigest()[:16]


def run(jobs: list[dict[str, Any]], processes: int, devices: int) -> list[list[dict[str, Any]]]:
    """Run jobs in processes with `devices` virtual devices each, and return the lines that each printed."""
    from python_runs import run_python  # which the processes themselves cannot import

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    variables = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}

    def process(index):
        found = run_python(__file__, json.dumps(jobs), port, index, processes, timeout=240, **variables).stdout
        return [json.loads(line) for line in found.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(processes) as threads:
        return list(threads.map(process, range(processes)))


def digests(pipeline: Any, steps: Iterable[int], num_rows: int = 0, order: Any = slice(None)) -> dict[int, Any]:
    """Return the digests of the arrays of each step, with rows in `order` and then rows of zeros up to `num_rows`."""

    def filled(array):
        return np.pad(array[order], ((0, max(0, num_rows - len(array))), (0, 0)))

    return {step: {key: digest(filled(array)) for key, array in sorted(pipeline[step].items())} for step in steps}


def check(printed: Any, expected: dict[int, Any], cases: Iterable[str], job: str = "") -> None:
    """Assert that every process printed the digests `expected`, by step, in each of `cases` of a job."""
    for lines in printed:
        steps = [line for line in lines if line["job"] == job and "step" in line]
        for case in cases:
            assert {line["step"]: line["digests"] for line in steps if line["case"] == case} == expected, case


def check_columns(printed: Any, jobs: Iterable[dict[str, Any]]) -> None:
    """Assert that every process printed the digests of step 0 of each job, with the columns in the order of the job."""
    for job in jobs:
        shards, expected = job["options"]["load_balanced_shards"], load(job["config"], host=Host(0, 1))[0]
        order = load_balanced(expected["inputs"].shape[1], shards) if shards > 1 else slice(None)
        digests = {key: digest(array[:, order]) for key, array in expected.items()}
        check(printed, {0: digests}, job["cases"], job["name"])


def load_balanced(length: int, shards: int) -> np.ndarray:
    """Return the columns in MaxText's load-balanced order: shard i has chunks i and 2 * shards - 1 - i."""
    chunks = np.split(np.arange(length), 2 * shards)
    return np.concatenate([np.concatenate([chunks[shard], chunks[-1 - shard]]) for shard in range(shards)])


def end_state(printed: Any) -> Any:
    """Return the state at the end of the job without a name, which must be the same in all processes and cases."""
    ends = [line for lines in printed for line in lines if line["job"] == "" and "state" in line]
    (state,) = {json.dumps(line["state"], sort_keys=True) for line in ends}
    return json.loads(state)


def sharding_of(case: str) -> Any:
    devices = np.array(jax.devices())
    kind, _, over_hosts = case.partition(" over ")
    # with "columns", every process holds a part of every row
    parts = {"data": 1, "columns": len(devices)}.get(kind, 4 if "by 4" in kind else 2)
    grid = devices.reshape(parts, -1).T if over_hosts else devices.reshape(-1, parts)
    return NamedSharding(Mesh(grid, ("data", "other")), PartitionSpec("data", None if "model" in kind else "other"))


def main(jobs: Any, port: int, index: int, count: int) -> None:
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    for job in jobs:
        run_job(job)


def run_job(job: dict[str, Any]) -> None:
    def digests(arrays: dict[str, Any], sharding: Any) -> dict[str, str]:
        gather = jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
        return {key: digest(np.asarray(gather(array))) for key, array in sorted(arrays.items())}

    def show(**line: Any) -> None:
        print(json.dumps({"job": job["name"], **line}), flush=True)

    if LOCAL in job["cases"]:  # each process loads its rows, and JAX joins the rows of all processes
        pipeline, sharding = load(job["config"]), sharding_of("data")
        assert pipeline.sampler.host == Host(jax.process_index(), jax.process_count())
        put = functools.partial(jax.make_array_from_process_local_data, sharding)
        for step in range(job["steps"]):
            arrays = {key: put(array) for key, array in pipeline[step].items()}
            show(case=LOCAL, step=step, digests=digests(arrays, sharding))
    for case in [case for case in job["cases"] if case != LOCAL]:
        pipeline, sharding = load(job["config"], host=Host(0, 1)), sharding_of(case)
        batches, before = GlobalBatches(pipeline, sharding, **job["options"]), counts["local_bytes"]
        if "state" in job:
            batches.set_state(job["state"])
        for _ in range(job["steps"]):
            step, rows = batches.next_step, batches.rows(batches.next_step).tolist()
            arrays = next(batches)
            assert all(array.sharding.is_equivalent_to(sharding, 2) for array in arrays.values())
            read = [block.columns for block in batches.blocks(step)]
            found = digests(arrays, sharding) if "digests" not in job else None
            show(case=case, step=step, reads=rows, columns=read, digests=found)
        show(case=case, state=batches.get_state())
        batches.close()
        unchecked = pipeline.first_steps.left  # how many further batches are checked for targets that take loss
        show(case=case, read_bytes=counts["local_bytes"] - before, unchecked=unchecked)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
