"""Write `maxtext/mmap*.json` and `megatron_cache/maxtext*`: batches of MaxText's readers `mmap_npy` and `mmap` over the files
of `tests/helpers/megatron_corpora.py`. Needed: maxtext 0.2.5 (Python 3.12).
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from making import options, versions, write_json
from maxtext.input_pipeline._mmap_datasource import create_mmap_source, get_mmap_npy_dataset
from maxtext.input_pipeline.grain_data_processing import _apply_mapdataset_transforms
from maxtext.input_pipeline.input_pipeline_utils import GenerateDocSegmentIds, MegatronSplitInputsTargets, Rekey, ShiftData
from megatron_corpora import EOD, FEW, KEPT, LENGTH, hashes_of, maxtext_runs, shuffled_runs, split_runs, write_prefixes


def dataset_of(folder: Path, run: dict[str, Any], host: int = 0, rows: int = 1) -> Any:
    length, weights = run.get("sequence_length", LENGTH), run["blend"][::2]
    blend = [folder / each if isinstance(each, str) else each for each in run["blend"]]
    segments = run.get("max_segments_per_row", 25)
    reset, mask = run.get("reset_attention_mask", True), run.get("eod_mask_loss", False)
    named = {"eod_id": EOD, "reset_attention_mask": reset, "eod_mask_loss": mask}
    named["min_segment_length"] = length // segments if segments and reset else 0
    sentences = "sentences" in run["blend"]
    if run["variant"] == "mmap":
        dataset = create_mmap_source(str(blend[0]), sentences, length, EOD)
        if "hosts" in run:
            dataset = _apply_mapdataset_transforms(dataset, True, run["seed"], run["epochs"], host, run["hosts"], 1, 1)
        dataset = dataset.map(Rekey({"inputs": "text", "targets": "text"})).map(GenerateDocSegmentIds(**named))
        return dataset.batch(rows).map(ShiftData(ignored_ids=[EOD], axis=1))
    if isinstance(weights[0], str):
        pattern = f"{folder / 'indices'}|{':'.join(map(str, blend))}"
    else:
        pairs = zip(blend[::2], blend[1::2], strict=True)
        pattern = ";".join(f"{folder / 'indices'}|{prefix},{weight}" for weight, prefix in pairs)
    dataset = get_mmap_npy_dataset(
        pattern, sentences, length, EOD, 1, 0, 1, 1, 1, str(folder / "indices"), None, "train", lambda dataset, *_: dataset,
        num_samples=run["num_samples"], seed=run.get("seed", 1234), blend_margin=100 * run.get("surplus", 0.005),
        split=run.get("split", run.get("document_split")),
        split_index=("train", "valid", "test").index(run.get("subset", run.get("document_subset", "train"))),
    )  # fmt: skip
    return dataset.map(MegatronSplitInputsTargets(**named)).batch(1)


if __name__ == "__main__":
    out = options("the golden files of MaxText's mmap readers").out
    made = versions("maxtext", "grain", "numpy", "python")
    for file, runs in (("mmap", maxtext_runs()), ("mmap_split", split_runs())):
        found = {}
        for name, run in runs.items():
            with tempfile.TemporaryDirectory() as temporary:
                write_prefixes(Path(temporary))
                batches = list(dataset_of(Path(temporary), run))
                for kept in ("maxtext", "maxtext_blend"):
                    if name == KEPT[kept]:
                        shutil.copytree(Path(temporary) / "indices", out / "megatron_cache" / kept, dirs_exist_ok=True)
                found[name] = {"samples": len(batches), **hashes_of(batches[:FEW])}
        write_json(out / f"maxtext/{file}.json", {**made, "cases": found}, compact=("cases",))
    shuffled = {}
    for name, run in shuffled_runs().items():
        with tempfile.TemporaryDirectory() as temporary:
            write_prefixes(Path(temporary))
            datasets = [dataset_of(Path(temporary), run, host, run["rows"]) for host in range(run["hosts"])]
            batches = [[each for each in dataset if len(each["inputs"]) == run["rows"]] for dataset in datasets]
            steps = min(map(len, batches))  # steps for which every host has a whole batch
            shuffled[name] = [{"batches": steps, **hashes_of(each[:steps])} for each in batches]
    write_json(out / "maxtext/mmap_shuffled.json", {**made, "cases": shuffled}, compact=("cases",))
