"""Configs of a few tokens that tests change."""

import numpy as np
import pytest
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
    return {
        "corpus": {"path": str(data / "mix.txt"), "dtype": "uint16", "eos_token_id": 5},
        "layout": {"kind": "windows", "sequence_length": 8},
        "sampler": {"order": "shuffle", "seed": 3, "global_batch_size": 6, "epochs": 2},
        "transforms": [{"ngram_filter": {"max_period": 5, "max_count": 3}}, "shift_targets"],
    }


@pytest.fixture
def chats(config, tmp_path):
    """The config of 40 short documents, packed."""
    write_olmo(tmp_path / "chats", documents(40))
    corpus = {"path": str(tmp_path / "chats"), "format": "olmo", "eos_token_id": EOS}
    layout = {"kind": "packed", "sequence_length": 32}
    sampler = {"order": "olmo", "seed": 3, "global_batch_size": 4, "epochs": 2}
    return {**config, "corpus": corpus, "layout": layout, "sampler": sampler}
