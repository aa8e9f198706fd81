"""A trace of packed rows has the rows that OLMo-core's loader gives each rank in two epochs (make_packed_golden.py)."""

import numpy as np
import pytest
from batches import golden_values, pipeline_of
from packed_corpora import PACKED_CASES, digest_of_files, write_case
from packed_layouts import open_case, packing_of, row_digests

from grain_sft import Host, PackedLayout
from grain_sft.provenance import trace


@pytest.mark.parametrize("run", golden_values("olmo_packed_steps.json")["runs"], ids=lambda run: run["case"])
def test_every_rank_has_the_rows_that_olmo_core_gives_it(tmp_path, run):
    case = next(case for case in PACKED_CASES if case.name == run["case"])
    written = write_case(case, tmp_path)
    assert digest_of_files([*written[0], *written[1]]) == run["corpus"], "the corpus is not that of the golden file"
    corpus, options = open_case(case, tmp_path, written), packing_of(case)
    layout = PackedLayout(corpus, case.sequence_length, cache_dir=tmp_path, **options)
    assert "".join(row_digests(case, layout)[0]) == run["rows"]
    pipeline = pipeline_of(layout, global_batch_size=run["batch"], seed=run["seed"], epochs=run["epochs"])
    steps = range(len(pipeline))
    assert len(steps) == len(run["steps"])
    for rank in range(run["ranks"]):
        found = trace(pipeline, steps, host=Host(rank, run["ranks"]))
        rows = np.unique(np.stack([found.step, found.row, found.instance]), axis=1)[2]
        assert rows.reshape(len(steps), -1).tolist() == [ranks[rank] for ranks in run["steps"]]
