"""Job: one preparation from its inputs to a finished corpus, in steps that any runner may carry out.

The steps: `scan` the units (in any order), `begin`, `render` the units (in any order), `plan`, write the plan's tasks
(in any order), `finish`. Each step's result is a file that is there whole or not at all, so a job that was stopped goes on
where it was; and none depends on the others' order, so every runner makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sft.errors import PrepareError
from grain_sft.prepare import chunk, inputs
from grain_sft.prepare.chunks import Chunks
from grain_sft.prepare.inputs import Input, Scan, Unit
from grain_sft.prepare.request import VERSION, Request, hash_of
from grain_sft.prepare.splits import split
from grain_sft.prepare.store import Documents, Ids, Table
from grain_sft.prepare.target import MANIFEST, Target
from grain_sft.prepare.work import Renderer, Work
from grain_sft.prepare.writers import FORMATS, Format, Plan, SplitStatistics
from grain_sft.storage import files


@dataclasses.dataclass(frozen=True)
class Job:
    """A preparation whose inputs have been looked at.

    Attributes:
      work: what documents depend on.
      target: where the corpus goes.
      units: of all inputs.
      firsts: the number of each unit's first record in its input.
      input_digests: of the inputs' contents.
      input_records: lines or rows of each input.
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
        """The job of a request, from the scans of all its units.

        Raises:
          PrepareError: an unknown template or format.
          GrainSftError: the tokenizer can't be loaded.
        """
        if request.format not in FORMATS:
            raise PrepareError(f"format {request.format!r}: expected one of {', '.join(FORMATS)}.")
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
        """The format that is written."""
        return FORMATS[self.work.request.format]

    @property
    def chunks(self) -> Chunks:
        """Where rendered units are kept."""
        return Chunks(self.target.chunks, self.work.key)

    def identity(self) -> dict[str, Any]:
        """All that decides the output, as JSON: what a later run is compared with."""
        request = self.work.request.as_dict()
        described = [
            {"path": entry.path, "size": entry.size, "records": records, "digest": digest}
            for entry, digest, records in zip(self.work.inputs, self.input_digests, self.input_records, strict=True)
        ]
        tokenizer = json.loads(json.dumps(self.work.tokenizer.description()))
        return {"key": self.work.key, "request": request, "inputs": described, "tokenizer": tokenizer}

    def render(self, unit: Unit, renderer: Renderer) -> None:
        """Make a unit's chunk, if it is not there."""
        if self.chunks.header(unit.number) is None:
            self.chunks.write(unit.number, renderer.chunk(unit, self.firsts[unit.number]))

    def plan(self) -> Plan:
        """What to write, when all units are rendered.

        Raises:
          PrepareError: no document is left, or the format can't hold them.
        """
        table = Table.of(self.chunks, len(self.units))
        splits = split(self._datasets(table), table.lengths, self.work.request, self.format.rule)
        identity = self.identity()
        plan = Plan(
            folder=self.target.stage,
            request=self.work.request,
            tokenizer=identity["tokenizer"],
            documents=Documents(self.chunks, table, [unit.input for unit in self.units]),
            splits=splits,
            statistics={name: self._count(table, ids) for name, ids in splits.items()},
            binary=all(header.binary for header in table.headers),
            source_names=[entry.path for entry in self.work.inputs],
        )
        for name, ids in splits.items():
            if not len(ids):
                rejected = [entry for header in table.headers for entry in header.rejected]
                dropped = [f"{count} dropped ({reason})" for reason, count in self.dropped(table.headers).items()]
                first = "".join(
                    f" The first: {entry['file']}:{entry['line']}: {entry['reason']}" for entry in rejected[:1]
                )
                raise PrepareError(
                    f"no document is left for the split {name!r}: {len(table.lengths)} valid records, "
                    f"{', '.join([*dropped, f'{len(rejected)} rejected'])}.{first}"
                )
        self.format.check(plan)
        return plan

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Write what is left, and give the corpus its name; returns its manifest."""
        manifest = self.complete(plan)
        self.target.publish()
        return manifest

    def complete(self, plan: Plan) -> dict[str, Any]:
        """Write what is left, the manifest last, and return that."""
        self.format.finish(plan)
        for name, data in self.work.tokenizer.files().items():
            files.write_bytes(plan.path("tokenizer", name), data)
        headers = self.chunks.complete_headers(len(self.units))
        rejected = [entry for header in headers for entry in header.rejected]
        manifest = {
            "format": self.work.request.format,
            "version": VERSION,
            **self.identity(),
            "splits": {name: dataclasses.asdict(counts) for name, counts in plan.statistics.items()},
            "dropped": self.dropped(headers),
            "rejected": len(rejected),
            "without_final_eos": sum(header.unended for header in headers),
            "with_inner_eos": sum(header.inner_eos for header in headers),
        }
        if self.work.request.on_error == "skip":
            with files.atomic_write(self.target.rejected) as file:
                for entry in rejected:
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        plan.write_json(MANIFEST, manifest)
        return manifest

    def dropped(self, headers: Sequence[chunk.Header]) -> dict[str, int]:
        """Records that were dropped, by reason."""
        counts = np.zeros(len(chunk.DROPPED), np.int64)
        for records in self.chunks.all_records(headers):
            counts += np.bincount(records["dropped"], minlength=len(chunk.DROPPED))
        names = [text.format(min_tokens=self.work.template.min_tokens) for text in chunk.DROPPED]
        return {name: int(count) for name, count in zip(names[1:], counts[1:], strict=True) if count}

    def _datasets(self, table: Table) -> list[Ids]:
        """The documents of each dataset, in order."""
        of_unit = np.array([self.work.inputs[unit.input].dataset for unit in self.units], np.int64)
        found = []
        for dataset in range(len(self.work.request.datasets)):
            here = np.flatnonzero(of_unit == dataset)
            bounds = (int(table.first[here[0]]), int(table.first[here[-1] + 1])) if len(here) else (0, 0)
            found.append(np.arange(*bounds, dtype=np.int32 if len(table.lengths) < 1 << 31 else np.int64))
        return found

    def _count(self, table: Table, ids: Ids) -> SplitStatistics:
        """The statistics of the documents `ids`; one that is there twice counts twice."""
        times = np.zeros(len(table.lengths), np.uint32)
        np.add.at(times, ids, 1)
        totals: Mapping[str, int] = dict.fromkeys(("length", "trainable", "cut", "cut_trainable"), 0)
        truncated = 0
        for unit, records in enumerate(self.chunks.all_records(table.headers)):
            weight = times[table.first[unit] : table.first[unit + 1]]
            totals = {
                name: value + int((records[name].astype(np.int64) * weight).sum()) for name, value in totals.items()
            }
            truncated += int(weight[records["cut"] > 0].sum())
        return SplitStatistics(
            documents=len(ids),
            tokens=totals["length"],
            trainable_tokens=totals["trainable"],
            truncated=truncated,
            cut_tokens=totals["cut"],
            cut_trainable_tokens=totals["cut_trainable"],
        )
