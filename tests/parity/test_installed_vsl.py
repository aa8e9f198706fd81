"""Batches of layout `olmo_vsl`, with rows of several lengths, equal those of installed OLMo-core: `pytest -m parity`.

tests/layout/test_olmo_vsl.py compares them with recorded values instead.
"""

import numpy as np
import pytest
from vsl_corpora import EPOCHS, IGNORED, RUNS, config_of, write_corpus

from grain_sft import GrainSftError, Host, load

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("number", range(0, len(RUNS), 2))
def test_every_batch_of_every_rank_is_that_of_olmo_cores_loader(tmp_path, number):
    """The seeds are not those of the recorded values, and the number of ranks is random."""
    pytest.importorskip("olmo_core.data")
    from make_vsl_golden import batches, olmo_vsl_loader

    drawn = np.random.default_rng(number)
    run = RUNS[number]
    rows = run.batch_tokens // run.longest
    ranks = int(drawn.choice([count for count in range(1, rows + 1) if rows % count == 0]))
    run = run._replace(seed=int(drawn.integers(1 << 16)), ranks=ranks)
    paths = write_corpus(run.corpus, tmp_path)
    try:
        loaders = [olmo_vsl_loader(run, paths, tmp_path / "work", rank) for rank in range(ranks)]
        expected = [[list(batches(loader, 1 + epoch)) for loader in loaders] for epoch in range(EPOCHS)]
    except (ValueError, AssertionError, IndexError):
        if run.longest != 256:  # at 256, only OLMo-core fails, because it stores the length as uint8
            with pytest.raises(GrainSftError):
                load(config_of(run, paths), host=Host(0, 1))
        return
    for rank in range(ranks):
        pipeline = load(config_of(run, paths), host=Host(rank, ranks))
        theirs = [batch for epoch in expected for batch in epoch[rank]]
        assert pipeline.num_steps == len(theirs)
        for step, (inputs, labels) in enumerate(theirs):
            batch = pipeline[step]
            np.testing.assert_array_equal(batch["inputs"], inputs)
            taken = np.where(batch["targets_segmentation"] != 0, batch["targets"], IGNORED)
            np.testing.assert_array_equal(taken, labels)
