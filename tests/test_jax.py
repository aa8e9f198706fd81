"""Under JAX: real processes under jax.distributed make the global arrays that one process makes."""

import numpy as np
import pytest
from jax_processes import run_processes

WORKER = """
import json, os, sys
folder, port, index, count, devices = sys.argv[1], *map(int, sys.argv[2:6])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import grain_sft

pipeline = grain_sft.load({
    "corpus": {"path": folder, "dtype": "uint32"},
    "layout": {"kind": "windows", "sequence_length": 32},
    "sampler": {"order": "olmo", "seed": 1, "global_batch_size": 8},
    "transforms": ["ngram_filter", "shift_targets"],
})
assert pipeline.sampler.host == grain_sft.Host(jax.process_index(), jax.process_count())
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
for step, batch in zip(range(7, 10), pipeline.iter(start_step=7)):
    arrays = {key: jax.make_array_from_process_local_data(sharding, value) for key, value in batch.items()}
    for key, array in sorted(arrays.items()):
        assert array.shape == (8, 32) and len(array.addressable_shards) == devices
        whole = np.asarray(gather(array))
        print(json.dumps({"step": step, "key": key, "rows": [row.tobytes().hex() for row in whole]}))
"""


def run(folder, processes, devices):
    """What every process printed; each with `devices` virtual devices."""
    return run_processes(["-c", WORKER, str(folder)], processes, devices, folder)


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        np.random.default_rng(number).integers(0, 1000, 32 * 20 + 3, np.uint32).tofile(tmp_path / f"{number}.npy")
    return tmp_path


def test_two_processes_make_the_global_arrays_of_one(folder):
    """Two processes of two devices each against one of four. JAX puts what a process holds side by side, and process
    h holds rows h, h + 2, ...: so rows 0, 2, 4, 6 come before 1, 3, 5, 7, and every row is the same to the byte."""
    (alone,) = run(folder, processes=1, devices=4)
    one, other = run(folder, processes=2, devices=2)
    assert one == other
    assert len(alone) == 3 * 6
    expected = [{**array, "rows": array["rows"][0::2] + array["rows"][1::2]} for array in alone]
    assert one == expected
    assert len({row for array in alone if array["key"] == "inputs" for row in array["rows"]}) == 3 * 8
