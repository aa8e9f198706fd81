"""`pack`, `report` and the batches have one number for one thing."""

import json

import numpy as np
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft import Host
from grain_sft.cli.main import main
from grain_sft.layout import padding_share
from grain_sft.layout.report import algorithm_title
from grain_sft.view import report as report_module

LENGTH, ROWS = 64, 8


def test_padding_is_the_same_in_pack_in_the_report_and_in_the_batches(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    write_olmo(tmp_path / "chats", documents(400, longest=60), part_tokens=10**9)
    config = {
        "corpus": {"path": str(tmp_path / "chats"), "dtype": "uint16", "eos_token_id": EOS},
        "layout": {"kind": "packed", "sequence_length": LENGTH, "algorithm": "multipack", "seed": 3, "epochs": 1},
        "sampler": {"order": "sequential", "seed": 3, "epochs": 1, "global_batch_size": ROWS},
    }
    pipeline = grain_sft.load(config, host=Host(0, 1))
    words = f"--dtype uint16 --eos-token-id {EOS} --sequence-length {LENGTH} --compare --batch-rows {ROWS} --seed 3 --output"
    assert main(["pack", str(tmp_path / "chats"), *words.split(), str(tmp_path / "pack.json")]) == 0
    packed_figures = json.loads((tmp_path / "pack.json").read_text())["algorithms"]
    shares = {each["algorithm"]: each["padding_share"] for each in packed_figures}
    reported = report_module.packing(pipeline)["algorithms"]
    assert {each["algorithm"]: each["padding_share"] for each in reported} == shares
    batches = list(pipeline.iter())
    held = sum(int(np.count_nonzero(batch["inputs_segmentation"])) for batch in batches)
    assert padding_share(held, sum(batch["inputs"].size for batch in batches)) == shares["multipack"]
    assert f"multipack x {ROWS}" in capsys.readouterr().out  # multipack's depends on the batch, so that is said
    assert algorithm_title(reported[0]) == reported[0]["algorithm"]
