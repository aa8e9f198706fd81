"""Fixtures: corpora of a few tokens, and their configs, which tests change."""

import numpy as np
import pytest
from batches import sections
from sft_files import EOS, documents, write_olmo


@pytest.fixture
def data(tmp_path, write_tokens):
    """`tmp_path/data`: a mix of two files, 30 rows in all."""
    write_tokens("data/a.npy", np.arange(160), "uint16")
    write_tokens("data/b.npy", np.arange(80) + 1000, "uint16")
    (tmp_path / "data" / "mix.txt").write_text("web,a.npy\ncode,b.npy\n")
    return tmp_path / "data"


@pytest.fixture
def config(data):
    sampler = {"order": "shuffle", "seed": 3, "global_batch_size": 6, "epochs": 2}
    corpus = {"dtype": "uint16", "eos_token_id": 5}
    transforms = [{"ngram_filter": {"max_period": 5, "max_count": 3}}, "shift_targets"]
    return sections(data / "mix.txt", 8, corpus=corpus, layout="windows", **sampler) | {"transforms": transforms}


@pytest.fixture
def chats(config, tmp_path):
    write_olmo(tmp_path / "chats", documents(40))
    return config | sections(tmp_path / "chats", 32, corpus={"format": "olmo", "eos_token_id": EOS}, seed=3, epochs=2)
