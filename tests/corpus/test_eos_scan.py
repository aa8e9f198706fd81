"""Documents by EOS, alone or before a BOS: wherever the blocks that are read at once end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import open_corpus
from grain_sft.corpus import documents

EOS, BOS = 1, 2


def plainly(files: list[list[int]], bos: int | None) -> list[tuple[int, int]]:
    """(first token, tokens) of each document: one token after the other."""
    found, before = [], 0
    for tokens in files:
        start = 0
        for at, token in enumerate(tokens):
            last = at + 1 == len(tokens)
            if token == EOS and (bos is None or last or tokens[at + 1] == bos):
                found.append((before + start, at + 1 - start))
                start = at + 1
        before += len(tokens)
    return found


@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(st.lists(st.sampled_from([EOS, EOS, BOS, BOS, 3, 4]), max_size=25), min_size=1, max_size=4),
    bos=st.sampled_from([None, BOS, EOS]),
    block=st.integers(1, 9),
)
def test_blocks_change_nothing(files, bos, block):
    with tempfile.TemporaryDirectory() as temp, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_SCAN_BYTES", 2 * block)
        paths = [Path(temp) / f"{number}.npy" for number in range(len(files))]
        for path, tokens in zip(paths, files, strict=True):
            np.array(tokens, np.uint16).tofile(path)
        start, length = documents.by_eos(open_corpus(paths, dtype="uint16", eos_token_id=EOS), bos)
        assert list(zip(start.tolist(), length.tolist(), strict=True)) == plainly(files, bos)
