"""Verification of a pipeline (its plans, layout, sampler and batches), and of a plan file."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.corpus import Corpus, DocumentFinder, Documents
from grain_sft.errors import GrainSftError
from grain_sft.layout import COUNTS, FILL_ROW, Layout, check_columns, check_repeated, checked_pieces, plan_columns
from grain_sft.pipeline import Pipeline, batch_of_arrays, takes_loss, why_no_loss
from grain_sft.source import Element
from grain_sft.storage import artifact, files
from grain_sft.transforms import trait
from grain_sft.types import Bools
from grain_sft.verify.finding import Report

_FIRST_STEPS = 8  # in one of these first steps, a target must take loss
_BLOCK_ROWS = 1 << 12  # rows checked at a time
_PAIRS_CHECKED = 1000  # preference pairs that a fast check reads
_BLOCK_TOKENS = 1 << 22  # tokens read at a time


def check_pipeline(report: Report, pipeline: Pipeline, where: str, vocab_size: int | None) -> None:
    """Check the plans, layout, sampler, first and last batch, and loss of a pipeline."""
    layout, sums = pipeline.source.layout, Counter[str]()
    for part in layout.parts.values():
        for plan in part.plans:
            assert part.packing is not None
            # the arrays that the file of the plan has
            arrays = vars(plan) | {"counts": np.array(list(plan.counts.values()), np.int64)}
            check_plan(report, where, arrays, dataclasses.asdict(part.packing), part.corpus)
            if tokens := plan.counts["dropped_tokens"]:
                found = f"leaves out {plan.counts['dropped_documents']:,} documents of {tokens:,} tokens"
                report.note("plan", where, f"algorithm {part.packing.algorithm} {found}.")
            # `check_plan` has set these figures to those of one plan
            sums.update({name: report.figures.get(name, 0) for name in ("pieces", *COUNTS)})
    report.figures |= {**sums, "rows": len(layout), "receipt": pipeline.receipt.code}  # replaces a plan's "rows"
    if report.has_wrong("plan"):
        return
    _check_layout(report, layout, where)
    _check_sampler(report, pipeline, where)
    _check_batches(report, pipeline, where, vocab_size)
    if layout.of_pairs and not report.has_wrong("batches"):
        _check_pairs(report, pipeline, where)
    steps = range(pipeline.first_step, min(pipeline.first_step + _FIRST_STEPS, pipeline.end_step))
    if not report.has_wrong("batches") and all(takes_loss(pipeline[step]) is False for step in steps):
        reason = why_no_loss(pipeline, steps)
        report.wrong("loss", where, f"no target takes loss in the first {len(steps)} steps: {reason}")


def _check_layout(report: Report, layout: Layout, where: str) -> None:
    """Check the pieces of the rows of each part of a layout. A fast check reads only the first and last rows.

    Each piece must lie in its shard and its document, and fit its row. A row's pieces must be the same in every
    call of `pieces`, whatever other rows the call has.
    """
    for name, part in layout.parts.items():
        count, source = len(part), f"source {name}, " if name else ""
        for begin in range(0, count, _BLOCK_ROWS) if report.full else sorted({0, max(0, count - _BLOCK_ROWS)}):
            rows = np.arange(begin, min(begin + _BLOCK_ROWS, count))
            with report.errors("layout", where, f"{source}rows {begin} to {begin + len(rows) - 1}"):
                check_repeated(checked_pieces(part.pieces(rows), part, rows, part.documents), part, rows)
            if report.has_wrong("layout"):
                return


def _check_sampler(report: Report, pipeline: Pipeline, where: str) -> None:
    """Check that the sampler's rows exist, and that a new sampler, which has nothing cached, returns the same rows.

    A full check on a single host also finds rows that the first epoch reads twice.
    """
    sampler, count = pipeline.sampler, len(pipeline.source)
    new = sampler.with_host(sampler.host)
    for step in _end_steps(pipeline):
        rows = sampler.rows(step)
        outside = rows[(rows != FILL_ROW) & ((rows < 0) | (rows >= count))]
        if len(outside):
            report.wrong("sampler", where, f"reads row {outside[0]}; the layout has {count}. Fix the order.", f"step {step}")
            return
        # the rows of the slots in reverse order, turned back
        again = new.rows_at(step, np.arange(len(rows))[::-1])[::-1]
        if (changed := rows != again).any():
            slot, orders = changed.argmax(), ", ".join(dict.fromkeys(stream.source.order for stream in sampler.streams))
            sentence = f"order {orders} returns row {rows[slot]} in one call and row {again[slot]} in another"
            report.wrong("sampler", where, f"{sentence}. Let it depend only on its arguments.", f"step {step}")
            return
    # With `runs_on`, a step may have rows of two epochs. One host of several reads only its own rows.
    steps = sampler.steps_per_epoch
    if not report.full or steps is None or sampler.runs_on or sampler.host.count > 1:
        return
    is_read = np.zeros(count, np.bool_)  # whether a step so far reads each row
    for step in range(pipeline.first_step, min(pipeline.end_step, pipeline.first_step + steps)):
        rows = sampler.rows(step)
        rows = rows[rows != FILL_ROW]
        unique, times = np.unique(rows, return_counts=True)
        repeated = unique[(times > 1) | is_read[unique]]
        is_read[unique] = True
        if len(repeated):
            report.wrong("sampler", where, f"reads row {repeated[0]} twice in its first epoch. Fix the order.", f"step {step}")
            return
    report.figures["rows_of_first_epoch"] = int(np.count_nonzero(is_read))


def _end_steps(pipeline: Pipeline) -> list[int]:
    """Return the first and the last step, or the first two of a run that never ends."""
    first = pipeline.first_step
    last = first + 1 if pipeline.end_step == sys.maxsize else pipeline.end_step - 1
    return sorted({first, last})


def _check_batches(report: Report, pipeline: Pipeline, where: str, vocab_size: int | None) -> None:
    """Check the arrays of the first and the last batch."""
    first_shapes: dict[str, Any] = {}
    trims = any(trait(transform, "trims_columns") for transform in pipeline.transforms)
    positions_apart = any(trait(transform, "positions_apart") for transform in pipeline.transforms)
    sizes = {pipeline.sampler.batch_sizes.at(step) for step in _end_steps(pipeline)}
    shapes_may_change = trims or len(sizes) > 1 or pipeline.source.layout.row_lengths
    for step in _end_steps(pipeline):
        with report.errors("batches", where, f"step {step}"):
            batch = batch_of_arrays(pipeline, step)
            shapes = {key: [list(np.shape(array)), np.asarray(array).dtype.name] for key, array in batch.items()}
            first_shapes = first_shapes or shapes
            sentence = wrong_in_batch(batch, vocab_size, positions_apart=positions_apart)
            if not shapes_may_change and shapes != first_shapes:
                sentence = f"its arrays are {shapes}, but {first_shapes} in step {pipeline.first_step}. Fix the transforms."
            if sentence:
                report.wrong("batches", where, sentence, f"step {step}")
    report.figures["batch"] = first_shapes


def _check_pairs(report: Report, pipeline: Pipeline, where: str) -> None:
    """Note how many preference pairs teach nothing, because the layout cuts both responses to the same tokens or to none."""
    layout, found = pipeline.source.layout, np.zeros(0, np.int64)
    count = len(layout) if report.full else min(len(layout), _PAIRS_CHECKED)
    block = max(1, _BLOCK_TOKENS // layout.sequence_length)
    for begin in range(0, count, block):
        element = pipeline.source.read(np.arange(begin, min(begin + block, count)))
        for transform in pipeline.transforms:
            element = transform.map(element)
        if "chosen_ids" not in element:  # a transform has made another kind of batch
            return
        equal = (element["chosen_ids"] == element["rejected_ids"]).all(axis=1)
        found = np.append(found, begin + np.flatnonzero(equal))
    report.figures["equal_responses"] = len(found)
    if len(found):
        first = layout.spans(int(found[0]))[0].document
        sentence = f"{len(found):,} of {count:,} pairs have equal responses in the layout, such as document {first}"
        fix = "Give a larger sequence_length or a smaller prompt_length, or leave these pairs out"
        report.note("loss", where, f"{sentence}. {fix}.", f"row {found[0]}")


def wrong_in_batch(batch: Element, vocab_size: int | None, *, positions_apart: bool = False) -> str:
    """Return a sentence about an error in a batch of `ShiftTargets`; "" for a correct batch or another kind of batch.

    With `positions_apart`, a trait of transforms, positions need not follow the segments and are not checked.
    """
    names = ("inputs", "targets", "inputs_position", "inputs_segmentation", "targets_segmentation")
    if ("inputs" in batch) != ("targets" in batch):
        return "has only one of the arrays `inputs` and `targets`. Return both."
    if any(name not in batch for name in names):
        return ""
    if wrong_types := {name: batch[name].dtype.name for name in names if batch[name].dtype.kind not in "iu"}:
        return f"has the dtypes {wrong_types}; expected int32. Fix the transforms."
    inputs, targets, positions, segments, target_segments = (batch[name] for name in names)
    shapes = {key: array.shape for key, array in batch.items() if key.startswith(("inputs", "targets"))}
    if len(set(shapes.values())) > 1:
        return f"its arrays are of different shapes: {shapes}. Fix the transforms."
    highest = max(inputs.max(initial=0), targets.max(initial=0))
    if vocab_size is not None and highest >= vocab_size:
        return f"holds the token {highest}, but the vocabulary has {vocab_size} ids. Correct the dtype or the tokenizer."
    # whether each token, after the first of the row, continues the segment of the token before it
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    wrong: dict[str, Bools] = {}
    if not positions_apart:
        # Where `diff` is not 0, a segment begins, or it continues after padding that replaces withdrawn tokens.
        after_padding = np.pad(segments[:, :-1] == 0, ((0, 0), (1, 0)))
        begins_wrong = np.diff(segments, axis=1, prepend=0) * positions != 0
        wrong["a segment does not begin at position 0"] = begins_wrong & ~after_padding
        wrong["a position is not 1 more than the position before it"] = inside & (np.diff(positions, axis=1) != 1)
    in_loss = target_segments != 0
    wrong["a target is not the token that follows"] = inside & in_loss[:, :-1] & (targets[:, :-1] != inputs[:, 1:])
    wrong["a target takes loss in another segment than its input"] = in_loss & (target_segments != segments)
    for sentence, mask in wrong.items():
        if mask.any():
            row, column = np.argwhere(mask)[0].tolist()
            return f"{sentence}: row {row} of the batch, column {column}. Fix the layout or the transforms."
    return ""


def check_plan_file(report: Report, path: str, corpus: Corpus | None) -> None:
    """Check the checksum and the rows of a plan file, and compare its documents with those of `corpus`, if given."""
    if files.is_remote(path):
        report.wrong("files", path, "is in a bucket; expected a plan on a local disk. Copy it to this machine.")
        return
    try:
        arrays, depends = artifact.open_file(Path(path))
    except GrainSftError as error:
        report.wrong("files", path, str(error))
        return
    report.figures |= {"bytes": Path(path).stat().st_size, "arrays": sorted(arrays)}
    recipe = depends.get("recipe")  # in a plan, its packing options
    if not isinstance(recipe, dict) or not isinstance(recipe.get("sequence_length"), int) or "plan" not in depends:
        report.note("plan", path, f"the checksum is right, but the file holds {', '.join(sorted(arrays))} and no plan.")
        return
    if corpus is None:
        report.note("plan", path, "the plan was not compared with documents. Give their corpus with --corpus.")
    else:
        with report.errors("boundaries", corpus.shards[0].path):
            stated, own = depends.get("documents"), _found_in(corpus, recipe).content
            if stated != own:
                fix = "Give the corpus of the plan"
                report.wrong("plan", path, f"is a plan of the documents {stated}, but the corpus has {own}. {fix}.")
    if report.sound:
        try:
            # the first argument is the number of the corpus's tokens, which a plan does not state
            check_columns(np.iinfo(np.int64).max, recipe["sequence_length"], arrays)
        except ValueError as error:
            report.wrong("plan", path, f"{error}.")
        else:
            check_plan(report, path, arrays, recipe, corpus)


def _found_in(corpus: Corpus, recipe: Mapping[str, Any]) -> DocumentFinder:
    """Return the finder of the documents that a plan with the options `recipe` packs."""
    return corpus.find_documents(recipe.get("boundaries", "auto"), recipe.get("bos_token_id"))


def check_plan(report: Report, where: str, arrays: artifact.Arrays, recipe: Mapping[str, Any], corpus: Corpus | None) -> None:
    """Check that no row of a plan has too many pieces, that no token is in two pieces, and that pieces lie in their documents.

    Args:
      arrays: Columns of the plan, which `check_columns` has accepted.
      recipe: Packing options of the plan.
      corpus: Corpus with the documents. Without a corpus, pieces are not compared with documents.
    """
    start, length, document, ends = (arrays[name] for name in ("start", "length", "document", "ends"))
    report.figures |= {"rows": len(ends), "pieces": len(start)}
    counts, max_segments = np.diff(ends, prepend=0), recipe.get("max_segments")
    if isinstance(max_segments, int) and (crowded := counts > max_segments).any():
        row = crowded.argmax()
        sentence = f"holds {counts[row]} documents; max_segments is {max_segments}.{_count(crowded, 'Rows')}"
        report.wrong("plan", where, sentence, f"row {row}")
    # Sorted by document and start: if two pieces of a document overlap, some piece begins before the previous piece ends.
    order = np.lexsort((start, document))
    repeated = np.zeros(len(order), np.bool_)
    overlaps = start[order[1:]] < (start + length)[order[:-1]]
    repeated[order[1:]] = (document[order[1:]] == document[order[:-1]]) & overlaps
    if repeated.any():
        piece = repeated.argmax()
        row = np.searchsorted(ends, piece, side="right")
        sentence = f"is in two pieces of document {document[piece]}, one in row {row}.{_count(repeated, 'Pieces')}"
        report.wrong("plan", where, sentence, f"token {start[piece]}")
    if corpus is not None:
        with report.errors("boundaries", corpus.shards[0].path):
            _check_documents(report, where, arrays, _found_in(corpus, recipe).documents)


def _check_documents(report: Report, where: str, arrays: artifact.Arrays, documents: Documents) -> None:
    """Check that each piece lies in its document, and that the plan's counts match its pieces."""
    start, length, document, ends = (arrays[name] for name in ("start", "length", "document", "ends"))
    absent = (document < 0) | (document >= len(documents))
    if absent.any():
        at = absent.argmax()
        sentence = f"is of document {document[at]}, but there are {len(documents)} documents.{_count(absent, 'Pieces')}"
        report.wrong("plan", where, sentence, f"piece {at}")
        return
    begin, stop = documents.start[document], start + length
    end = begin + documents.length[document]
    outside = (start < begin) | (stop > end)
    if outside.any():
        at = outside.argmax()
        found, own = f"tokens {start[at]} to {stop[at]}", f"document {document[at]} is tokens {begin[at]} to {end[at]}"
        report.wrong("plan", where, f"is {found}, but {own}.{_count(outside, 'Pieces')}", f"piece {at}")
        return
    expected = plan_columns(documents, document, start, length, ends)["counts"]
    for name, stated, counted in zip(COUNTS, arrays["counts"].tolist(), expected.tolist(), strict=True):
        report.figures[name] = counted
        if stated != counted:
            report.wrong("plan", where, f"states {stated} {name.replace('_', ' ')}, but its rows give {counted}.")


def _count(wrong: Bools, what: str) -> str:
    """Return the number of True values as text, such as " Rows with this error: 4."; "" for one."""
    count = np.count_nonzero(wrong)
    return f" {what} with this error: {count:,}." if count > 1 else ""
