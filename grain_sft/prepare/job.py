"""Job: one preparation from its inputs to a finished corpus, in steps that any runner may carry out.

The steps: `scan` the units (in any order), `begin`, `render` the units (in any order), `plan`, write the plan's tasks
(in any order), `finish`. Each step's result is a file that appears whole, so a job that was stopped continues where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import PrepareError
from grain_sft.prepare.chunks import DROPPED, Chunks, Header
from grain_sft.prepare.documents import ChunkDocuments, Documents, Ids
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.inputs import Input, Unit
from grain_sft.prepare.render import Renderer
from grain_sft.prepare.request import VERSION, Request, hash_of
from grain_sft.prepare.splits import Splits, split
from grain_sft.prepare.target import MANIFEST, Target
from grain_sft.prepare.writers import FORMATS, Format, Plan, SplitStatistics
from grain_sft.storage import files


@dataclasses.dataclass(frozen=True)
class Job(Renderer):
    """A preparation whose inputs have been scanned; JSON between processes.

    Attributes:
      output: Folder of the corpus.
      units: Units of all inputs.
      firsts: Number of each unit's first record in its input.
      input_digests: Hashes of the inputs' contents.
      input_records: Lines or rows of each input.
    """

    output: str
    units: tuple[Unit, ...]
    firsts: tuple[int, ...]
    input_digests: tuple[str, ...]
    input_records: tuple[int, ...]

    @classmethod
    def of(cls, request: Request, output: str, entries: Sequence[Input], units: Sequence[Unit]) -> Job:
        """Return the job of a request, from all its units, scanned."""
        most = FORMATS[request.format].max_seed
        if most is not None and request.seed > most:
            raise PrepareError(f"seed={request.seed}: expected at most {most} for format {request.format}.")
        records = [0] * len(entries)
        firsts = []
        for unit in units:
            firsts.append(records[unit.input] + 1)
            records[unit.input] += unit.records
        hashes = inputs.digests(units, entries)
        job = cls(request, tuple(entries), "", output, tuple(units), tuple(firsts), tuple(hashes), tuple(records))
        _ = job.template  # which may be unknown
        decisive = [request.as_dict(), [entry.path for entry in entries], hashes, job.tokenizer.sha256]
        return dataclasses.replace(job, key=hash_of(decisive))

    @functools.cached_property
    def target(self) -> Target:
        return Target(self.output)

    @property
    def format(self) -> Format:
        return FORMATS[self.request.format]

    @functools.cached_property
    def chunks(self) -> Chunks:
        """Folder of rendered units."""
        return Chunks(self.target.chunks, self.key)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides the output, as JSON, for comparison with later runs."""
        described = [
            {"path": entry.path, "size": entry.size, "records": records, "digest": digest}
            for entry, digest, records in zip(self.inputs, self.input_digests, self.input_records, strict=True)
        ]
        tokenizer = json.loads(json.dumps(self.tokenizer.description()))
        return {"key": self.key, "request": self.request.as_dict(), "inputs": described, "tokenizer": tokenizer}

    def render_unit(self, unit: Unit) -> bytes:
        """Return a unit's chunk."""
        return self.chunk(unit, self.firsts[unit.number])

    def plan(self, headers: Sequence[Header]) -> Plan:
        """Return the plan of the corpus from the `headers` of all chunks; refuse one without documents."""
        documents = self.documents(headers)
        splits = split(self._datasets(documents), documents.lengths, self.request, self.format.rule)
        for name, ids in splits.items():
            if not len(ids):
                rejected = [entry for header in self.chunks.headers(len(self.units)) for entry in header.rejected]
                counts = [f"{count} dropped ({reason})" for reason, count in self._dropped(headers).items()]
                first = "".join(f" The first: {bad['file']}:{bad['line']}: {bad['reason']}" for bad in rejected[:1])
                raise PrepareError(
                    f"no document is left for the split {name!r}: {len(documents.lengths)} valid records, "
                    f"{', '.join([*counts, f'{len(rejected)} rejected'])}.{first}"
                )
        plan = self.plan_of(documents, splits, {name: self._count(documents, ids) for name, ids in splits.items()})
        self.format.check(plan)
        return plan

    def headers(self) -> tuple[Header, ...]:
        """Return the headers of all chunks, without rejected records."""
        return tuple(dataclasses.replace(header, rejected=()) for header in self.chunks.headers(len(self.units)))

    def documents(self, headers: Sequence[Header], lengths: npt.NDArray[Any] | None = None) -> ChunkDocuments:
        """Return the documents of the chunks with these headers."""
        return ChunkDocuments(self.chunks, headers, [unit.input for unit in self.units], lengths)

    def plan_of(self, documents: ChunkDocuments, splits: Splits, statistics: Mapping[str, SplitStatistics]) -> Plan:
        """Return the plan of a corpus of these documents, which were divided and counted before."""
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
        )

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Write metadata, tokenizer and rejected records, and then the manifest, which is returned."""
        headers = self.chunks.headers(len(self.units))
        rejected = [entry for header in headers for entry in header.rejected]
        if self.request.on_error == "skip":
            with files.atomic_write(self.target.rejected) as file:
                file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rejected)
        counts = {
            "dropped": self._dropped(headers),
            "rejected": len(rejected),
            "without_final_eos": sum(header.unended for header in headers),
            "with_inner_eos": sum(header.inner_eos for header in headers),
        }
        return finish(plan, self.identity, self.tokenizer.files(), counts)

    def _dropped(self, headers: Sequence[Header]) -> dict[str, int]:
        """Return the number of dropped records by reason."""
        counts = np.zeros(len(DROPPED), np.int64)
        for records in self.chunks.records(headers):
            counts += np.bincount(records["dropped"], minlength=len(DROPPED))
        names = [text.format(min_tokens=self.template.min_tokens) for text in DROPPED]
        return {name: int(count) for name, count in zip(names[1:], counts[1:], strict=True) if count}

    def _datasets(self, documents: Documents) -> list[Ids]:
        """Return the documents of each dataset, in order."""
        dataset_of = np.array([self.inputs[unit.input].dataset for unit in self.units], np.int64)
        dtype = np.int32 if len(documents.lengths) < 1 << 31 else np.int64
        borders = np.searchsorted(dataset_of, np.arange(len(self.request.datasets) + 1))
        return [np.arange(*bounds, dtype=dtype) for bounds in itertools.pairwise(documents.firsts[borders].tolist())]

    def _count(self, documents: ChunkDocuments, ids: Ids) -> SplitStatistics:
        """Return the statistics of the documents `ids`; a document that occurs twice counts twice."""
        times = np.zeros(len(documents.lengths), np.uint32)
        np.add.at(times, ids, 1)
        totals = np.zeros(5, np.int64)
        for unit, records in enumerate(self.chunks.records(documents.headers)):
            weight = times[documents.firsts[unit] : documents.firsts[unit + 1]].astype(np.int64)
            length, trainable, cut, cut_trainable = (
                records[name] for name in ("length", "trainable", "cut", "cut_trainable")
            )
            totals += [int((column * weight).sum()) for column in (length, trainable, cut > 0, cut, cut_trainable)]
        return SplitStatistics(len(ids), *totals.tolist())


def finish(
    plan: Plan, identity: Mapping[str, Any], tokenizer: Mapping[str, bytes], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write metadata and the tokenizer's files, and then the manifest with `counts`, which is returned."""
    FORMATS[plan.request.format].finish(plan)
    for name, data in tokenizer.items():
        files.write_bytes(plan.path("tokenizer", name), data)
    splits = msgspec.to_builtins(plan.statistics)
    manifest = {"format": plan.request.format, "version": VERSION, **identity, "splits": splits, **counts}
    plan.write_json(MANIFEST, manifest)
    return manifest
