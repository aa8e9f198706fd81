"""Fixtures: a cache of its own for each test, and the figures that a command writes."""

import json

import pytest

from grain_sft.cli.main import main


@pytest.fixture(autouse=True)
def cache(own_cache):
    """Keep caches below `tmp_path`."""


@pytest.fixture
def figures(tmp_path):
    """`figures(*words)`: the figures that a command writes to a file."""

    def measured(*words):
        out = tmp_path / "figures.json"
        assert main([*map(str, words), "--output", str(out)]) == 0
        return json.loads(out.read_text())

    return measured
