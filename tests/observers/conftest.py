"""Fixtures of the tests of observers."""

import logging

import numpy as np
import pytest
from watched import LENGTH, ROWS, STALL, Logged


@pytest.fixture
def folder(tmp_path, write_tokens):
    """Two files with 40 rows in all. Row 3 repeats one token."""
    tokens = np.arange(ROWS * LENGTH)
    tokens[3 * LENGTH : 4 * LENGTH] = 7
    for number, half in enumerate(np.split(tokens, 2)):
        write_tokens(f"tokens/{number}.npy", half)
    return tmp_path / "tokens"


@pytest.fixture(autouse=True)
def short_stalls(monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_STALL_SECONDS", str(STALL))


@pytest.fixture
def log(listen):
    handler = Logged()
    listen(logging.getLogger("absl"), handler)
    return handler
