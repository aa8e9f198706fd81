"""A row has at most as many tokens as int32 positions count."""

import numpy as np
import pytest

import grain_sft
from grain_sft import Host, PackedLayout, PaddedLayout, open_corpus
from grain_sft.errors import LayoutError


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    np.array([5, 6, 1] * 20, np.uint16).tofile(tmp_path / "tokens.npy")
    return open_corpus(str(tmp_path / "tokens.npy"), dtype="uint16", eos_token_id=1)


@pytest.mark.parametrize("length", [1 << 31, 1 << 40, 1 << 62, 1 << 70])
@pytest.mark.parametrize("layout", [PaddedLayout, PackedLayout])
def test_a_row_of_more_tokens_is_refused(corpus, layout, length):
    with pytest.raises(LayoutError, match=rf"sequence_length={length}: .* expected less than 2\*\*31"):
        layout(corpus, length)


@pytest.mark.parametrize("kind", ["windows", "padded", "packed"])
def test_a_config_of_such_rows_is_refused(corpus, kind):
    config = {
        "corpus": {"path": corpus.shards[0].path, "dtype": "uint16", "eos_token_id": 1},
        "layout": {"kind": kind, "sequence_length": 1 << 40},
        "sampler": {"seed": 0, "global_batch_size": 1},
    }
    with pytest.raises(LayoutError, match="sequence_length=1099511627776"):
        grain_sft.load(config, host=Host(0, 1))
