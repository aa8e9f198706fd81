"""`prepare` makes a corpus from conversations or texts. `dry_run` renders a few records and writes nothing."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import GrainSftError, PrepareError, RecordError
from grain_sft.prepare.chunks import Contents
from grain_sft.prepare.job import Job, run_steps
from grain_sft.prepare.records import inputs
from grain_sft.prepare.render import Renderer
from grain_sft.prepare.request import Request
from grain_sft.prepare.target import Target
from grain_sft.prepare.templates import Rendered
from grain_sft.prepare.tokenizers import Tokenizer
from grain_sft.prepare.workers import Runner
from grain_sft.progress import Progress
from grain_sft.storage import files


def prepare(
    request: Request,
    output: str | os.PathLike[str],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make the corpus that `request` describes in the folder `output`, or resume an interrupted preparation.

    The same request makes the same bytes with any number of workers and interruptions. A local output folder appears only when
    the corpus is complete. Until then, a folder next to the output has the unfinished work.

    Args:
      request: Inputs, template, tokenizer and format.
      output: Folder that does not exist yet or is empty; local, or a URL such as `gs://bucket/name`.
      workers: Number of processes; by default one per core, or fewer for small inputs.
      overwrite: Whether to replace a corpus or unfinished work of another request.
      progress: Function that is called with the name of the work, the amount that is done, and the total amount.

    Returns:
      Manifest of the corpus, `prepare.json`: the request, the inputs, the tokenizer and the statistics of each split. If the
      corpus was finished before this call, nothing is written, and the manifest has one more item, "already": True.

    Raises:
      RecordError: A record is invalid, and `request.on_error` is "stop". The message has its file and line.
      PrepareError: Options conflict, or the output was made from other inputs or options. The message lists the differences.
      CorpusFileError: An input can't be read.
      StorageError: The output can't be written, or would replace an input.
    """
    if workers is not None:
        as_integer("workers", workers, 1, PrepareError)
    return make_corpus(request, output, Runner(workers), overwrite=overwrite, progress=progress)


def make_corpus(
    request: Request,
    output: str | os.PathLike[str],
    runner: Runner,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a corpus as `prepare` does. `runner` scans the inputs, renders the records and writes the corpus."""
    target = Target(output)
    target.check_writable()
    job = Job(request, (), target.output, ())
    job.render([])  # raises errors of the options, the tokenizer and the template before the inputs are read
    entries = inputs.list_inputs([dataset.paths for dataset in request.datasets], progress)
    files.check_inputs_stay(target.output, (entry.path for entry in entries))
    files.check_inputs_stay(target.rejected, (entry.path for entry in entries))
    planned = inputs.plan_units(entries)
    total = sum(unit.size for unit in planned)  # bytes
    scanned = run_steps("Scanning the inputs", runner.scan(entries, planned), total, progress, lambda unit: unit.size)
    job.inputs, units = inputs.assemble(entries, scanned)
    job.groups = inputs.grouped(job.inputs, units)

    def make() -> dict[str, Any]:
        """Render the groups that have no chunk, write the corpus, and return its manifest."""
        headers = job.chunks.existing_headers(len(job.groups))
        missing = [number for number, header in enumerate(headers) if header is None]
        done = total - sum(map(job.size_of, missing))
        try:
            run_steps("Rendering", runner.render(job, missing), total, progress, job.size_of, done)
        except GrainSftError as error:
            # A corrected request is refused while the unfinished work of this request exists. So the work is discarded if it
            # is of no use: the same request would fail again at the same bad record, or no chunk was rendered.
            if isinstance(error, RecordError) or not any(job.chunks.existing_headers(len(job.groups))):
                target.discard()
            raise
        with target.discarded_if_refused():
            plan = job.plan()
            tasks = job.format.tasks_of(plan)
        run_steps("Writing", runner.write(job, plan, tasks), len(tasks), progress)
        return job.finish(plan)

    return target.produce(job.identity, make, overwrite=overwrite)


def dry_run(request: Request, records: int) -> str:
    """Render the first records of the inputs. Write nothing.

    Args:
      request: Options of the preparation.
      records: Maximum number of records to read, 0 or more.

    Returns:
      Text to print: counts, the rejected records, and the first document, with a new line where loss begins or ends.

    Raises:
      GrainSftError: Options conflict, or an input or the tokenizer can't be read.
    """
    records = as_integer("records", records, 0, PrepareError)
    datasets = [dataset.paths for dataset in request.datasets]
    renderer = Renderer(request, ())
    good: list[Rendered] = []
    bad: list[str] = []
    contents = Contents()  # counts the dropped documents
    for path, line, raw in itertools.islice(inputs.all_records(datasets), records):
        try:
            [result] = renderer.render([renderer.read(raw)])
            if isinstance(result, RecordError):
                raise result
            good.append(result)
            renderer.add((0, line), result, contents)
        except RecordError as error:
            bad.append(f"  {path}:{line}: {error}")
    lengths = [len(document.tokens) for document in good]
    lines = [f"{len(good):,} of the first {len(good) + len(bad):,} records can be prepared; nothing was written."]
    if good:
        trainable = sum(int(np.count_nonzero(document.loss)) for document in good)
        lines.append(f"tokens     {sum(lengths):,}: {min(lengths):,} to {max(lengths):,} a document")
        lines.append(f"trainable  {trainable:,} ({trainable / max(1, sum(lengths)):.1%})")
    limit = request.max_length
    if limit is not None and request.long_documents == "cut":
        num_cut = sum(length > limit for length in lengths)
        lines.append(f"cut        {num_cut:,} documents are longer than {limit:,} tokens")
    lines += [f"dropped    {count:,}: {reason}" for reason, count in sorted(contents.dropped.items())]
    if bad:
        lines += [f"rejected   {len(bad):,}", *bad[:20]]
    if any(lengths):
        first = next(document for document in good if len(document.tokens))
        lines += ["the first document (| takes loss, . does not):", *_pieces(first, renderer.tokenizer)]
    return "\n".join(lines)


def _pieces(rendered: Rendered, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the lines of the first 40 parts of a document. A part ends where loss begins or ends.

    "|" marks a line with loss, "." marks a line without loss, and "⏎" marks a newline of the text.
    """
    borders = np.flatnonzero(np.diff(rendered.loss != 0)) + 1
    for part in np.split(np.arange(len(rendered.tokens)), borders)[:40]:
        text = tokenizer.decode(rendered.tokens[part].tolist())
        mark = "|" if rendered.loss[part[0]] else "."
        shown = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
        yield from (f"{mark} {line}" for line in shown.replace("\n", "⏎\n").removesuffix("\n").split("\n"))
