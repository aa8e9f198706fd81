"""Verifying rows that `grain-sft pack --materialize` wrote: that positions, segments and targets fit the documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import GrainSftError
from grain_sft.layout.materialized import MaterializedLayout
from grain_sft.source import NpyDataSource
from grain_sft.transforms import ShiftTargets
from grain_sft.verify.finding import Report

_BLOCK_TOKENS = 1 << 20


def check_written_rows(report: Report, corpus: Corpus) -> None:
    """Check every row: what stands beside its tokens is what its documents and its loss make of them."""
    try:
        layout = MaterializedLayout(corpus)
        source = NpyDataSource(layout)
        rows, length = len(layout), layout.sequence_length
        step = max(1, _BLOCK_TOKENS // length)
        shift = ShiftTargets()
        per_shard = np.cumsum([shard.num_tokens // length for shard in corpus.shards])
        for begin in range(0, rows, step):
            wanted = np.arange(begin, min(begin + step, rows))
            element = source.read(wanted)
            segments, positions = _from_documents(layout, wanted)
            read = source.read_rows(wanted)
            targets = None if read is None else read.target_segment_ids
            expected = {"segment_ids": segments, "positions": positions}
            found = {"segment_ids": element["segment_ids"], "positions": element["positions"]}
            if targets is not None:
                expected["target_segment_ids"] = shift.map(element)["targets_segmentation"]
                found["target_segment_ids"] = targets
            for name, array in expected.items():
                wrong = np.flatnonzero((found[name] != array).any(axis=1))
                if len(wrong):
                    row = int(wanted[wrong[0]])
                    shard = int(np.searchsorted(per_shard, row, side="right"))
                    sentence = (
                        f"{name} of {len(wrong):,} rows from here on are not what their documents and their loss make."
                    )
                    report.wrong("rows", corpus.shards[shard].path, sentence, f"row {row}")
                    return
        report.figures["rows"] = rows
    except GrainSftError as error:
        report.wrong("rows", corpus.shards[0].path, str(error))


def _from_documents(
    layout: MaterializedLayout, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Segment ids and positions [rows, L] as the boundary files have them."""
    pieces = layout.pieces(rows)
    length = layout.sequence_length
    segments = np.zeros((len(rows), length), np.int32)
    positions = np.zeros((len(rows), length), np.int32)
    assert pieces.segment is not None and pieces.position is not None
    places = np.repeat(pieces.row * length + pieces.column, pieces.length)
    within = np.arange(len(places)) - np.repeat(np.cumsum(pieces.length) - pieces.length, pieces.length)
    segments.reshape(-1)[places + within] = np.repeat(pieces.segment, pieces.length)
    positions.reshape(-1)[places + within] = np.repeat(pieces.position, pieces.length) + within
    return segments, positions
