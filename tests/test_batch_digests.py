"""No change of the code changes a batch: digests of runs of every kind equal the recorded ones."""

import json

import batch_digests


def test_all_batches_equal_the_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    recorded = json.loads(batch_digests.GOLDEN.read_text())
    found = batch_digests.all_digests(tmp_path)
    assert {name: digest for name, digest in found.items() if recorded.get(name) != digest} == {}
    assert found.keys() == recorded.keys()
