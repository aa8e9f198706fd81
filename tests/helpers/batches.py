"""Make configs and pipelines, and compare their batches."""

import contextlib
import copy
import functools
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
import yaml

import grain_sft
from grain_sft import Host, IndexSampler, NpyDataSource, Pipeline, ShiftTargets
from grain_sft.sampling import ORDERS

SHIFTED = (ShiftTargets(),)
SHARE = float(os.environ.get("GRAIN_SFT_EXAMPLES", "0.25"))


def examples(count: int) -> int:
    """Return how many of `count` examples a test tries: a quarter, or the share in GRAIN_SFT_EXAMPLES; at least 10."""
    return max(10, round(SHARE * count))


def sections(path: Any, length: int, *, corpus: Mapping[str, Any] = {}, layout: Any = "packed", **sampler: Any) -> dict:
    """Return a config of the corpus at `path`, by default packed, in the order `olmo`, seed 1, in batches of 4 rows.

    Args:
      path: Path of the corpus; None if `corpus` has the path or a mixture.
      layout: Kind of the layout, such as "windows", or the keys of its section.
      sampler: Keys of the section `sampler` that differ from these defaults.
    """
    return {
        "corpus": dict(corpus) if path is None else {"path": str(path), **corpus},
        "layout": {"sequence_length": length, **({"kind": layout} if isinstance(layout, str) else layout)},
        "sampler": {"order": "olmo", "seed": 1, "global_batch_size": 4, **sampler},
    }


def load(config: Any, host: Host = Host(0, 1)) -> Pipeline:
    return grain_sft.load(config, host=host)


def write_config(path: Path, config: Mapping[Any, Any]) -> Path:
    """Write a config as YAML or JSON, as the suffix of `path` says, and return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config) if path.suffix == ".json" else yaml.safe_dump(config))
    return path


def golden_values(name: str) -> Any:
    return json.loads((Path(__file__).parents[1] / "golden" / name).read_text())


def error_of(config: Any, host: Any = Host(0, 1)) -> str:
    with pytest.raises(grain_sft.GrainSftError) as error:
        load(config, host)
    return str(error.value)


def pipeline_of(
    layout: Any, transforms: Any = SHIFTED, *, host: Host = Host(0, 1), run: Mapping[str, Any] = {}, **sampler: Any
) -> Pipeline:
    """Return the pipeline of a layout, by default in the order `olmo`, seed 1, in batches of 4 rows.

    `run` has other arguments of the pipeline, such as `audit`.
    """
    source = NpyDataSource(layout)
    sampler = {"global_batch_size": 4, "seed": 1, "order": "olmo", **sampler}
    if ORDERS[sampler["order"]].by_cost:
        sampler["costs"] = layout.row_costs
    return Pipeline(source, IndexSampler(len(source), host=host, **sampler), transforms, **run)


def take(pipeline: Pipeline, start: int, stop: int, **options: Any) -> list[Mapping[str, Any]]:
    with contextlib.closing(pipeline.iter(start_step=start, **options)) as batches:
        return [next(batches) for _ in range(start, stop)]


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.dtype == other[key].dtype and array.shape == other[key].shape, key
        np.testing.assert_array_equal(array, other[key], err_msg=key)


def assert_one_run(load: Callable[[Host], Pipeline], steps: range, hosts: Sequence[int], worker_count: int = 0) -> None:
    """Check that `steps` have the same batches on each number of hosts, from a restored pickle, and in every iterator."""
    whole = load(Host(0, 1))
    expected = [whole[step] for step in steps]
    for count in hosts:
        for index in range(count):
            with contextlib.closing(load(Host(index, count)).iter(start_step=steps.start)) as part:
                sampler = load(Host(index, count)).sampler
                for batch in expected:
                    assert_same(next(part), {key: rows_of_host(sampler, array) for key, array in batch.items()})
    restored, start = pickle.loads(pickle.dumps(whole)).iter(), {"start_step": steps.start}
    restored.set_state(whole.iter(**start).get_state())
    iterators = [restored, whole.iter(**start, threads=0), iter(whole.data_loader(**start))]
    iterators += [whole.iter(**start, worker_count=worker_count)] if worker_count else []
    iterators += [iter(whole.data_loader(**start, worker_count=worker_count))] if worker_count else []
    for iterator in iterators:
        for batch in expected:
            assert_same(next(iterator), batch)
        getattr(iterator, "close", list)()
    for step, batch in zip(steps, expected, strict=True):
        assert_same(whole.dataset()[step], batch)


def rows_of_host(sampler: Any, rows: np.ndarray) -> np.ndarray:
    index, count = sampler.host.index, sampler.host.count
    return np.split(rows, count)[index] if sampler.consecutive_slots else rows[index::count]


def tokens_of_files(layout: Any) -> list[np.ndarray]:
    """Return the tokens of each shard, read by numpy alone. (Files of materialized rows also have other fields.)"""
    found = []
    for part in getattr(layout.corpus, "parts", [layout.corpus]):
        dtype = part.dtype if part.rows is None else part.rows.dtype(part.dtype)
        files = [np.fromfile(shard.path, dtype) for shard in part.shards]
        found += files if part.rows is None else [each["tokens"].reshape(-1) for each in files]
    return found


def assert_is_traced(found: Any, pipelines: Sequence[Pipeline], steps: range) -> None:
    """Check the lines of a trace, token by token, against the batches of `pipelines`, one for each host."""
    files, sampler, num_checked = tokens_of_files(pipelines[0].source.layout), pipelines[0].sampler, 0
    iterators = [pipeline.iter(start_step=steps.start, threads=0) for pipeline in pipelines]
    in_blocks = sampler.host_blocks or sampler.consecutive_slots
    for step in steps:
        batches = [next(each) for each in iterators]
        rows = [pipeline.sampler.rows(step) for pipeline in pipelines]
        hosts, per_host = sampler.host.count, len(rows[0])
        for slot in range(hosts * per_host):
            host, local = divmod(slot, per_host) if in_blocks else (slot % hosts, slot // hosts)
            lines = np.flatnonzero((found.step == step) & (found.row == slot))
            assert len(lines) and (found.host[lines] == host).all()
            assert (found.instance[lines] == rows[host][local]).all()
            batch = {key: array[local] for key, array in batches[host].items()}
            column = 0
            for line in lines.tolist():
                tokens = files[found.shard[line]][found.start[line] : found.stop[line]]
                end = column + len(tokens)
                shown = batch["inputs"][column:end]  # without columns that a transform drops
                assert (shown == tokens[: len(shown)]).all()
                if len(shown):
                    assert (batch["inputs_segmentation"][column:end] == found.segment[line]).all()
                targets = batch["targets_segmentation"][max(0, column - 1) : max(0, end - 1)]
                assert found.trainable[line] == np.count_nonzero(targets)
                column = end
            assert (batch["inputs_segmentation"][column:] == 0).all()
            num_checked += len(lines)
    assert num_checked == len(found)
    assert (np.diff(found.step * 1000 + found.row) >= 0).all()


def open_files(folder: Any) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the file was closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(link for link in found if link.startswith(str(folder)))


def rows_of_hosts(samplers: Sequence[Any], step: int) -> np.ndarray:
    return np.stack([each.rows(step) for each in samplers], axis=1).reshape(-1)


def put(config: dict, place: str, value: object) -> dict:
    """Return a copy of `config` with `value` at `place`, such as "sampler.seed"."""
    changed = copy.deepcopy(config)
    *sections, key = place.split(".")
    functools.reduce(dict.__getitem__, sections, changed)[key] = value
    return changed


class Applies(grain.transforms.Map):
    """A transform that applies a function to each batch."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def map(self, element: Any) -> Any:
        return self.function(element)


class Plain(grain.transforms.Map):
    """A user's transform without a repr."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def map(self, element: Any) -> Any:
        return element
