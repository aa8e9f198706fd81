"""Functions of the scripts that make golden files: values that an original system, such as OLMo-core, computed."""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(GOLDEN.parent / "helpers")]  # the corpora that tests use, too


def options(about: str, *paths: str) -> argparse.Namespace:
    """Return the arguments of a script's command line: `--out` and `paths`. A path like "--name" is a required option."""
    parser = argparse.ArgumentParser(description=f"Write {about}.")
    for path in paths:
        parser.add_argument(path, type=Path, **({"required": True} if path.startswith("-") else {}))
    parser.add_argument("--out", type=Path, default=GOLDEN)
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages. The name "python" means Python itself."""
    found = {name: importlib.metadata.version(name) for name in packages if name != "python"}
    return found | ({"python": platform.python_version()} if "python" in packages else {})


def import_file(path: Path) -> ModuleType:
    """Import a file of an original system, which need not be installed. Return its module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_json(path: Path, value: Mapping[str, Any], compact: Iterable[str] = ()) -> None:
    """Write JSON, one line for each key and each entry of a list, "cases" or "runs". Values of `compact` have no spaces."""
    parts = []
    for key, item in value.items():
        separators = (",", ":") if key in compact else None
        text = json.dumps(item, separators=separators)
        if isinstance(item, list):
            text = "[\n  " + ",\n  ".join(json.dumps(each, separators=separators) for each in item) + "\n ]"
        elif key in ("cases", "runs"):
            lines = (f"  {json.dumps(name)}: {json.dumps(each, separators=separators)}" for name, each in item.items())
            text = "{\n" + ",\n".join(lines) + "\n }"
        parts.append(f' "{key}": {text}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    print(path.name, path.stat().st_size, "bytes")


def olmo_windows(paths: Iterable[object], length: int, dtype: Any, **named: Any) -> Any:
    from olmo_core.data import NumpyFSLDataset

    ids = {"pad_token_id": 0, "eos_token_id": 0, "vocab_size": 2**31}
    return NumpyFSLDataset(*map(str, paths), sequence_length=length, dtype=dtype, **(ids | named))


def olmo_epoch(loader: Any, epoch: int) -> list[Any]:
    """Return the batches of an epoch of OLMo-core's loader. The first epoch is 1."""
    loader.reshuffle(epoch=epoch)
    batches = list(loader)
    loader.reset()
    return batches


def olmo_loader(dataset: Any, work_dir: Path, *, batch: int, seed: int, ranks: int = 1, rank: int = 0) -> Any:
    """Return OLMo-core's loader of one rank; `batch` is the global batch size in instances."""
    from olmo_core.data import DataCollator, NumpyFSLDataLoader

    named = {"work_dir": str(work_dir), "seed": seed, "dp_world_size": ranks, "dp_rank": rank, "fs_local_rank": 0}
    tokens = batch * dataset.sequence_length
    return NumpyFSLDataLoader(dataset, collator=DataCollator(pad_token_id=0), global_batch_size=tokens, **named)
