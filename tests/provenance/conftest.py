"""Fixtures of a small corpus and of pipelines that write an audit log."""

import numpy as np
import pytest
from audit_runs import ROWS
from batches import pipeline_of

from grain_sft import WindowLayout, open_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "tokens.npy"
    np.random.default_rng(0).integers(2, 60_000, ROWS * 16 + 5).astype("uint16").tofile(path)
    return open_corpus([str(path)], dtype="uint16", eos_token_id=1)


@pytest.fixture
def make(corpus, tmp_path):
    """`make(**sampler)` returns a pipeline with an audit log. Without arguments, it has three epochs of 7 steps."""

    def pipeline(audit=tmp_path / "audit", **changed):
        options = {"global_batch_size": 16, "seed": 42, "epochs": 3, "order": "shuffle"} | changed
        return pipeline_of(WindowLayout(corpus, 16), run={"audit": audit}, **options)

    return pipeline
