"""The model, compared with real processes that read from the emulator, 50 ms a request."""

import statistics

import pytest
from emulator import LENGTH, put_windows, slow_bucket, write_config

import grain_sft
from grain_sft.simulate import Conditions, measure_processes

pytest.importorskip("gcp_storage_emulator.server")


@pytest.mark.heavy
def test_eight_processes_measure_what_the_model_says(client, tmp_path):
    with slow_bucket(client, 0.05):
        index = put_windows(client)
        config = write_config(
            tmp_path / "config.json",
            corpus={"path": index},
            layout={"kind": "windows", "sequence_length": LENGTH},
            sampler={"order": "shuffle", "seed": 1, "global_batch_size": 64},
        )
        pipeline = grain_sft.load(config, host=grain_sft.Host(0, 1))
        real = measure_processes(pipeline, config, 8, range(0, 100), Conditions(latency_ms=50), 8)
    starts = [
        predicted["start_up_s"] / measured["start_up_s"]
        for measured, predicted in zip(real.measured[1:], real.predicted, strict=True)
    ]
    assert 0.8 <= statistics.median(starts) <= 1.25, starts
    assert max(real.errors[name] for name in ("requests", "received", "peak_mb")) <= 0.20, real.errors
