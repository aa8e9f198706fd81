"""`build-sft-primer`, the command of the primer specification, writes the files, metadata and split that it specifies."""

import json
import random

import numpy as np
from prepared import save_trained, write_chats


def test_the_command_splits_with_pythons_random_and_writes_tokens_labels_and_metadata(tmp_path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    model = str(save_trained(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAIN_SFT_TOKENIZER", model.replace(str(tmp_path), "~"))
    write_chats(tmp_path / "data/primer.jsonl", 57)
    line = "build-sft-primer --primer-jsonl data/primer.jsonl --out-dir data/cache/sft --seed 7 --val-frac 0.25 --t-max 1024"
    printed = run_command(*line.split()).out
    folder = tmp_path / "data/cache/sft/primer"
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["source"], len(meta["tokenizer_sha256"])) == ("primer", 64)
    assert set(meta["special_token_ids"]) == {"sys", "usr", "asst", "eot"}
    assert (meta["val_frac"], meta["seed"], meta["T_max"]) == (0.25, 7, 1024)
    shuffled = list(range(1, 58))
    random.Random(7).shuffle(shuffled)
    for split, rows in (("val", shuffled[:14]), ("train", shuffled[14:])):  # floor(57 * 0.25)
        counts = meta["splits"][split]
        assert np.fromfile(folder / f"{split}_sources.bin", "<i8").reshape(-1, 2)[:, 1].tolist() == rows
        tokens, labels = (folder / f"{split}_{name}.bin" for name in ("input_ids", "labels"))
        assert (counts["num_examples"], counts["num_shards"]) == (len(rows), 1)
        assert counts["num_tokens"] == counts["shard_size"] == tokens.stat().st_size // 2 == labels.stat().st_size // 4
        assert counts["num_label_tokens"] == np.count_nonzero(np.fromfile(labels, "<i4") != -100)
        assert (folder / split / "shard_00000.bin").read_bytes() == tokens.read_bytes()
    assert "43 examples" in printed and "14 examples" in printed and "data/cache/sft/primer" in printed
    assert f"{meta['splits']['train']['num_tokens']:,} tokens" in printed
    monkeypatch.delenv("GRAIN_SFT_TOKENIZER")
    assert "nothing to do" in run_command(*line.split(), "--tokenizer", model).out
