"""Write `episode_batches.json` with the original episode-indexed loader of MyPT: orders of episodes, and whole batches.

The datasets are those of `tests/helpers/episode_corpora.py`. Needed: numpy, torch, and the file core/episode_data_loader.py of
chberclaz/MyPT at commit 844c03b5. This version keeps the last tokens of an episode and reads mask_weighted.bin. Run::

    python make_episode_golden.py MyPT/core/episode_data_loader.py
"""

import tempfile
import types
from pathlib import Path
from typing import Any

from making import import_file, options, versions, write_json

from episode_corpora import CHANGES, EOT, GPT_CONFIG, ORDER_CASES, OrderCase, write_dataset, write_numbered  # isort: skip

BATCHES = 9  # of each run; 9 batches are more than an epoch


def make(loader: Any, folder: Path, config: dict[str, Any]) -> Any:
    tokenizer = types.SimpleNamespace(special_tokens={"myPT_eot": EOT})
    settings = types.SimpleNamespace(device="cpu", **config)
    return loader(settings, tokenizer, dataset_dir=str(folder), pad_token_id=config["pad_token_id"])


def order_of(loader: Any, case: OrderCase) -> dict[str, Any]:
    """Return the episodes of the first batches, and the first ten episodes of three epochs, which the audit log prints."""
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
    with tempfile.TemporaryDirectory() as temp:
        made = make(loader, write_dataset(Path(temp), weighted=name == "weights"), {**GPT_CONFIG, **CHANGES[name]})
        found = [made.get_batch("train") for _ in range(BATCHES)]
    names = ("x", "y", "mask")
    return {key: [batch[at].tolist() for batch in found] for at, key in enumerate(names) if at < len(found[0])}


if __name__ == "__main__":
    given = options("episode_batches.json", "loader")
    loader = import_file(given.loader).GPTEpisodeDataLoader
    cases = [order_of(loader, case) for case in ORDER_CASES]
    runs = {name: batches_of(loader, name) for name in CHANGES}
    made = {"made_by": versions("numpy", "torch"), "cases": cases, "runs": runs}
    write_json(given.out / "episode_batches.json", made)
