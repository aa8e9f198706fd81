"""Job: one preparation from its inputs to a finished corpus, in steps that any runner may carry out.

The steps: `scan` the units (in any order), `begin`, `render` the units (in any order), `plan`, write the plan's tasks
(in any order), `finish`. Each step's result is a file that appears whole, so a job that was stopped continues where it was.
No step depends on the others' order, so every runner makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from grain_sft.errors import PrepareError
from grain_sft.prepare import chunks
from grain_sft.prepare.chunks import Chunks, Header
from grain_sft.prepare.documents import Documents, Ids, Table
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.inputs import Input, Scan, Unit
from grain_sft.prepare.render import Renderer, Work
from grain_sft.prepare.request import VERSION, Request, hash_of
from grain_sft.prepare.splits import Splits, split
from grain_sft.prepare.target import MANIFEST, Target
from grain_sft.prepare.writers import FORMATS, Format, Plan, SplitStatistics
from grain_sft.storage import files


@dataclasses.dataclass(frozen=True)
class Job:
    """A preparation whose inputs have been scanned.

    Attributes:
      work: Request, inputs and key.
      target: Folder of the corpus.
      units: Units of all inputs.
      firsts: Number of each unit's first record in its input.
      input_digests: Hashes of the inputs' contents.
      input_records: Lines or rows of each input.
    """

    work: Work
    target: Target
    units: tuple[Unit, ...]
    firsts: tuple[int, ...]
    input_digests: tuple[str, ...]
    input_records: tuple[int, ...]

    @classmethod
    def of(
        cls, request: Request, target: Target, entries: Sequence[Input], units: Sequence[Unit], scans: Sequence[Scan]
    ) -> Job:
        """Return the job of a request, from the scans of all its units.

        Raises:
          PrepareError: The template or format is unknown, or doesn't fit the request.
          GrainSftError: The tokenizer can't be loaded.
        """
        most = FORMATS[request.format].max_seed
        if most is not None and request.seed > most:
            raise PrepareError(f"seed={request.seed}: expected at most {most} for format {request.format}.")
        records = [0] * len(entries)
        firsts = []
        for unit, scan in zip(units, scans, strict=True):
            firsts.append(records[unit.input] + 1)
            records[unit.input] += scan.records
        hashes = inputs.digests(units, scans, entries)
        work = Work(request, tuple(entries), "")
        _ = work.template
        paths = [entry.path for entry in entries]
        key = hash_of([request.as_dict(), paths, hashes, work.tokenizer.sha256])
        work = dataclasses.replace(work, key=key)
        scanned = tuple(dataclasses.replace(unit, digest=scan.digest) for unit, scan in zip(units, scans, strict=True))
        return cls(work, target, scanned, tuple(firsts), tuple(hashes), tuple(records))

    @property
    def format(self) -> Format:
        """Format of the corpus."""
        return FORMATS[self.work.request.format]

    @property
    def chunks(self) -> Chunks:
        """Folder of rendered units."""
        return Chunks(self.target.chunks, self.work.key)

    def identity(self) -> dict[str, Any]:
        """Return all that decides the output, as JSON, for comparison with later runs."""
        described = [
            {"path": entry.path, "size": entry.size, "records": records, "digest": digest}
            for entry, digest, records in zip(self.work.inputs, self.input_digests, self.input_records, strict=True)
        ]
        tokenizer = json.loads(json.dumps(self.work.tokenizer.description()))
        request = self.work.request.as_dict()
        return {"key": self.work.key, "request": request, "inputs": described, "tokenizer": tokenizer}

    def render(self, unit: Unit, renderer: Renderer) -> None:
        """Write a unit's chunk, unless it exists."""
        if self.chunks.header(unit.number) is None:
            self.chunks.write(unit.number, renderer.chunk(unit, self.firsts[unit.number]))

    def plan(self) -> Plan:
        """Return the plan of the corpus, when all units are rendered.

        Raises:
          PrepareError: No document is left, or the format can't hold them.
        """
        table = Table.of(self.chunks, len(self.units))
        splits = split(self._datasets(table), table.lengths, self.work.request, self.format.rule)
        statistics = {name: self._count(table, ids) for name, ids in splits.items()}
        plan = self.plan_of(table, splits, statistics, all(header.binary for header in table.headers))
        for name, ids in splits.items():
            if not len(ids):
                rejected = [entry for header in table.headers for entry in header.rejected]
                dropped = [f"{count} dropped ({reason})" for reason, count in self._dropped(table.headers).items()]
                first = "".join(
                    f" The first: {entry['file']}:{entry['line']}: {entry['reason']}" for entry in rejected[:1]
                )
                raise PrepareError(
                    f"no document is left for the split {name!r}: {len(table.lengths)} valid records, "
                    f"{', '.join([*dropped, f'{len(rejected)} rejected'])}.{first}"
                )
        self.format.check(plan)
        return plan

    def plan_of(self, table: Table, splits: Splits, statistics: dict[str, SplitStatistics], binary: bool) -> Plan:
        """Return the plan with these splits of the documents in `table`."""
        return Plan(
            folder=self.target.stage,
            request=self.work.request,
            tokenizer=self.identity()["tokenizer"],
            documents=Documents(self.chunks, table, [unit.input for unit in self.units]),
            splits=splits,
            statistics=statistics,
            binary=binary,
            source_names=[entry.path for entry in self.work.inputs],
            tool_calls=self.work.template.tool_calls,
        )

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Write metadata, tokenizer and rejected records, and then the manifest, which is returned."""
        self.format.finish(plan)
        for name, data in self.work.tokenizer.files().items():
            files.write_bytes(plan.path("tokenizer", name), data)
        headers = self.chunks.headers(len(self.units))
        rejected = [entry for header in headers for entry in header.rejected]
        manifest = {
            "format": self.work.request.format,
            "version": VERSION,
            **self.identity(),
            "splits": msgspec.to_builtins(plan.statistics),
            "dropped": self._dropped(headers),
            "rejected": len(rejected),
            "without_final_eos": sum(header.unended for header in headers),
            "with_inner_eos": sum(header.inner_eos for header in headers),
        }
        if self.work.request.on_error == "skip":
            with files.atomic_write(self.target.rejected) as file:
                file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rejected)
        plan.write_json(MANIFEST, manifest)
        return manifest

    def _dropped(self, headers: Sequence[Header]) -> dict[str, int]:
        """Return the number of dropped records by reason."""
        counts = np.zeros(len(chunks.DROPPED), np.int64)
        for records in self.chunks.records(headers):
            counts += np.bincount(records["dropped"], minlength=len(chunks.DROPPED))
        names = [text.format(min_tokens=self.work.template.min_tokens) for text in chunks.DROPPED]
        return {name: int(count) for name, count in zip(names[1:], counts[1:], strict=True) if count}

    def _datasets(self, table: Table) -> list[Ids]:
        """Return the documents of each dataset, in order."""
        dataset_of = np.array([self.work.inputs[unit.input].dataset for unit in self.units], np.int64)
        found = []
        for dataset in range(len(self.work.request.datasets)):
            units = np.flatnonzero(dataset_of == dataset)
            bounds = (int(table.first[units[0]]), int(table.first[units[-1] + 1])) if len(units) else (0, 0)
            found.append(np.arange(*bounds, dtype=np.int32 if len(table.lengths) < 1 << 31 else np.int64))
        return found

    def _count(self, table: Table, ids: Ids) -> SplitStatistics:
        """Return the statistics of the documents `ids`; a document that occurs twice counts twice."""
        times = np.zeros(len(table.lengths), np.uint32)
        np.add.at(times, ids, 1)
        totals = dict.fromkeys(("length", "trainable", "cut", "cut_trainable"), 0)
        truncated = 0
        for unit, records in enumerate(self.chunks.records(table.headers)):
            weight = times[table.first[unit] : table.first[unit + 1]]
            for name in totals:
                totals[name] += int((records[name].astype(np.int64) * weight).sum())
            truncated += int(weight[records["cut"] > 0].sum())
        return SplitStatistics(
            documents=len(ids),
            tokens=totals["length"],
            trainable_tokens=totals["trainable"],
            truncated=truncated,
            cut_tokens=totals["cut"],
            cut_trainable_tokens=totals["cut_trainable"],
        )
