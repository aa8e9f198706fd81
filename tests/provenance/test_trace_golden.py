"""The traced order of packed rows against OLMo-core's real loader, two epochs, rank by rank (make_packed_golden.py)."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from batches import pipeline_of
from packed_corpora import EOS, PACKED_CASES, PAD, digest_of_files, olmo_doc_lengths, row_digest, write_case

from grain_sft import Host, PackedLayout, open_corpus
from grain_sft.provenance import trace

RUNS = json.loads((Path(__file__).parents[1] / "golden" / "olmo_packed_steps.json").read_text())["runs"]
DIGITS = 8


def digest_of_lines(case, found, lines, tokens, masks):
    """The golden file's digest of a row, of nothing but the lines of its trace and the files."""
    shape = case.sequence_length
    row, mask, segments, places = np.full(shape, PAD), np.zeros(shape, bool), np.zeros(shape, int), []
    column = 0
    for line in lines.tolist():
        shard, start, stop = int(found.shard[line]), int(found.start[line]), int(found.stop[line])
        end = column + stop - start
        row[column:end] = np.fromfile(tokens[shard], case.dtype)[start:stop]
        mask[column:end] = np.fromfile(masks[shard], bool)[start:stop]
        segments[column:end] = found.segment[line]
        places.append([shard, start, stop])
        column = end
    return row_digest(row, mask, olmo_doc_lengths(segments, row, case.bos), places)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["case"])
def test_every_step_and_rank_is_what_olmo_cores_loader_gives(tmp_path, run):
    case = next(case for case in PACKED_CASES if case.name == run["case"])
    tokens, masks = write_case(case, tmp_path)
    assert digest_of_files([*tokens, *masks]) == run["corpus"], "numpy draws other corpora than it did"
    corpus = dataclasses.replace(open_corpus(tmp_path, dtype=case.dtype, eos_token_id=EOS), pad_token_id=PAD)
    options = {"long_documents": case.long, "source_group_size": case.group, "cache_dir": tmp_path}
    layout = PackedLayout(corpus, case.sequence_length, **options)
    pipeline = pipeline_of(layout, global_batch_size=run["batch"], seed=run["seed"], epochs=run["epochs"])
    steps = range(len(pipeline))
    assert len(steps) == len(run["steps"])
    for rank in range(run["ranks"]):
        found = trace(pipeline, steps, host=Host(rank, run["ranks"]))
        rows = np.unique(np.stack([found.step, found.row, found.instance]), axis=1)[2]
        assert rows.reshape(len(steps), -1).tolist() == [ranks[rank] for ranks in run["steps"]]
    found = trace(pipeline, steps)
    digests = [run["rows"][at : at + DIGITS] for at in range(0, len(run["rows"]), DIGITS)]
    assert len(digests) == len(layout)
    for instance in np.unique(found.instance).tolist()[:: max(1, len(layout) // 60)]:
        lines = np.flatnonzero(found.instance == instance)
        lines = lines[found.epoch[lines] == found.epoch[lines[0]]]
        assert digest_of_lines(case, found, lines, tokens, masks) == digests[instance]
