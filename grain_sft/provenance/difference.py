"""Difference: the first step at which two pipelines have different batches, and what differs from there on."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, RunDocuments
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.lines import iter_trace

_BLOCK_ROWS = 1 << 16  # rows compared together


@dataclasses.dataclass(frozen=True)
class Difference:
    """How the batches of two pipelines differ.

    Attributes:
      reasons: A sentence for each part of their receipts that differs; "here" is the first pipeline.
      compared: Steps that were searched, up to the end of the longer run.
      first_step: First step with different batches, or that only one run has; None if all of `compared` are equal.
      counted: Steps over which rows and documents were counted, from `first_step` on.
      total_rows: Number of rows in `counted`. Where the batches of a step differ in size, the larger one counts.
      differing_rows: Number of these rows that differ.
      documents: Number of documents in `counted` that only the first pipeline reads, and number that only the second reads;
        None where a layout does not follow documents.
    """

    reasons: list[str]
    compared: range
    first_step: int | None
    counted: range
    total_rows: int = 0
    differing_rows: int = 0
    documents: tuple[int, int] | None = None


def difference(one: Pipeline, other: Pipeline, *, steps: range | None = None, count: int = 100) -> Difference:
    """Return the first step at which two pipelines have different global batches, why, and how many rows and documents differ.

    Pipelines whose receipts differ only in the sampler and in amendments are compared by row numbers and withdrawn documents,
    without reading tokens. Others are compared by their batches.

    Args:
      one, other: Pipelines of host 0 of 1.
      steps: Consecutive steps to search. None means all steps up to 10,000 after the last change of a schedule or amendment.
      count: Number of steps, from the first different one on, over which rows and documents are counted.

    Raises:
      RowIndexError: `steps` are not consecutive, or begin before step 0.
      SamplerError: A pipeline has several hosts.
      CorpusFileError, CorpusError: Files can't be read.
    """
    if any(each.sampler.host.count > 1 for each in (one, other)):
        raise SamplerError(
            "difference: expected pipelines of one host, which read whole batches. Load them with Host(0, 1)."
        )
    steps = range(_last_change(one, other) + 10_000) if steps is None else steps
    if steps.step != 1 or steps.start < 0:
        raise RowIndexError(f"{steps}: expected consecutive steps from 0 on. Give a range such as range(1000, 2000).")
    reasons = one.receipt.differences(other.receipt.parts)
    shorter, longer = sorted((one.end_step, other.end_step))
    steps = steps[: max(0, longer - steps.start)]
    shared = steps[: max(0, shorter - steps.start)]
    differs = _by_rows if _same_rows(one, other) else _by_batches
    first = next((step for step, rows in differs(one, other, shared) if rows), None)
    if first is None and len(shared) < len(steps):
        first = shared.stop  # only one run has this step
    if first is None:
        return Difference(reasons, steps, None, range(0))
    counted = range(first, min(first + count, longer))
    both = counted[: max(0, shorter - first)]
    sizes = np.maximum(_sizes(one, counted), _sizes(other, counted))
    total_rows, unpaired = int(sizes.sum()), int(sizes[len(both) :].sum())
    differing = unpaired + sum(rows for _, rows in differs(one, other, both))
    return Difference(reasons, steps, first, counted, total_rows, differing, _documents(one, other, counted))


def _sizes(pipeline: Pipeline, steps: range) -> npt.NDArray[np.int64]:
    """Return the number of rows in each of `steps`, int64 [steps]; 0 after the end of the run."""
    numbers = np.arange(steps.start, max(steps.start, min(steps.stop, pipeline.end_step)))
    return np.pad(pipeline.sampler.batch_sizes.begins(numbers)[1], (0, len(steps) - len(numbers)))


def _last_change(*pipelines: Pipeline) -> int:
    """Return the last step at which a schedule or an amendment takes effect."""
    steps = [step for each in pipelines for step in each.planned_sampler.changes]
    return max([0, *steps, *(amendment.step for each in pipelines for amendment in each.amendments)])


def _same_rows(one: Pipeline, other: Pipeline) -> bool:
    """Return whether equal row numbers mean equal rows, apart from withdrawn documents."""
    if max(len(one.stages), len(other.stages)) > 1:  # each stage has row numbers of its own
        return False
    parts, other_parts = one.receipt.parts, other.receipt.parts
    differing = (name for name in parts | other_parts if parts.get(name) != other_parts.get(name))
    return all(name == "sampler" or name.startswith("amendment ") for name in differing)


def _by_rows(one: Pipeline, other: Pipeline, steps: range) -> Iterator[tuple[int, int]]:
    """Yield each step and the number of rows that differ, by row numbers and withdrawn documents."""
    size = max(*one.sampler.batch_sizes.sizes, *other.sampler.batch_sizes.sizes)
    block = max(1, _BLOCK_ROWS // size)
    for begin in range(steps.start, steps.stop, block):
        some = range(begin, min(begin + block, steps.stop))
        both = [each.sampler.slots(some) for each in (one, other)]
        for step in some:
            pair = [slots.row[slice(*slots.step.searchsorted((step, step + 1)))] for slots in both]
            shorter = min(map(len, pair))
            differing = pair[0][:shorter] != pair[1][:shorter]
            if not differing.all() and any(each.at(step).withdrawals for each in (one, other)):
                withdrawn = [
                    _withdrawn(each, step, rows[:shorter]) for each, rows in zip((one, other), pair, strict=True)
                ]
                differing |= (withdrawn[0] != withdrawn[1]).any(axis=1)
            yield step, int(differing.sum()) + abs(len(pair[0]) - len(pair[1]))


def _withdrawn(pipeline: Pipeline, step: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether each token of `rows` is withdrawn at `step`, bool [rows, L]."""
    pipeline = pipeline.at(step)
    found = np.zeros((len(rows), pipeline.source.layout.width(rows)), np.bool_)
    for starts, stops in () if pipeline.withdrawals is None else pipeline.withdrawals.spans(rows, step):
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            found.reshape(-1)[start:stop] = True
    return found


def _by_batches(one: Pipeline, other: Pipeline, steps: range) -> Iterator[tuple[int, int]]:
    """Yield each step and the number of rows that differ, by the arrays of the batches."""
    for step in steps:
        pair = one[step], other[step]
        sizes = [len(next(iter(batch.values()))) for batch in pair]
        shorter = min(sizes)
        shapes, other_shapes = ({key: array.shape[1:] for key, array in batch.items()} for batch in pair)
        differing = np.full(shorter, shapes != other_shapes)
        for key in shapes if shapes == other_shapes else ():
            unequal = pair[0][key][:shorter] != pair[1][key][:shorter]
            differing |= unequal.any(axis=tuple(range(1, unequal.ndim)))
        yield step, int(differing.sum()) + max(sizes) - shorter


def _documents(one: Pipeline, other: Pipeline, steps: range) -> tuple[int, int] | None:
    """Return how many documents only `one` reads in `steps`, and how many only `other`; None if a layout follows none.

    Documents of different files are the same if they come from the same record of an input.
    """
    stages = (*one.stages, *other.stages)
    if not all(part.follows_documents for each in stages for part in each.source.layout.parts.values()):
        return None
    both = RunDocuments([*one.documents.layouts, *other.documents.layouts])
    seen = [_seen(each, range(steps.start, min(steps.stop, each.end_step)), both) for each in (one, other)]
    only = [{seen[at][number] for number in seen[at].keys() - seen[1 - at].keys()} for at in range(2)]
    return len(only[0] - only[1]), len(only[1] - only[0])


def _seen(pipeline: Pipeline, steps: range, run: RunDocuments) -> dict[int, tuple[str, int]]:
    """Return the documents with a token in `steps` that is not withdrawn, by number in `run`: (source, record), or ("", number)
    for a document without a record."""
    found: dict[int, tuple[str, int]] = {}
    for stage in pipeline.stages:
        own = range(max(steps.start, stage.first_step), min(steps.stop, stage.end_step))
        for lines in iter_trace(stage, own, trainable=False) if own else ():
            kept = (lines.instance != FILL_ROW) & (lines.document >= 0)
            if lines.withdrawn is not None:
                kept &= lines.withdrawn < lines.stop - lines.start
            some = lines.select(kept)
            numbers = run.of(stage.source.layout, some.document).tolist()
            columns = zip(numbers, some.source.tolist(), some.record.tolist(), strict=True)
            found |= {
                number: ("", number) if record < 0 else (some.source_names[source], record)
                for number, source, record in columns
            }
    return found
