"""`Job`: the steps of a preparation (`grain-sft prepare`) after its inputs were scanned.

The job renders the records to chunk files, splits the documents, and writes the corpus and the manifest. All files are written
atomically, so a stopped job continues with the missing files.
"""

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from grain_sft.errors import PrepareError
from grain_sft.prepare.chunks import Chunks, Header
from grain_sft.prepare.documents import ChunkDocuments, Documents, Ids
from grain_sft.prepare.records.units import Unit
from grain_sft.prepare.render import Renderer
from grain_sft.prepare.request import VERSION
from grain_sft.prepare.splits import Splits, split
from grain_sft.prepare.target import MANIFEST, Target
from grain_sft.prepare.writers import FORMATS, Plan, SplitStatistics, Task
from grain_sft.progress import Progress
from grain_sft.storage import files

T = TypeVar("T")


@dataclasses.dataclass
class Job(Renderer):
    """Preparation of inputs. Worker processes receive the job as JSON.

    Attributes:
      output: Local or remote folder of the corpus.
      groups: Groups of units, () until the inputs are scanned. Each group is rendered to one chunk file.
    """

    output: str
    groups: tuple[tuple[Unit, ...], ...]

    @functools.cached_property
    def target(self) -> Target:
        return Target(self.output)

    @functools.cached_property
    def chunks(self) -> Chunks:
        return Chunks(self.target.chunks, self.key)

    def size_of(self, group: int) -> int:
        """Return the bytes of the units of a group, which is given by its index."""
        return sum(unit.size for unit in self.groups[group])

    @functools.cached_property
    def headers(self) -> tuple[Header, ...]:
        """Headers of all chunks, for use after all groups are rendered."""
        return self.chunks.headers(len(self.groups))

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """JSON object of all that decides the output. The manifest contains these items."""
        names = ("path", "size", "records", "digest")
        inputs = [{name: getattr(entry, name) for name in names} for entry in self.inputs]
        request, tokenizer = self.request.as_dict(), self.tokenizer.description()
        code = {"code": self.code} if self.code else {}
        return {"key": self.key, "request": request, "inputs": inputs, "tokenizer": tokenizer, **code}

    def make_chunk(self, group: int) -> None:
        """Render a group of units to its chunk, unless a chunk that can be read exists."""
        if not files.exists(self.chunks.path(group)) or self.chunks.header(group) is None:
            self.chunks.write(group, self.chunk(self.groups[group]))

    def plan(self) -> Plan:
        """Return the plan of the corpus after all groups are rendered. Raise a PrepareError if a split has no documents."""
        documents = ChunkDocuments(self.chunks, self.headers)
        splits = split(self._datasets(documents), documents.lengths, self.request, self.format.divided)
        for name, ids in splits.items():
            if not len(ids):
                raise PrepareError(f"no document is left for the split {name!r}: {self._outcome()}")
        return self.plan_of(documents, splits, {name: self._statistics(documents, ids) for name, ids in splits.items()})

    def _outcome(self) -> str:
        """Return the numbers of valid, dropped and rejected records, then the reason of the first rejection, as text."""
        counts = [f"{sum(header.records for header in self.headers)} valid records"]
        counts += [f"{count} dropped ({reason})" for reason, count in self._dropped().items()]
        counts.append(f"{self._count('rejected')} rejected")
        first = next((line for lines in self.chunks.rejected(self.headers) for line in lines.splitlines()), None)
        fix = "The first: {file}:{line}: {reason}".format_map(json.loads(first)) if first else "Give more records."
        return f"{', '.join(counts)}. {fix}"

    def plan_of(self, documents: ChunkDocuments, splits: Splits, statistics: Mapping[str, SplitStatistics]) -> Plan:
        """Return the plan of documents that are already split and counted."""
        return Plan(
            folder=self.target.stage,
            request=self.request,
            tokenizer=self.identity["tokenizer"],
            documents=documents,
            splits=splits,
            statistics=statistics,
            binary=all(header.binary for header in documents.headers),
            source_names=[entry.path for entry in self.inputs],
            tool_calls=self.template.tool_calls,
            masked=self.template.masked or self.format.of_pairs,  # the prompt of a pair takes no loss
        )

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Write the rejected records, the metadata, the tokenizer and the manifest. Return the manifest."""
        # with on_error="stop", there are no rejected records, so a file that an earlier preparation left becomes empty
        if self.request.on_error == "skip" or files.exists(self.target.rejected):
            with files.atomic_write(self.target.rejected, "wb") as file:
                file.writelines(self.chunks.rejected(self.headers))
        names = ("rejected", "without_final_eos", "with_inner_eos")
        counts = {"dropped": self._dropped(), **{name: self._count(name) for name in names}}
        if text_bytes := self._count("text_bytes"):
            counts["text"] = {"bytes": text_bytes, "tokens": self._count("text_tokens")}
        return finish(plan, self.identity, self.tokenizer.files(), counts)

    def _count(self, name: str) -> int:
        return sum(header.counts.get(name, 0) for header in self.headers)

    def _dropped(self) -> dict[str, int]:
        counts = sum((collections.Counter(header.dropped) for header in self.headers), collections.Counter[str]())
        return dict(sorted(counts.items()))

    def _datasets(self, documents: Documents) -> list[Ids]:
        """Return the ids of the documents of each dataset. All units of a group are of one dataset."""
        dataset_of_group = np.array([self.inputs[units[0].input].dataset for units in self.groups], np.int64)
        # number of each dataset's first group, then the number of all groups
        first_groups = np.searchsorted(dataset_of_group, np.arange(len(self.request.datasets) + 1))
        first_documents = documents.firsts[first_groups].tolist()
        dtype = np.int32 if len(documents.lengths) < 1 << 31 else np.int64
        return [np.arange(start, stop, dtype=dtype) for start, stop in itertools.pairwise(first_documents)]

    def _statistics(self, documents: ChunkDocuments, ids: Ids) -> SplitStatistics:
        """Return the statistics of the documents `ids`. A document that occurs twice in `ids` is counted twice."""
        # how often each document occurs in `ids`
        occurrences = np.bincount(ids, minlength=len(documents.lengths))
        totals = np.zeros(5, np.int64)  # in the order of the fields of `SplitStatistics` after `documents`
        of_chunks = np.split(occurrences, documents.firsts[1:-1])
        for times, records in zip(of_chunks, self.chunks.records(documents.headers), strict=True):
            cut = records["cut"]
            columns = (records["length"], records["trainable"], cut > 0, cut, records["cut_trainable"])
            totals += [times @ column for column in columns]
        return SplitStatistics(len(ids), *totals.tolist())


def run_steps(
    what: str,
    steps: Iterable[T],
    total: int,
    progress: Progress | None,
    size: Callable[[T], int] = lambda step: 1,
    done: int = 0,
) -> list[T]:
    """Return the items of `steps` as a list. Report the progress before the first step and after each step.

    Args:
      what: Name of the work.
      steps: Iterable that does a step of the work, then yields the item of the step.
      total: Size of all steps, including those that an earlier run did.
      progress: Function of `what`, the size of the finished steps, and `total`.
      size: Function that returns the size of a step from the item of the step.
      done: Size of the steps that an earlier run did, which are not in `steps`.
    """
    report = progress or (lambda what, done, total: None)
    report(what, done, total)
    finished = []
    for step in steps:
        finished.append(step)
        done += size(step)
        report(what, done, total)
    return finished


def write_tasks(plan: Plan, tasks: Iterable[Task]) -> Iterator[Task]:
    """Write the files of each task, then yield the task."""
    for task in tasks:
        write_task(plan, task)
        yield task


def write_task(plan: Plan, task: Task) -> None:
    """Write the files of a task."""
    format = FORMATS[plan.request.format]
    with format.errors_of("write", plan.request.format):
        format.write(plan, task)


def finish(
    plan: Plan, identity: Mapping[str, Any], tokenizer: Mapping[str, bytes], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the metadata and the tokenizer's files, then the manifest. Return the manifest.

    `tokenizer` has the content of the tokenizer's files by name. `counts` has more items of the manifest, such as "dropped".
    """
    FORMATS[plan.request.format].finish_written(plan)
    for name, data in tokenizer.items():
        files.write_bytes(plan.path("tokenizer", name), data)
    splits = msgspec.to_builtins(plan.statistics)
    manifest = {"format": plan.request.format, "version": VERSION, **identity, "splits": splits, **counts}
    plan.write_json(MANIFEST, manifest)
    return manifest
