"""Preparation of a corpus by Apache Beam pipelines, on any Beam runner: Dataflow, Flink, Spark, or this machine.

Three pipelines run in turn. The first scans the inputs: it counts their records and hashes their bytes. The second renders
chunk files (see `chunks.py`), and the third writes the corpus. `run.prepare` needs no Beam and writes the same bytes. Each of
the two functions `prepare` can continue the work of the other.

Every worker process of Beam needs an installed grain_sft (`--sdk_container_image` or `--requirements_file`), and access to the
inputs, the tokenizer and the output. The DataflowRunner needs `apache-beam[gcp]`.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from grain_sft.errors import GrainSftError, MissingExtraError, PrepareError, import_extra
from grain_sft.prepare.chunks import Header
from grain_sft.prepare.documents import ChunkDocuments
from grain_sft.prepare.job import Job, write_task
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.units import Input, Unit
from grain_sft.prepare.request import Request
from grain_sft.prepare.run import make_corpus
from grain_sft.prepare.target import Target
from grain_sft.prepare.workers import Failure, Runner
from grain_sft.prepare.writers import Plan, SplitStatistics, Task
from grain_sft.storage import files

# Spellings of `--runner`, in lower case.
LOCAL_RUNNERS = ("direct", "directrunner")
DATAFLOW_RUNNERS = ("dataflow", "dataflowrunner")

Result = tuple[int, Unit | None, Failure | None]
"""Result of a step: (number of its unit, group or task; unit that it scanned, or None; its failure, or None)."""


def prepare(
    request: Request, output: str | os.PathLike[str], *, pipeline_args: Sequence[str] = (), overwrite: bool = False
) -> dict[str, Any]:
    """Write the corpus that `request` describes to `output` with Beam pipelines.

    Args:
      request, output, overwrite: As in `run.prepare`.
      pipeline_args: Beam's options, such as `--runner=DataflowRunner`, `--project=...`. The default runner is the
        DirectRunner. With `--direct_running_mode=multi_processing --direct_num_workers=0`, the DirectRunner uses all cores.

    Returns:
      The corpus's manifest, as `run.prepare` returns it.

    Raises:
      PrepareError: Beam's options are invalid, or a pipeline failed.
      MissingExtraError: apache-beam is not installed, or the DataflowRunner is chosen without apache-beam[gcp].
      GrainSftError: As in `run.prepare`.
    """
    with _quiet():
        beam = import_extra("apache_beam", "a preparation by Beam", "apache-beam", "beam")
    options = _options(beam, pipeline_args)
    target = Target(output)
    name = f"beam-{secrets.token_hex(8)}"
    try:
        runner = Pipelines(workers=None, shared=files.join(target.work, name), beam=beam, options=options)
        return make_corpus(request, output, runner, overwrite=overwrite)
    finally:
        target.forget(name)  # removes the folder `shared`


@dataclasses.dataclass(frozen=True)
class Pipelines(Runner):
    """Runner that scans, renders and writes in Beam pipelines.

    All processes can read and write the folder `shared`, which has the job, the plan of the corpus, and the results of the
    steps. `workers` is None: Beam chooses the number of processes.
    """

    shared: str
    beam: Any  # the module apache_beam
    options: Any  # Beam's `PipelineOptions`

    def scan(self, entries: Sequence[Input], units: Sequence[Unit]) -> Iterable[Unit]:
        # Each item carries its input to a worker. `scan_unit` does not need the input's `parts`, which may be thousands.
        items = [(dataclasses.replace(entries[unit.input], parts=()), unit) for unit in units]
        return [unit for _, unit, _ in self.run("Scan", scan, items) if unit is not None]

    def render(self, job: Job, groups: Sequence[int]) -> Sequence[int]:
        save(files.join(self.shared, "job.json"), job)
        self.run("Render", render, groups)
        return groups

    def write(self, job: Job, plan: Plan, tasks: Sequence[Task]) -> Sequence[Task]:
        save(files.join(self.shared, "plan.json"), (job.headers, plan.statistics))
        with files.atomic_write(files.join(self.shared, "plan.npz"), "wb") as file:
            np.savez(file, lengths=plan.documents.lengths, **plan.splits)  # type: ignore[arg-type]
        self.run("Write", write, tasks)
        return tasks

    def run(self, name: str, step: Callable[[Any, str], Iterable[Result]], items: Sequence[Any]) -> list[Result]:
        """Call `step(item, shared)` for each item in a Beam pipeline called `name`.

        Return the results, sorted by number. If steps failed, raise the failure with the lowest number.
        """
        if not items:
            return []
        beam = self.beam
        path = files.join(self.shared, f"{name}.json")
        is_local = str(self.options.get_all_options()["runner"]).lower() in LOCAL_RUNNERS
        less_output = _quiet() if is_local else contextlib.nullcontext()
        try:
            with less_output, beam.Pipeline(options=self.options) as pipeline:
                spread_items = pipeline | "Items" >> beam.Create(items) | "Spread" >> beam.Reshuffle()
                results = spread_items | name >> beam.FlatMap(step, self.shared)
                # "Save" has a single item, the path, so one worker saves all results
                single_path = pipeline | "Once" >> beam.Create([path])
                _ = single_path | "Save" >> beam.Map(save, beam.pvalue.AsList(results))
        except GrainSftError:
            raise
        except Exception as error:  # each runner raises its own exceptions, such as RuntimeError
            problem = f"{type(error).__name__}: " + str(error).strip().rpartition("\n")[2]
            fix = "The runner's log may name the cause. Start again to continue"
            raise PrepareError(f"the Beam pipeline failed ({problem}). {fix}.") from error
        if not files.exists(path):
            raise PrepareError(f"{path}: missing after the Beam pipeline. Give an output that all workers can write to.")
        results = sorted(msgspec.json.decode(files.read_bytes(path), type=list[Result]), key=lambda result: result[0])
        for _, _, failure in results:
            if failure is not None:
                raise failure.to_error()
        return results


# The steps run on Beam's workers. Beam may run a step twice for one item, even on two machines at the same time. This is
# harmless: both runs write the same content, and each file is written atomically.

_lock = threading.RLock()
"""Lock for rendering and writing. A second thread would need memory, but would save no time."""


def scan(item: tuple[Input, Unit], shared: str) -> Iterator[Result]:
    """Count the records of a unit, and hash its bytes."""
    entry, unit = item
    yield _result(unit.number, lambda: inputs.scan_unit(entry, unit))


def render(number: int, shared: str) -> Iterator[Result]:
    """Render a group of units to its chunk. Do nothing if a group with a lower number has failed."""
    failed = files.join(shared, "failed")  # file with the number of a group that failed
    with _lock:
        # groups with lower numbers than a failed group are rendered, because `Pipelines.run` raises the failure with the lowest
        # number
        if not files.exists(failed) or int(files.read_bytes(failed)) >= number:
            _, _, failure = result = _result(number, lambda: _job(shared).make_chunk(number))
            if failure is not None:
                files.write_bytes(failed, b"%d" % number)
            yield result


def write(task: Task, shared: str) -> Iterator[Result]:
    """Write a part of the corpus."""
    with _lock:
        yield _result(task.number, lambda: write_task(_plan(shared), task))


def save(path: str, value: Any) -> None:
    """Write a value as JSON."""
    files.write_bytes(path, msgspec.json.encode(value))


def _result(number: int, step: Callable[[], Unit | None]) -> Result:
    """Return the result of a step. A GrainSftError becomes a failure, because Beam repeats a step that raises an error."""
    try:
        return number, step(), None
    except GrainSftError as error:
        return number, None, Failure.of(error)


@functools.lru_cache(1)  # the shared files do not change during a run
def _job(shared: str) -> Job:
    return msgspec.json.decode(files.read_bytes(files.join(shared, "job.json")), type=Job)


@functools.lru_cache(1)
def _plan(shared: str) -> Plan:
    job = _job(shared)
    content_type = tuple[tuple[Header, ...], dict[str, SplitStatistics]]
    headers, statistics = msgspec.json.decode(files.read_bytes(files.join(shared, "plan.json")), type=content_type)
    arrays = dict(np.load(io.BytesIO(files.read_bytes(files.join(shared, "plan.npz")))))
    documents = ChunkDocuments(job.chunks, headers, arrays.pop("lengths"))  # the other arrays are the splits
    return job.plan_of(documents, splits=arrays, statistics=statistics)


def _options(beam: Any, arguments: Sequence[str]) -> Any:
    """Return Beam's options. Raise a PrepareError if an option is unknown or invalid."""
    pipeline_options = beam.options.pipeline_options
    parsers: list[Any] = []
    printed = io.StringIO()
    try:
        with _quiet(), contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            options = pipeline_options.PipelineOptions(list(arguments))
            standard = options.view_as(pipeline_options.StandardOptions)
            standard.runner = standard.runner or "DirectRunner"
            options.get_all_options(add_extra_args_fn=parsers.append)  # appends Beam's parser of all options
            unknown = parsers[0].parse_known_args(list(arguments))[1]
    # argparse prints the whole usage to stderr first, then the error; for --help, it prints only to stdout
    except SystemExit as error:
        reason = printed.getvalue().strip().rpartition("\n")[2] or "--help does nothing here. Leave it out."
        raise PrepareError(f"Beam's options: {reason}") from error
    runner = standard.runner.lower()
    # other runners than these, such as Flink's, may take options that Beam's parser does not know
    if unknown and runner in (*LOCAL_RUNNERS, *DATAFLOW_RUNNERS):
        problem = f"neither grain_sft nor Beam's {standard.runner} has such options"
        raise PrepareError(f"{' '.join(unknown)}: {problem}. Leave them out.")
    if runner in DATAFLOW_RUNNERS:
        try:
            importlib.import_module("google.cloud.dataflow")
        except ImportError as error:
            raise MissingExtraError("DataflowRunner needs more of Beam. Run pip install 'apache-beam[gcp]'.") from error
    if getattr(standard, "no_wait_until_finish", False):
        raise PrepareError("--no_wait_until_finish: this process needs the results of its pipelines. Leave it out.")
    if runner in LOCAL_RUNNERS:
        # without a compatibility version, Beam would download Prism, its new local runner
        streaming = options.view_as(pipeline_options.StreamingOptions)
        streaming.update_compatibility_version = streaming.update_compatibility_version or beam.__version__
        worker = options.view_as(pipeline_options.WorkerOptions)
        worker.default_sdk_harness_log_level = worker.default_sdk_harness_log_level or "ERROR"
    return options


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings in the log, such as Beam's about missing Google packages."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
