"""Write `episode_batches.json` with the episode-indexed loader itself: orders of episodes, and batches in full.

The datasets are made by `tests/episode_corpora.py`, which the tests share. The file holds no code of the original and
is not needed to run the tests.

Needed: numpy, torch, and the loader's file, core/episode_data_loader.py of chberclaz/MyPT at commit 844c03b5 (the version
that keeps an episode's last tokens and reads mask_weighted.bin). For example::

    python make_episode_golden.py MyPT/core/episode_data_loader.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from episode_corpora import CHANGES, EOT, GPT_CONFIG, ORDER_CASES, OrderCase, write_dataset, write_numbered

BATCHES = 9  # of each run: more than an epoch


def import_loader(path: Path) -> Any:
    """The class of the original, from its file."""
    spec = importlib.util.spec_from_file_location("episode_data_loader", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPTEpisodeDataLoader


def make(loader: Any, folder: Path, config: dict[str, Any]) -> Any:
    """The loader of a trainer's config, called as its `train.py` does."""
    tokenizer = types.SimpleNamespace(special_tokens={"myPT_eot": EOT})
    settings = types.SimpleNamespace(device="cpu", **config)
    return loader(settings, tokenizer, dataset_dir=str(folder), pad_token_id=config["pad_token_id"])


def order_of(loader: Any, case: OrderCase) -> dict[str, Any]:
    """Episodes of the first batches, and the first ten of three epochs as the audit log prints them."""
    config = {**GPT_CONFIG, "batch_size": case.batch_size, "block_size": 2, "episode_min_tokens": 2}
    with tempfile.TemporaryDirectory() as temp:
        made = make(loader, write_numbered(Path(temp), case.episodes), {**config, "epoch_seed": case.epoch_seed})
        firsts: list[list[int]] = []
        batches = []
        for _ in range(case.batches):
            if made._epoch_state["train"]["epoch"] == len(firsts) < 3:
                firsts.append(made._epoch_state["train"]["order"][:10].tolist())
            batches.append(made.get_batch("train")[0][:, 0].tolist())
    found = {"episodes": case.episodes, "batch_size": case.batch_size, "epoch_seed": case.epoch_seed}
    return {**found, "first_episode_ids": firsts, "batches": batches}


def batches_of(loader: Any, name: str) -> dict[str, Any]:
    """x, y and mask of the first batches."""
    with tempfile.TemporaryDirectory() as temp:
        folder = write_dataset(Path(temp), weighted=name == "weights")
        made = make(loader, folder, {**GPT_CONFIG, **CHANGES[name]})
        found = [made.get_batch("train") for _ in range(BATCHES)]
    names = ("x", "y", "mask")
    return {key: [batch[at].tolist() for batch in found] for at, key in enumerate(names) if at < len(found[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write episode_batches.json.")
    parser.add_argument("loader", type=Path, help="the original's episode_data_loader.py")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    loader = import_loader(arguments.loader)
    made_by = {name: importlib.metadata.version(name) for name in ("numpy", "torch")}
    cases = ",\n".join(f"  {json.dumps(order_of(loader, case))}" for case in ORDER_CASES)
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(batches_of(loader, name))}" for name in CHANGES)
    text = f'{{\n "made_by": {json.dumps(made_by)},\n "cases": [\n{cases}\n ],\n "runs": {{\n{runs}\n }}\n}}\n'
    (arguments.out / "episode_batches.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
