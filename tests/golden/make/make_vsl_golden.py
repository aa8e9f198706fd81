"""Write olmo_vsl.json: the batches that the original OLMo-core's `NumpyVSLDataLoader` gives each rank, with the row filter on.

The file has for each run of `tests/helpers/vsl_corpora.py`: a digest of the token files, the number of batches of each bucket,
the digests [epoch][rank] of all batches, and the lengths of the first epoch's rows; or the exception of OLMo-core.

Needed: ai2-olmo-core 3.0.0 (with torch, CPU build), numpy 2.4.6.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from making import olmo_epoch, options, versions, write_json

from vsl_corpora import CORPORA, EOS, EPOCHS, PAD, RUNS, VslRun, batch_digest, write_corpus  # isort: skip


def olmo_vsl_loader(run: VslRun, paths: list[Path], work_dir: Path, rank: int) -> Any:
    from olmo_core.data import DataCollator, InstanceFilterConfig
    from olmo_core.data.data_loader import NumpyVSLDataLoader
    from olmo_core.data.numpy_dataset import NumpyVSLDataset, VSLCurriculumConfig, VSLCurriculumType

    grows = run.curriculum != "natural"
    curriculum = VSLCurriculumConfig(
        VSLCurriculumType(run.curriculum), run.num_cycles if grows else None, run.balanced if grows else None
    )
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "vocab_size": 60_000}
    lengths = {"max_sequence_length": run.longest, "min_sequence_length": run.shortest}
    named = {"dtype": np.dtype(CORPORA[run.corpus].dtype).type, "instance_filter_config": InstanceFilterConfig()}
    dataset = NumpyVSLDataset(*map(str, paths), curriculum=curriculum.build(), **ids, **lengths, **named)
    dataset.work_dir = work_dir
    dataset.prepare()
    of_run = {"global_batch_size": run.batch_tokens, "seed": run.seed, "shuffle": run.shuffle}
    ranks = {"dp_world_size": run.ranks, "dp_rank": rank, "fs_local_rank": 0, "num_threads": 0}
    return NumpyVSLDataLoader(dataset, collator=DataCollator(pad_token_id=PAD), work_dir=work_dir, **of_run, **ranks)


def batches(loader: Any, epoch: int) -> list[tuple[Any, Any]]:
    """Return (inputs, labels) of each batch of an epoch, counted from 1."""
    from olmo_core.data.utils import get_labels

    return [(batch["input_ids"].numpy(), get_labels(batch).numpy()) for batch in olmo_epoch(loader, epoch)]


def found_in(run: VslRun) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temp:
        paths = write_corpus(run.corpus, Path(temp))
        corpus = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]
        found: dict[str, Any] = {"corpus": corpus}
        try:
            loaders = [olmo_vsl_loader(run, paths, Path(temp) / "work", rank) for rank in range(run.ranks)]
            digests = [[batch_digest(batches(loader, 1 + epoch)) for loader in loaders] for epoch in range(EPOCHS)]
        except (ValueError, AssertionError, IndexError) as error:
            return {**found, "error": f"{type(error).__name__}: {error}"[:60]}
        found["batches"] = [count for _, count in loaders[0].batches_per_bucket]
        return {**found, "digests": [[one for one, _ in ranks] for ranks in digests], "lengths": digests[0][0][1]}


if __name__ == "__main__":
    out = options("the golden file of OLMo-core's variable-length dataset").out
    os.environ["OLMO_DATA_PREP_WORKERS"] = "1"
    made_by = versions("ai2-olmo-core", "numpy", "torch", "python")
    runs = {run.name: found_in(run) for run in RUNS}
    write_json(out / "olmo_vsl.json", {"made_by": made_by, "runs": runs}, compact=["runs"])
