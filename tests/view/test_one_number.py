"""`pack`, `report` and `bench` say one number for one thing."""

import json

import numpy as np
import pytest
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft import Host
from grain_sft.bench import config as of_config
from grain_sft.bench import measuring, packed, stages, windows
from grain_sft.cli.main import main
from grain_sft.layout.report import algorithm_title, padding_share
from grain_sft.view import report_corpus

LENGTH, ROWS = 64, 8


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    write_olmo(tmp_path / "chats", documents(400, longest=60), part_tokens=10**9)
    config = {
        "corpus": {"path": str(tmp_path / "chats"), "dtype": "uint16", "eos_token_id": EOS},
        "layout": {"kind": "packed", "sequence_length": LENGTH, "algorithm": "multipack", "seed": 3, "epochs": 1},
        "sampler": {"order": "sequential", "seed": 3, "epochs": 1, "global_batch_size": ROWS},
    }
    return grain_sft.load(config, host=Host(0, 1))


def test_padding_is_the_same_in_pack_in_the_report_and_in_the_batches(pipeline, tmp_path, capsys):
    out = tmp_path / "pack.json"
    command = ["pack", tmp_path / "chats", "--dtype", "uint16", "--eos-token-id", EOS, "--sequence-length", LENGTH]
    command += ["--compare", "--batch-rows", ROWS, "--seed", 3, "--output", out]
    assert main([str(word) for word in command]) == 0
    shares = {each["algorithm"]: each["padding_share"] for each in json.loads(out.read_text())["algorithms"]}
    reported = report_corpus.packing(pipeline)["algorithms"]
    assert {each["algorithm"]: each["padding_share"] for each in reported} == shares
    batches = list(pipeline.iter())
    unpadded = sum(map(stages.num_unpadded, batches))
    assert unpadded == sum(int(np.count_nonzero(batch["inputs_segmentation"])) for batch in batches)
    assert padding_share(unpadded, sum(batch["inputs"].size for batch in batches)) == shares["multipack"]
    assert f"multipack x {ROWS}" in capsys.readouterr().out  # multipack's depends on the batch
    assert algorithm_title(reported[0]) == reported[0]["algorithm"]


def test_the_limit_copies_arrays_of_the_batch_each_once():
    shared = np.zeros((3, 8), np.int32)
    batch = {"inputs": np.ones((3, 8), np.int32), "a": shared, "b": shared, "weights": np.zeros((3, 8), np.float32)}
    copies = measuring.limit(batch)()
    assert [(array.shape, array.dtype.name) for array in copies] == [((3, 8), "int32")] * 2 + [((3, 8), "float32")]


def test_the_report_measures_the_limit_of_the_benchmarks(pipeline):
    figures = of_config.report_speed(pipeline, 0.01)
    assert figures["rows"][0]["name"] == measuring.LIMIT and figures["rows"][0]["of_limit"] == 1
    for module in (of_config, stages, windows, packed):
        assert module.limit is measuring.limit and module.LIMIT == measuring.LIMIT
