"""Preparation as an Apache Beam pipeline, for any Beam runner: Dataflow, Flink, Spark, or the cores of this machine.

The output equals that of `run.prepare`, byte for byte, and each continues the other's unfinished work. Every worker needs
access to the inputs, the tokenizer and the output, in buckets or on a shared file system, and an installed grain_sft
(`--sdk_container_image` or `--requirements_file`). The DataflowRunner needs `apache-beam[gcp]`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from grain_sft import errors
from grain_sft.errors import MissingExtraError, PrepareError
from grain_sft.prepare import beam_steps as steps
from grain_sft.prepare.beam_steps import Outcome, Run
from grain_sft.prepare.records import inputs
from grain_sft.prepare.request import Request
from grain_sft.prepare.target import Target

LOCAL_RUNNERS = ("direct", "directrunner")
DATAFLOW_RUNNERS = ("dataflow", "dataflowrunner")


def prepare(
    request: Request,
    output: str | os.PathLike[str],
    *,
    pipeline_args: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the corpus that `request` describes to `output` with a Beam pipeline. See `run.prepare`.

    Args:
      request: Inputs, template, tokenizer and format.
      output: Folder that does not exist yet or is empty: local, or a URL such as `gs://bucket/name`.
      pipeline_args: Beam's options, such as `--runner=DataflowRunner`, `--project=...`. The default runner is the
        DirectRunner; `--direct_running_mode=multi_processing --direct_num_workers=0` lets it use all cores.
      overwrite: Whether to replace output or unfinished work of another request.

    Returns:
      The corpus's manifest; see `run.prepare`.

    Raises:
      RecordError: A record is bad and `request.on_error` is "stop". Names the first bad record in the inputs' order.
      PrepareError: Options are invalid or conflict, the output is of another request, or the pipeline failed.
      CorpusFileError: An input can't be read.
      StorageError: The output can't be written.
      MissingExtraError: apache-beam is not installed.
    """
    beam = _beam()
    options = _options(beam, pipeline_args)
    target = Target(output)
    target.check_writable()
    entries = inputs.list_inputs([dataset.paths for dataset in request.datasets])

    def attempt() -> Outcome:
        run = Run(request, target.output, overwrite, f"beam-{secrets.token_hex(8)}")
        try:
            run.save("inputs.json", entries)
            return _run(beam, options, run, len(inputs.plan_units(entries)))
        finally:
            target.forget(run.name)

    with target.locked():
        outcome = attempt()
        if outcome.replace:
            target.clear()
            outcome = attempt()
        if outcome.failure is not None:
            raise outcome.failure.to_error()
        if outcome.manifest.get("already"):
            target.discard()
        else:
            target.publish()
        return outcome.manifest


def build(beam: Any, pipeline: Any, run: Run, units: int) -> None:
    """Add the steps to a pipeline. A side input makes each step wait until the previous one is complete."""
    once = pipeline | "Once" >> beam.Create([None])
    scans = (
        pipeline
        | "Units" >> beam.Create([units])
        | "Each unit" >> beam.FlatMap(lambda units: range(units))
        | "Spread units" >> beam.Reshuffle()
        | "Scan" >> beam.Map(steps.scan, run)
    )
    failed = (
        once
        | "Begin" >> beam.FlatMap(steps.begin, run, beam.pvalue.AsIter(scans))
        | "Spread work" >> beam.Reshuffle()
        | "Render" >> beam.FlatMap(steps.render, run)
    )
    unwritten = (
        once
        | "Plan" >> beam.FlatMap(steps.plan, run, beam.pvalue.AsIter(failed))
        | "Spread tasks" >> beam.Reshuffle()
        | "Write" >> beam.FlatMap(steps.write, run)
    )
    _ = once | "Finish" >> beam.Map(steps.finish, run, beam.pvalue.AsIter(unwritten))


def _run(beam: Any, options: Any, run: Run, units: int) -> Outcome:
    """Run the pipeline and return its outcome."""
    is_local = str(options.get_all_options()["runner"]).lower() in LOCAL_RUNNERS
    quiet = _quiet() if is_local else contextlib.nullcontext()
    try:
        with quiet, beam.Pipeline(options=options) as pipeline:
            build(beam, pipeline, run, units)
    except errors.GrainSftError:
        raise
    except Exception as error:  # each runner raises its own exceptions, such as RuntimeError
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise PrepareError(
            f"the Beam pipeline failed ({type(error).__name__}: {last}). Start again to continue from there; the runner's "
            "own log says more."
        ) from error
    if (outcome := run.outcome()) is not None:
        return outcome
    raise PrepareError(
        f"the Beam pipeline ended without a result: {run.path('outcome.json')} is missing. Do its workers write to the "
        f"same {run.output}?"
    )


def _options(beam: Any, arguments: Sequence[str]) -> Any:
    """Return Beam's options; raise a `PrepareError` for unknown or invalid ones."""
    kinds = beam.options.pipeline_options
    options = kinds.PipelineOptions(list(arguments))
    standard, streaming, worker = map(
        options.view_as, (kinds.StandardOptions, kinds.StreamingOptions, kinds.WorkerOptions)
    )
    standard.runner = standard.runner or "DirectRunner"
    parsers: list[Any] = []
    printed = io.StringIO()
    try:
        with _quiet(), contextlib.redirect_stderr(printed):
            options.get_all_options(add_extra_args_fn=parsers.append)
            unknown = parsers[0].parse_known_args(list(arguments))[1]
    except SystemExit as error:  # argparse prints the whole usage first, then the error
        raise PrepareError(f"Beam's options: {printed.getvalue().strip().splitlines()[-1]}") from error
    runner = standard.runner.lower()
    if unknown and runner in (*LOCAL_RUNNERS, *DATAFLOW_RUNNERS):  # others ask a job server for theirs
        raise PrepareError(f"{' '.join(unknown)}: neither grain_sft nor Beam's {standard.runner} has such options.")
    if runner in DATAFLOW_RUNNERS and importlib.util.find_spec("google.cloud.dataflow") is None:
        raise MissingExtraError(
            "the DataflowRunner needs more of Beam, which is not installed: pip install 'apache-beam[gcp]'"
        )
    if getattr(standard, "no_wait_until_finish", False):
        raise PrepareError("--no_wait_until_finish: the corpus is renamed when the pipeline has ended.")
    if runner in LOCAL_RUNNERS:
        # without a compatibility version, Beam would download Prism, its new local runner
        streaming.update_compatibility_version = streaming.update_compatibility_version or beam.__version__
        worker.default_sdk_harness_log_level = worker.default_sdk_harness_log_level or "ERROR"
    return options


def _beam() -> Any:
    try:
        with _quiet():
            import apache_beam
            import apache_beam.options.pipeline_options
    except ImportError as error:
        raise MissingExtraError.of("a preparation by Beam", "apache-beam", "beam") from error
    return apache_beam


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Beam's log messages up to warnings, such as those about optional Google packages."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
